"""Learned rounding: what it may change, and that it pays."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from compress.algorithms.learned import Batch, RoundingLinear, learn, relative_error
from compress.algorithms.rtn import rtn
from compress.qtensor import QuantSpec

W4G32, W8A8 = QuantSpec(4, 32), QuantSpec(8, None, 8)


class Block(nn.Module):
    """Two linears with something between them, called as a decoder block is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor, *, gain: float) -> torch.Tensor:
        return x + gain * self.down(nn.functional.silu(self.up(x)))


def rounding(linear: nn.Linear, spec: QuantSpec, dtype: torch.dtype) -> RoundingLinear:
    bias = None if linear.bias is None else linear.bias.detach()
    weight = linear.weight.detach()
    return RoundingLinear(weight, bias, rtn(weight, spec, dtype))


@pytest.mark.parametrize("spec", [W4G32, QuantSpec(4), W8A8], ids=lambda s: s.scheme)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_learned_is_plain_rounding(spec: QuantSpec, dtype: torch.dtype) -> None:
    linear = Block().up
    found, plain = rounding(linear, spec, dtype).qtensor(), rtn(linear.weight, spec, dtype)
    assert torch.equal(found.ints, plain.ints)
    assert torch.equal(found.scales, plain.scales)


def test_what_is_learned_is_what_comes_out() -> None:
    linear = rounding(Block().down, W4G32, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    linear.offset.data = torch.rand(64, 96, generator=generator) - 0.5
    linear.factor.data = 0.5 + torch.rand(64, 3, generator=generator) / 2
    x = torch.randn(5, 96, generator=generator)
    assert torch.allclose(linear(x), x @ linear.qtensor().dequantize().T, atol=1e-5)


def batches(block: Block, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(2, 64, 64, generator=generator)
        tokens = torch.ones(2, 64)
        tokens[:, 60:] = 0
        with torch.no_grad():
            y = block(x, gain=8.0)
        y[:, 60:] = 1e4  # padding, of which nothing may be learned
        yield Batch(x, y, tokens, {"gain": 8.0})


def test_the_output_moves_less_than_by_plain_rounding() -> None:
    original, block = Block(), Block().requires_grad_(False)
    linears = {n: rounding(getattr(block, n), W4G32, torch.bfloat16) for n in ("up", "down")}
    for name, linear in linears.items():
        setattr(block, name, linear)
    unseen = next(batches(original, seed=5))

    def error() -> float:
        with torch.no_grad():
            return float(relative_error(block(unseen.inputs, gain=8.0), unseen))

    before = error()
    first, last = learn(block, linears, batches(original, seed=0), steps=60, rate=1 / 60)
    assert last < 0.8 * first
    assert error() < 0.8 * before
    for linear in linears.values():
        moved = linear.qtensor().ints - torch.round(
            linear.weight.view(len(linear.weight), -1, 32) / linear.scales().unsqueeze(-1)
        ).view_as(linear.weight)
        assert moved.abs().max() <= 1
        assert moved.abs().max() > 0
