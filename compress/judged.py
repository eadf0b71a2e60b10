"""A checkpoint that is there already, made here or by another tool: `checkpoint=FOLDER`."""

import os
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from compress.errors import UserError
from compress.model_path import home, unfit
from compress.quantization_config import group_specs
from compress.runtime import loader
from compress.sizes import tensor_elements
from compress.source import describe
from compress.tensors import TensorFiles

JUDGING = ("serve", "score", "report")
"""The stages that read a checkpoint and make none."""


def problem(folder: str, stages: list[str]) -> str | None:
    """What keeps `checkpoint=folder` from being judged by these stages, in words."""
    if missing := unfit(folder):
        return missing
    others = [name for name in stages if name not in JUDGING]
    if others:
        return (
            f"checkpoint={folder} is judged as it is, but stages has {', '.join(others)}; "
            f"wanted recipe=judge, or stages=[{','.join(JUDGING)}]"
        )
    return None


def refuse(folder: str, original: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Raise UserError where the checkpoint does not load, as far as its config.json and the headers
    of its weights tell, or its outputs are not for the tokens of the original's.
    """
    place = home(folder)
    try:
        found = describe(place)
        if not isinstance(found, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise UserError(
            f"{place / 'config.json'}: damaged or cut short ({error}); get the checkpoint again"
        ) from error
    size = found.get("vocab_size", found.get("text_config", {}).get("vocab_size"))
    wanted = original.get_text_config().vocab_size
    if size not in (None, wanted):
        raise UserError(
            f"checkpoint={folder}: a vocabulary of {size}, the original's is {wanted}; wanted a "
            "checkpoint of the model that model.path names"
        )
    loader.check(place, trust_remote_code=trust_remote_code)


def name_of(folder: str) -> str:
    """The folder's name; of one that is called `checkpoint`, as in runs/RECIPE/MODEL/checkpoint,
    those of the two folders around it too: runs of several recipes differ in these alone.
    """
    path = Path(os.path.abspath(home(folder)))
    return "-".join(path.parts[1:][-3:]) if path.name == "checkpoint" else path.name


def facts(dense: Path, checkpoint: Path) -> dict[str, Any]:
    """What the two folders say by themselves: `scheme`, `parameters`, `bytes` of the weights'
    files before and after, and `bits_per_weight` after.

    The scheme is None where the checkpoint has no `quantization_config` that this runtime knows.
    """
    parameters = sum(tensor_elements(dense).values())
    sizes = [sum(f.stat().st_size for f in TensorFiles.files(at)) for at in (dense, checkpoint)]
    return {
        "scheme": _scheme(checkpoint),
        "parameters": parameters,
        "bytes": {"before": sizes[0], "after": sizes[1], "measured": True, "by_part": None},
        "bits_per_weight": 8 * sizes[1] / parameters,
    }


def _scheme(checkpoint: Path) -> str | None:
    try:
        specs = group_specs(describe(checkpoint)["quantization_config"])
    except (KeyError, UserError):
        return None
    return ", ".join(dict.fromkeys(spec.scheme for spec in specs)) or None
