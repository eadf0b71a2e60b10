"""W8A8 as it is meant: read this first. See the package for the letters."""

import torch
from torch import Tensor


def quantize_per_token(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 per row: int8 [M, K] and float32 scales [M, 1], scale = absmax / 127.

    Rounding is to the even neighbour, as everywhere. A row of zeros has scale 0 and integers 0.
    """
    x = x_MK.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scale > 0, x / scale, 0.0)
    return steps.round().clamp(-127, 127).to(torch.int8), scale


def matmul_int32(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """int8 [M, K] times int8 [N, K] transposed: int32 [M, N], exact.

    Summed in float64, which holds every integer up to 2^53 and runs on any device.
    """
    return (a_MK.double() @ b_NK.double().t()).to(torch.int32)


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`x` [..., K] to [..., N]; weight int8 [N, K], weight_scale [N, 1], bias [N] or None.

    The weight's scale, then the token's, multiply in float32; the result is rounded once, to
    `out_dtype`. The order is part of the truth: another one differs in the last bit, which the
    rounding of the next layer's activations can turn into a whole step.
    """
    q_MK, scale_M1 = quantize_per_token(x.reshape(-1, x.shape[-1]))
    y_MN = matmul_int32(q_MK, weight).float() * weight_scale.float().reshape(1, -1) * scale_M1
    if bias is not None:
        y_MN += bias.float()
    return y_MN.to(out_dtype).reshape(*x.shape[:-1], len(weight))
