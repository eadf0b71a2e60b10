"""Quantized activations as they are meant: read this first. See the package for the letters."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.w8a8.reference import quantize_per_token


def rmsnorm(x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and float32 scales [M, 1] of RMSNorm (Zhang and Sennrich, arXiv:1910.07467).

    As in Llama: normalized in float32, rounded to the dtype of `x_MK`, multiplied by the weight in
    that dtype.
    """
    x = x_MK.float()
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return quantize_per_token(normalized.to(x_MK.dtype) * weight_K)


def swiglu(gate_MK: Tensor, up_MK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and float32 scales [M, 1] of SwiGLU (Shazeer, arXiv:2002.05202)."""
    return quantize_per_token(F.silu(gate_MK) * up_MK)
