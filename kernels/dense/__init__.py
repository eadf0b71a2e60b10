"""Linear layers that stay in bf16, on CPU: y_MN = x_MK @ w_NK^T + bias_N.

Where the CPU has AMX, amx.h takes any number of tokens, and a token's outputs have the same bits
whatever batch it is in. Elsewhere cpu.h takes a few tokens and ATen more: ATen's product reads a
weight that no cache holds at less than half the speed. Sums are in float32 in both, but in another
order: a token can differ in its last bit from what it would be in a larger batch. So there this is
for decoding one request, and asked for by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.native import build
from compress.kernels.native.bias import side_by_side

# Tokens up to which cpu.h is faster than ATen: measured as in w8a8/cpu.py.
FEW_TOKENS = 2

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., K], weight [N, K] and bias [N] or None to [..., N], in bf16. Has no gradient."""


def takes(weight: Tensor) -> bool:
    """Whether `linear()` is there for `weight`, which may take building it."""
    return fits(weight) and build.available()


def fits(weight: Tensor) -> bool:
    """Whether `weight` is one that `linear()` reads."""
    at_hand = weight.device.type == "cpu" and weight.is_contiguous()
    return at_hand and weight.dtype == torch.bfloat16


def linear() -> Linear:
    """That of this CPU, to be asked for once: compilers do not trace the asking."""
    return by_amx if build.has_amx() else for_few_tokens


def by_amx(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By amx.h; raises RuntimeError where there is no AMX."""
    return _linear(torch.ops.compress_cpu.dense_amx, x, weight, bias)


def for_few_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By cpu.h, or from some tokens on by ATen."""
    if x.numel() > FEW_TOKENS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return _linear(torch.ops.compress_cpu.dense, x, weight, bias)


def _linear(
    op: Callable[[Tensor, list[Tensor]], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    y_MN = op(x.reshape(-1, x.shape[-1]).contiguous(), [weight])
    if bias is not None:
        y_MN += bias
    return y_MN.view(*x.shape[:-1], y_MN.shape[1])


@dataclass(frozen=True)
class Dense:
    """`linear()` with its tensors."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear()(x, self.weight, self.bias)

    @staticmethod
    def joined(parts: "Sequence[Dense]") -> Callable[[Tensor], Tensor]:
        """One token [1, K] to the outputs of `parts` side by side, by one product."""
        weights, bias = [part.weight for part in parts], side_by_side(parts)
        ops = torch.ops.compress_cpu
        product = ops.dense_amx if build.has_amx() else ops.dense

        def run(x: Tensor) -> Tensor:
            y_MN = product(x, weights)
            return y_MN if bias is None else y_MN.add_(bias)

        return run
