"""The measurement of a 7B's memory: its check of the checkpoint."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def test_the_check_of_a_checkpoint_sees_what_is_wrong(tiny_model: Path, tmp_path: Path) -> None:
    from memory_7b import mismatches
    from safetensors.torch import load_file, save_file

    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert mismatches(tmp_path) == []
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    first, second, third = list(tensors)[:3]
    tensors["other"] = tensors.pop(first)
    tensors[second] = tensors[second].double()
    tensors[third] = tensors[third][:1].clone()
    save_file(tensors, weights)
    assert {text.split()[0] for text in mismatches(tmp_path)} == {first, second, third, "other"}
