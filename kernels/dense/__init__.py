"""Linear layers that stay in bf16, on CPU, for a few tokens: y_MN = x_MK @ w_NK^T + bias_N.

ATen's bf16 product reads a weight that no cache holds at less than half the speed of cpu.h. Sums
are in float32 as there, but in another order: a token can differ in its last bit from what it would
be in a larger batch. So this is for decoding one request, and asked for by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.native import build
from compress.kernels.native.bias import side_by_side

# Tokens up to which cpu.h is faster: measured as in w8a8/cpu.py.
FEW_TOKENS = 2


def takes(weight: Tensor) -> bool:
    """Whether `linear` is there for `weight`, which may take building it."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return fits and weight.is_contiguous() and build.available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., K] to [..., N] in bf16; weight [N, K], bias [N] or None. Has no gradient."""
    x_MK = x.reshape(-1, x.shape[-1])
    if len(x_MK) > FEW_TOKENS:
        return F.linear(x, weight, bias)
    y_MN = torch.ops.compress_cpu.dense(x_MK.contiguous(), [weight])
    if bias is not None:
        y_MN += bias
    return y_MN.view(*x.shape[:-1], y_MN.shape[1])


@dataclass(frozen=True)
class Dense:
    """`linear` with its tensors."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @staticmethod
    def joined(parts: "Sequence[Dense]") -> Callable[[Tensor], Tensor]:
        """One token [1, K] to the outputs of `parts` side by side, by one product."""
        weights, bias = [part.weight for part in parts], side_by_side(parts)

        def run(x: Tensor) -> Tensor:
            y_MN = torch.ops.compress_cpu.dense(x, weights)
            return y_MN if bias is None else y_MN.add_(bias)

        return run
