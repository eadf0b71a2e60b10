"""Does a fast linear agree with its reference? The same question in tests and before serving."""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.kernels import w8a8, wna16
from compress.qtensor import QTensor

# Output is rounded to bf16 (2^-8 of each value at most, about 0.0017 in norm), and the CPU's
# prefill path rounds the dequantized weight to bf16 too, about as much again. A scale that is off
# by one row or a nibble in the wrong place gives errors near 1.
MAX_RELATIVE_ERROR = 0.01


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, float64; inf where not finite."""
    expected = expected.double()
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def reference_linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """What a quantized linear must give, in float32: `x` [..., K] to [..., N]."""
    if weight.spec.activation_bits is None:
        return wna16.reference.linear(x, weight, bias, torch.float32)
    return w8a8.reference.linear(x, weight.ints, weight.scales, bias, torch.float32)


def check_linear(
    linear: Callable[[Tensor], Tensor], x: Tensor, weight: QTensor, bias: Tensor | None = None
) -> float:
    """The relative error of `linear(x)` against the reference for the same quantized weight, where
    that is finite: a scale that is not a number is the checkpoint's fault, not the kernel's.
    """
    expected = reference_linear(x, weight, bias)
    known = torch.isfinite(expected)
    return relative_error(linear(x).where(known, 0), expected.where(known, 0))
