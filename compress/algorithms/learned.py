"""Learned rounding: each weight goes up or down, so that the block gives what it gave before.

SignRound (Cheng et al. 2023, arXiv:2309.05516), as in AutoRound: an offset of at most half a step
for every weight, and a factor for every scale, learned by the signs of their gradients. What is
compared is the output of the whole block, so that attention and MLP make up for their errors
together, and its inputs are those that passed the blocks quantized before it, so that it makes
up for theirs as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.qtensor import QTensor
from compress.trainable import straight_through_int8

FACTORS = 0.3, 1.2


class RoundingLinear(nn.Module):
    """A linear whose rounding is learned: ints = round(weight / scales + offset).

    offset [N, K] in [-0.5, 0.5]. factor [N, G] within FACTORS, of the scales of `start`, in whose
    dtype scales are stored.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, start: QTensor) -> None:
        super().__init__()
        self.spec, self.dtype, self.bias = start.spec, start.scales.dtype, bias
        self.weight, self.first = weight.float(), start.scales.float()
        self.offset = nn.Parameter(torch.zeros_like(self.weight))
        self.factor = nn.Parameter(torch.ones_like(self.first))

    def scales(self) -> Tensor:
        """Scales [N, G] as they will be stored, differentiable in `factor`."""
        exact = self.first * self.factor
        stored = exact.detach().to(self.dtype).float()
        return exact + (stored - exact.detach())

    def steps(self, scales: Tensor) -> Tensor:
        """Integers [N, G, K/G], differentiable as if they were not rounded."""
        n, groups = scales.shape
        grouped = self.weight.view(n, groups, -1) / scales.unsqueeze(-1)
        exact = grouped + self.offset.view(n, groups, -1)
        rounded = exact + (exact.detach().round() - exact.detach())
        return rounded.clamp(self.spec.qmin, self.spec.qmax)

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales()
        weight = (self.steps(scales) * scales.unsqueeze(-1)).view_as(self.weight)
        if self.spec.activation_bits is not None:
            x = straight_through_int8(x)
        return nn.functional.linear(x, weight, self.bias)

    @torch.no_grad()
    def qtensor(self) -> QTensor:
        """The weight as it was learned."""
        scales = self.scales()
        ints = self.steps(scales).reshape(self.weight.shape).to(torch.int8)
        return QTensor(ints, scales.to(self.dtype), self.spec)


@dataclass(frozen=True)
class Batch:
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
    batches: Iterator[Batch],
    *,
    steps: int,
    rate: float,
) -> tuple[float, float]:
    """Learn the rounding of `linears`, which stand in their places in `block`.

    rate: by which an offset moves in the first step, falling to 0 in the last.
    Matrix products are in bfloat16, the rest in float32. Returns the error |Y - Y'|^2 / |Y|^2 of
    the first batches and of the last.
    """
    offsets = [linear.offset for linear in linears.values()]
    factors = [linear.factor for linear in linears.values()]
    device = offsets[0].device.type
    errors = []
    for step in range(steps):
        batch = next(batches)
        with torch.enable_grad():
            with torch.autocast(device, torch.bfloat16):
                outputs = block(batch.inputs, **batch.call)
            error = relative_error(outputs, batch)
            gradients = torch.autograd.grad(error, [*offsets, *factors])
        errors.append(float(error.detach()))
        now = rate * (1 - step / steps)
        for parameter, gradient in zip([*offsets, *factors], gradients, strict=True):
            parameter.data.sub_(gradient.sign(), alpha=now)
        for offset in offsets:
            offset.data.clamp_(-0.5, 0.5)
        for factor in factors:
            factor.data.clamp_(*FACTORS)
    few = max(1, steps // 10)
    return sum(errors[:few]) / few, sum(errors[-few:]) / few


def relative_error(outputs: Tensor, batch: Batch) -> Tensor:
    """|Y - Y'|^2 / |Y|^2 over the tokens that count."""
    counts = batch.tokens.unsqueeze(-1)
    difference = (outputs.float() - batch.targets) * counts
    return difference.square().sum() / (batch.targets * counts).square().sum()
