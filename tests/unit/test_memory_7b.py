"""What stands on the device at once for a 7B, reckoned from its shapes for
`quantize.rounding=gptq` and `nearest`; 6 GB is the most.
"""

import sys
from pathlib import Path

import pytest

from compress import hidden
from compress.algorithms import gptq, rtn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

H, K = 4096, 11008
FLOAT32 = 4  # bytes
BLOCK = FLOAT32 * (4 * H * H + 3 * H * K)
QUANTIZED = H * H + 3 * H * K  # o, gate, up and down
HESSIANS = FLOAT32 * (2 * H * H + K * K)  # of the inputs of o, of gate and up, of down
FACTOR = FLOAT32 * K * K
"""Bytes. A factor and a Hessian of down_proj are of the same size."""

MOMENTS = {
    # hidden, gate, up, their product; the inputs of down_proj once more for its Hessian
    "Hessians": HESSIANS + FLOAT32 * hidden.TOKENS * (2 * H + 5 * K),
    # the Hessian, its factor, the copy that cuSOLVER inverts from, and the factor before
    "factor of down_proj": 3 * FACTOR + FLOAT32 * H * H,
    # integers of all; of one weight what was rounded; of a slice the rest, its update and errors
    "rounding of down_proj": FACTOR + QUANTIZED + FLOAT32 * (H * K + 3 * gptq.TOGETHER * K),
    # a few copies of a slice: the weight, its steps, the rounded one and the error
    "clips": 8 * FLOAT32 * rtn.WEIGHTS,
    # one weight scaled, its steps, the rounded one and what it is made from
    "smoothing": 5 * FLOAT32 * H * K,
    # integers of all; one as float, and times its scales
    "forward of the rounded block": QUANTIZED
    + FLOAT32 * (2 * H * K + hidden.TOKENS * (2 * H + 4 * K)),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_7b_needs_at_most_6_gb_on_the_device(moment: str) -> None:
    assert BLOCK + MOMENTS[moment] < 6e9


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
