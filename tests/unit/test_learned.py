"""Learned rounding: what it may change, and that it pays."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import nn

from compress.algorithms.learned import RoundingLinear, Window, learn, relative_error
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
    linear.offset = torch.rand(64, 96, generator=generator) - 0.5
    linear.factor = 0.5 + torch.rand(64, 3, generator=generator) / 2
    linear.begin()
    x = torch.randn(5, 96, generator=generator)
    assert torch.allclose(linear(x), x @ linear.qtensor().dequantize().T, atol=1e-5)


def windows(block: Block, seed: int) -> Iterator[Window]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(1, 64, 64, generator=generator)
        tokens = torch.ones(1, 64)
        tokens[:, 60:] = 0
        with torch.no_grad():
            y = block(x, gain=8.0)
        y[:, 60:] = 1e4  # padding, of which nothing may be learned
        yield Window(x, y, tokens, {"gain": 8.0})


def in_steps(windows: Iterator[Window], size: int) -> Iterator[list[Window]]:
    while True:
        yield list(islice(windows, size))


@torch.no_grad()
def test_the_output_moves_less_than_by_plain_rounding() -> None:
    original, block = Block(), Block().requires_grad_(False)
    linears = {n: rounding(getattr(block, n), W4G32, torch.bfloat16) for n in ("up", "down")}
    for name, linear in linears.items():
        setattr(block, name, linear)
    unseen = next(windows(original, seed=5))

    def error() -> float:
        return float(relative_error(block(unseen.inputs, gain=8.0), unseen))

    before = error()
    steps = in_steps(windows(original, seed=0), 2)
    learn(block, linears, steps, count=60, rate=1 / 60)
    assert error() < 0.8 * before
    for linear in linears.values():
        steps_of = linear.weight.view(len(linear.weight), -1, 32) / linear.scales()
        moved = linear.qtensor().ints - steps_of.round().view_as(linear.weight)
        assert moved.abs().max() <= 1
        assert moved.abs().max() > 0


@pytest.mark.parametrize("spec", [W4G32, QuantSpec(4)], ids=lambda s: s.scheme)
def test_votes_are_the_signs_of_the_gradients(spec: QuantSpec) -> None:
    linear = rounding(Block().down, spec, torch.float32)
    generator = torch.Generator().manual_seed(2)
    linear.offset.uniform_(-0.5, 0.5, generator=generator)
    linear.factor.uniform_(0.5, 1.0, generator=generator)
    linear.begin()
    gradient = torch.randn(64, 96, generator=generator)
    linear.vote(gradient)

    offset, factor = linear.offset.clone().requires_grad_(), linear.factor.clone().requires_grad_()
    scales = (linear.first * factor).unsqueeze(-1)
    exact = linear.weight.view(64, len(linear.first[0]), -1) / scales
    exact = exact + offset.view_as(exact)
    straight = exact + (exact.round() - exact).detach()
    rounded = straight.clamp(spec.qmin, spec.qmax) * scales
    rounded.backward(gradient.view_as(rounded))
    assert torch.equal(linear.rounded.detach(), rounded.detach().view_as(linear.rounded))
    assert torch.equal(linear.offset_votes.float(), offset.grad.sign())
    assert torch.equal(linear.factor_votes, factor.grad.sign())
    assert {-1, 0, 1} == set(linear.offset_votes.unique().tolist())
