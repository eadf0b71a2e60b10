"""The benchmark of budgets: whose results it adds to, and how many bits it gives the mixture."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from families import family_config
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts that stand beside each other, no package
benchmark = import_module("budget")


def options(model: Path, **changed: object) -> argparse.Namespace:
    given = {"model": model, "engine": "vllm", "choices": ["W4A16 g32", "W8A16"], "samples": 4}
    return argparse.Namespace(**{**given, "uniform": ["W8A16"], "work": model, **changed})


def test_the_mixture_gets_the_bits_that_are_on_disk(tmp_path: Path) -> None:
    config = family_config("llama")
    config.save_pretrained(tmp_path)
    hidden, wide = config.hidden_size, config.intermediate_size
    tensors = {}
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.self_attn.q_proj.weight"] = torch.zeros(hidden, hidden)  # not counted
        for name, (n, k) in {
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
        }.items():
            tensors[f"{prefix}.{name}.weight_packed"] = torch.zeros(n, k // 8, dtype=torch.int32)
            tensors[f"{prefix}.{name}.weight_scale"] = torch.zeros(n, k // 32).bfloat16()
            tensors[f"{prefix}.{name}.weight_shape"] = torch.tensor([n, k])
        # Left in 16 bit by the uniform run, and a choice of the mixture all the same.
        tensors[f"{prefix}.mlp.down_proj.weight"] = torch.zeros(hidden, wide).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    four, sixteen = hidden * hidden + 2 * wide * hidden, wide * hidden
    wanted = (4.5 * four + 16 * sixteen) / (four + sixteen)
    assert benchmark.bits_on_disk(tmp_path, options(tmp_path)) == pytest.approx(wanted, abs=2e-6)
