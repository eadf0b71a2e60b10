"""The memory of one block's work, measured in units of the block in float32."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from compress.algorithms import gptq, rtn
from compress.blocks.collector import Collector, picked_rows
from compress.blocks.streams import CalibrationStreams
from compress.blocks.work import BlockWork
from compress.clock import Clock
from compress.machine import CLEAR_REFS, PeakMemory, high_water
from compress.model import BlockModel
from compress.qtensor import QuantSpec

H, K = 768, 2304
BLOCK = 4 * (4 * H * H + 3 * H * K)  # bytes in float32
FACTOR = 4 * K * K
"""Bytes of the Hessian of down_proj, and of its factor."""
INVERSE = FACTOR / 4
"""What the inverse of the triangle takes beside it."""
REST = 0.8
"""Of BLOCK, for the integers so far (0.14), the factor before (0.08), and all that is small; by
0.3 of it the rise of a process moves from run to run."""


def quantized(folder: Path, work: Path) -> float:
    """Quantize block 0 by GPTQ; the rise of the peak of memory, in units of BLOCK."""
    model = BlockModel(folder)
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    save_file({"ids": ids, "mask": mask}, work / "windows.safetensors")
    streams = CalibrationStreams(model, work / "windows.safetensors", work, 4, targets=False)
    with model.block(0) as block:
        collector = Collector(model.block_linears(0), picked_rows(mask, 64))
        with collector:
            collector.start(0, mask)
            block(model.embed(ids, mask), **model.calls(ids, mask)[0])
        statistics = collector.tensors()
    names = [n for n in model.block_linears(0) if n.endswith(("o_proj", "up_proj", "down_proj"))]
    names += [n.replace("up_proj", "gate_proj") for n in names if n.endswith("up_proj")]
    work_on = BlockWork(
        model, 0, dict.fromkeys(names, QuantSpec(4, 64)), torch.bfloat16, 0, Clock(),
        smooth=True, clip=True, rounding="gptq", steps=1, rate=0.01,
    )  # fmt: skip
    with PeakMemory() as memory:
        before = high_water()
        work_on.run(statistics, streams)
    return (memory.peak - before) / BLOCK


def main(work: Path) -> None:
    """Print what `quantized` measures on a Llama of one block in the proportions of a 7B."""
    gptq.TOGETHER, rtn.WEIGHTS = 256, 64 * K  # slices are as small beside a weight as there
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=H, intermediate_size=K, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "llama")
    found = []
    for name in ("first", "second", "third"):
        (work / name).mkdir()
        with torch.no_grad():
            found.append(quantized(work / "llama", work / name))
    print(min(found[1:]))  # libraries take what they keep in the first


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="only Linux resets the peak of memory")
def test_gptq_takes_the_block_a_hessian_and_its_factor(tmp_path: Path) -> None:
    # Of its own process, whose allocator gives back what is freed, the peak is that of tensors.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    assert float(done.stdout) < 1 + (2 * FACTOR + INVERSE) / BLOCK + REST


if __name__ == "__main__":
    main(Path(sys.argv[1]))
