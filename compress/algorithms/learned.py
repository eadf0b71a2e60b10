"""Learned rounding: each weight goes up or down, so that the block gives what it gave before.

SignRound (Cheng et al. 2023, arXiv:2309.05516), as in AutoRound: an offset of at most half a step
for every weight, and a factor for every scale, learned by the signs of their gradients. What is
compared is the output of the whole block, so that attention and MLP make up for their errors
together, and its inputs are those that passed the blocks quantized before it, so that it makes
up for theirs as well. Unlike there, every window has a vote of its own: a step is the mean of the
signs of its windows' gradients, not the sign of their sum, which the largest of them would decide.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.qtensor import QTensor
from compress.training.trainable import straight_through_int8

FACTORS = 0.3, 1.2


class RoundingLinear(nn.Module):
    """A linear whose rounding is learned: ints = round(weight / scales + offset).

    offset [N, K] in [-0.5, 0.5]. factor [N, G] within FACTORS, of the scales of `start`, in whose
    dtype scales are stored. rounded [N, K]: the weight as it is now, whose gradient `vote` takes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, start: QTensor) -> None:
        super().__init__()
        self.spec, self.dtype, self.bias = start.spec, start.scales.dtype, bias
        self.weight, self.first = weight.float(), start.scales.float()
        self.offset, self.factor = torch.zeros_like(self.weight), torch.ones_like(self.first)
        self.begin()

    def begin(self) -> None:
        """Round anew, and forget the votes."""
        scales, exact, ints = self._ints()
        # How a weight moves with its offset and with its scale's factor, but for the scale's size.
        # Rounding counts as the identity; beyond the largest integer nothing moves with the offset.
        by_offset = exact.round().eq(ints) * scales.sign()
        self.by_factor = ints * scales.sign() - by_offset * self._grouped(self.weight) / scales
        self.by_offset = by_offset.view_as(self.weight).to(torch.int8)
        self.rounded = (ints * scales).view_as(self.weight).requires_grad_()
        self.votes = 0
        self.offset_votes = torch.zeros_like(self.offset, dtype=torch.int16)
        self.factor_votes = torch.zeros_like(self.factor)

    def vote(self, gradient: Tensor) -> None:
        """Count a window's vote: the signs of its gradients by offset and factor, which follow
        from that by `rounded` [N, K].
        """
        self.votes += 1
        self.offset_votes += gradient.sign().to(torch.int8) * self.by_offset
        self.factor_votes += (self._grouped(gradient) * self.by_factor).sum(-1).sign()

    def move(self, rate: float) -> None:
        """Against the mean of the votes, by at most `rate`."""
        self.offset.sub_(self.offset_votes, alpha=rate / self.votes).clamp_(-0.5, 0.5)
        self.factor.sub_(self.factor_votes, alpha=rate / self.votes).clamp_(*FACTORS)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.activation_bits is not None:
            x = straight_through_int8(x)
        return nn.functional.linear(x, self.rounded, self.bias)

    def qtensor(self) -> QTensor:
        """The weight as it was learned."""
        scales, _, ints = self._ints()
        return QTensor(
            ints.view_as(self.weight).to(torch.int8), scales.squeeze(-1).to(self.dtype), self.spec
        )

    def scales(self) -> Tensor:
        """[N, G, 1], as they will be stored."""
        return (self.first * self.factor).to(self.dtype).float().unsqueeze(-1)

    def _ints(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scales; weights in steps of them [N, G, K / G], before and after rounding."""
        scales = self.scales()
        exact = self._grouped(self.weight) / scales + self._grouped(self.offset)
        return scales, exact, exact.round().clamp_(self.spec.qmin, self.spec.qmax)

    def _grouped(self, weight: Tensor) -> Tensor:
        return weight.view(*self.first.shape, -1)


@dataclass(frozen=True)
class Window:
    """What a block got and should give, [B, T, H] each, with its other arguments (masks, rotary
    tables); tokens [B, T]: 1 where the output counts, else 0.
    """

    inputs: Tensor
    targets: Tensor
    tokens: Tensor
    call: Mapping[str, object]


def learn(
    block: nn.Module,
    linears: Mapping[str, RoundingLinear],
    steps: Iterator[Iterable[Window]],
    *,
    count: int,
    rate: float,
) -> None:
    """Learn the rounding of `linears`, which stand in their places in `block`.

    steps: the windows of one step after the other, each with a vote; `count` of them are taken.
    rate: by which an offset moves in the first step at most, falling to 0 in the last. Matrix
    products are in bfloat16, the rest in float32.
    """
    device = next(iter(linears.values())).weight.device.type
    for step in range(count):
        for linear in linears.values():
            linear.begin()
        for window in next(steps):
            with torch.enable_grad():
                with torch.autocast(device, torch.bfloat16):
                    outputs = block(window.inputs, **window.call)
                error = relative_error(outputs, window)
                wanted = [linear.rounded for linear in linears.values()]
                gradients = torch.autograd.grad(error, wanted)
            for linear, gradient in zip(linears.values(), gradients, strict=True):
                linear.vote(gradient)
        for linear in linears.values():
            linear.move(rate * (1 - step / count))
    for linear in linears.values():
        linear.begin()


def relative_error(outputs: Tensor, window: Window) -> Tensor:
    """|Y - Y'|^2 / |Y|^2 over the tokens that count."""
    counts = window.tokens.unsqueeze(-1)
    difference = (outputs.float() - window.targets) * counts
    return difference.square().sum() / (window.targets * counts).square().sum()
