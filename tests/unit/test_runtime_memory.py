"""What loading takes at its peak, in a process of its own: the checkpoint and little more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from compress.qtensor import QuantSpec
from compress.quantization_config import quantization_config
from compress.runtime.loader import build_empty

LOAD = """
import json, sys
from pathlib import Path
import psutil
from compress.kernels.native import build
from compress.machine import high_water
from compress.runtime.loader import load
build.available()
# Pages of libraries, which come as their code is called and as the system likes, do not count.
libraries = psutil.Process().memory_info().shared
before = high_water()
model = load(Path(sys.argv[1]))
libraries -= psutil.Process().memory_info().shared
print(json.dumps(high_water() - before + libraries))
"""
SLACK = 30_000_000
"""Bytes for what is no weight: modules, the configuration's tables, the allocator's pieces."""


def made(folder: Path, spec: QuantSpec) -> dict[str, Tensor]:
    """A Llama of random integers, most of its bytes in what is quantized."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=1024,
        intermediate_size=6144,
        num_hidden_layers=8 if spec.bits == 8 else 16,
        num_attention_heads=8,
        num_key_value_heads=2,
        dtype="bfloat16",
    )
    kept = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(16) for n in "qkv"]
    quantization = quantization_config({"any": spec}, ["lm_head", *kept])
    written = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    written["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {
        name: torch.randint(-127, 128, t.shape, dtype=t.dtype)
        if not t.is_floating_point()
        else torch.full(t.shape, 0.01, dtype=t.dtype)
        for name, t in build_empty(folder, "cpu", None).state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's high water mark")
@pytest.mark.parametrize(
    "spec", [QuantSpec(8, activation_bits=8), QuantSpec(4, 64)], ids=lambda spec: spec.scheme
)
def test_loading_takes_the_checkpoint_and_one_tensor(spec: QuantSpec, tmp_path: Path) -> None:
    tensors = made(tmp_path, spec)
    size, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
    # The CPU's kernels take scales in float32.
    scales = sum(4 * t.numel() for name, t in tensors.items() if name.endswith("_scale"))
    assert largest + scales + SLACK < size / 2
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True
    )
    taken = json.loads(done.stdout)
    assert size < taken < size + largest + scales + SLACK
