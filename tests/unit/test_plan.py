"""Bytes are counted in the dtypes that are on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.planning.memory import by_part
from compress.sizes import tensor_bytes, tensor_elements


def test_bytes_are_those_of_the_stored_dtypes(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros((10, 4), dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.zeros((8, 4)),
        "model.norm.weight": torch.zeros(4, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = by_part(tensor_bytes(tmp_path))
    assert {part: size for part, size in sizes.items() if size} == {
        "embeddings": 80,
        "mlp": 128,
        "norms": 32,
    }
    header = (tmp_path / "model.safetensors").stat().st_size - sum(sizes.values())
    assert 0 < header < 1000
    assert sum(tensor_elements(tmp_path).values()) == 10 * 4 + 8 * 4 + 4
    assert pytest.approx(8 * sum(sizes.values()) / 76, abs=0.01) == 25.26
