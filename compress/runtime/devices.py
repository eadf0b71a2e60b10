"""Where the small commands run a model: the option `device`.

torch is imported where it is asked: it takes seconds, and other options may be wrong.
"""

DEVICES = ("auto", "cpu", "cuda")


def problems(device: str) -> list[str]:
    """What keeps `device` from being one to run on; nothing where it is."""
    if device not in DEVICES:
        return [f"device is {device!r}; wanted auto, cpu or cuda"]
    if device == "cuda" and picked("auto") == "cpu":
        return ["device is cuda, but torch sees no GPU here; use device=cpu"]
    return []


def picked(device: str) -> str:
    """`cuda` or `cpu`: for `auto` a GPU if there is one."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
