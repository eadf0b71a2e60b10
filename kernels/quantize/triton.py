"""Activations to INT8 per token in Triton: one program a row, which it holds in registers.

Letters as in the package: M tokens, K channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.current import current


@triton.jit
def store_quantized(x, q_ptr, scale_ptr, row, k, K):  # type: ignore[no-untyped-def]
    """Quantize the float32 row `x`, zeros past K, and store its integers and scale.

    Of a row that is not finite neither is the scale, so that it shows; its integers are any.
    """
    # The bits of magnitudes are ordered as the magnitudes, with NaN above all: the largest float
    # would leave it out.
    peak = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), 127.0)
    divisor = tl.where(scale > 0, scale, 1.0)
    steps = tl.div_rn(x, tl.zeros_like(x) + divisor)
    # 1.5 * 2^23: adding it leaves no fraction bits, so the sum is rounded to the even integer.
    steps = (steps + 12582912.0) - 12582912.0
    # A cast to int8 wraps around: clamp first.
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    tl.store(q_ptr + row * K + k, steps.to(tl.int8), mask=k < K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def quantize_kernel(x_ptr, q_ptr, scale_ptr, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x: [M, K]. q: int8 [M, K]. scale: float32 [M]."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_quantized(x, q_ptr, scale_ptr, row, k, K)


@triton.jit
def rmsnorm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, q_ptr, scale_ptr, eps, K, BLOCK: tl.constexpr
):
    """x: [M, K]. weight: [K]. q: int8 [M, K]. scale: float32 [M]."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    # Rounded where a model that is not fused rounds.
    x = (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    store_quantized(x, q_ptr, scale_ptr, row, k, K)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, q_ptr, scale_ptr, stride, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """gate, up: [M, K], rows `stride` apart. q: int8 [M, K]. scale: float32 [M]."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    x = (silu * up).to(dtype).to(tl.float32)
    store_quantized(x, q_ptr, scale_ptr, row, k, K)


def launch(k: int) -> dict[str, int]:
    """Block and warps for rows of `k`: 16 values a thread up to 8192, then more.

    16 warps at most: of AMD's 64 threads, they are all that a block may have.
    """
    block = triton.next_power_of_2(k)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _empty(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    # Not len(), which is a Python integer: a compiler would compile for each number of tokens.
    scale_M1 = torch.empty((x_MK.shape[0], 1), dtype=torch.float32, device=x_MK.device)
    return torch.empty(x_MK.shape, dtype=torch.int8, device=x_MK.device), scale_M1


def per_token(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and float32 scales [M, 1] of the rows of `x_MK`."""
    x_MK = x_MK.contiguous()
    (m, k), (q_MK, scale_M1) = x_MK.shape, _empty(x_MK)
    if m:
        with current(x_MK.device):
            quantize_kernel[(m,)](x_MK, q_MK, scale_M1, k, **launch(k))
    return q_MK, scale_M1


def rmsnorm(x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and float32 scales [M, 1] of RMSNorm over the rows of `x_MK`."""
    x_MK = x_MK.contiguous()
    (m, k), (q_MK, scale_M1) = x_MK.shape, _empty(x_MK)
    if m:
        with current(x_MK.device):
            rmsnorm_kernel[(m,)](x_MK, weight_K, q_MK, scale_M1, eps, k, **launch(k))
    return q_MK, scale_M1


def swiglu(gate_MK: Tensor, up_MK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and float32 scales [M, 1] of silu(gate) * up.

    Both may be halves of one matrix [M, 2K], as a fused gate-up projection leaves them.
    """
    if gate_MK.stride() != up_MK.stride() or gate_MK.stride(1) != 1:
        gate_MK, up_MK = gate_MK.contiguous(), up_MK.contiguous()
    (m, k), (q_MK, scale_M1) = gate_MK.shape, _empty(gate_MK)
    if m:
        stride = gate_MK.stride(0)
        with current(gate_MK.device):
            swiglu_kernel[(m,)](gate_MK, up_MK, q_MK, scale_M1, stride, k, **launch(k))
    return q_MK, scale_M1


per_token_op = torch.library.custom_op("compress::quantize_per_token", per_token, mutates_args=())
rmsnorm_op = torch.library.custom_op("compress::quantize_rmsnorm", rmsnorm, mutates_args=())
swiglu_op = torch.library.custom_op("compress::quantize_swiglu", swiglu, mutates_args=())


@per_token_op.register_fake
def _(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(x_MK)


@rmsnorm_op.register_fake
def _(x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _empty(x_MK)


@swiglu_op.register_fake
def _(gate_MK: Tensor, up_MK: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(gate_MK)
