"""W8A8 in Triton: quantize rows, then an INT8 GEMM with the scales in its epilogue.

Letters as in the package: M tokens, N output channels, K input channels.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Block sizes and pipelining of the GEMM. BLOCK_K >= 32, as INT8 tensor cores want."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# Decode is bound by reading the weight: narrow tiles, many programs. Prefill by arithmetic.
DECODE = Tile(16, 64, 256, num_warps=4, num_stages=4)
SHORT = Tile(64, 64, 128, num_warps=4, num_stages=4)
PREFILL = Tile(128, 128, 128, num_warps=8, num_stages=3)


def tile_for(m: int) -> Tile:
    """The tile for `m` tokens."""
    if m <= 16:
        return DECODE
    return SHORT if m <= 128 else PREFILL


@triton.jit
def quantize_kernel(x_ptr, q_ptr, scale_ptr, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row: absmax, then the integers. Rows are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + start + k, mask=start + k < K, other=0.0)
        peak = tl.maximum(peak, tl.abs(x.to(tl.float32)))
    scale = tl.div_rn(tl.max(peak, 0), 127.0)
    tl.store(scale_ptr + row, scale)
    divisor = tl.where(scale > 0, scale, 1.0)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + start + k, mask=start + k < K, other=0.0)
        steps = tl.div_rn(x.to(tl.float32), tl.broadcast_to(divisor, (BLOCK,)))
        # 1.5 * 2^23: adding it leaves no fraction bits, so the sum is rounded to the even integer.
        steps = (steps + 12582912.0) - 12582912.0
        # A cast to int8 wraps around: clamp first.
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        tl.store(q_ptr + row * K + start + k, steps.to(tl.int8), mask=start + k < K)


@triton.jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    w_ptr,
    q_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y_MN = (q_MK @ w_NK^T in int32) * q_scale_M * w_scale_N + bias_N, all row-major."""
    # Programs that run together share columns of w: the weight is read once from memory.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row instead of a mask in the loop; they are not stored.
    q_ptrs = q_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            q = tl.load(q_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            q = tl.load(q_ptrs + start, mask=(start + k < K)[None, :], other=0)
            w = tl.load(w_ptrs + start, mask=(start + k < K)[:, None], other=0)
        acc = tl.dot(q, w, acc, out_dtype=tl.int32)
    q_scale = tl.load(q_scale_ptr + m, mask=m < M, other=0.0)
    w_scale = tl.load(w_scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    y = acc.to(tl.float32) * w_scale[None, :] * q_scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def quantize_per_token(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and float32 scales [M, 1]; `x_MK` is contiguous."""
    m, k = x_MK.shape
    q_MK = torch.empty_like(x_MK, dtype=torch.int8)
    scale_M1 = torch.empty((m, 1), dtype=torch.float32, device=x_MK.device)
    if m:
        block = min(triton.next_power_of_2(k), 4096)
        quantize_kernel[(m,)](x_MK, q_MK, scale_M1, k, BLOCK=block, num_warps=max(1, block // 512))
    return q_MK, scale_M1


def gemm(
    q_MK: Tensor,
    q_scale_M1: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    y_MN: Tensor,
    tile: Tile | None = None,
) -> None:
    """Write the product into `y_MN`, whose dtype is the output's."""
    (m, k), n = q_MK.shape, len(weight)
    if not m:
        return
    tile = tile or tile_for(m)
    grid = (triton.cdiv(m, tile.BLOCK_M), triton.cdiv(n, tile.BLOCK_N))
    gemm_kernel[grid](
        q_MK,
        weight,
        q_scale_M1,
        weight_scale,
        weight_scale if bias is None else bias,
        y_MN,
        m,
        n,
        k,
        HAS_BIAS=bias is not None,
        EVEN_K=k % tile.BLOCK_K == 0,
        **asdict(tile),
    )


def linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., K] to [..., N] in the dtype of `x`; the rest as in the reference."""
    q_MK, scale_M1 = quantize_per_token(x.reshape(-1, x.shape[-1]).contiguous())
    y_MN = torch.empty((len(q_MK), len(weight)), dtype=x.dtype, device=x.device)
    gemm(q_MK, scale_M1, weight, weight_scale, bias, y_MN)
    return y_MN.reshape(*x.shape[:-1], len(weight))


linear_op = torch.library.custom_op("compress::w8a8_linear", linear, mutates_args=())


@linear_op.register_fake
def _(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def prepare(
    weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Bind the weight [N, K], as it is in the checkpoint.

    Compilers see the operator. Eager mode calls the function, as an operator written in Python adds
    15 microseconds a call and more, which is what a linear takes at decode.
    """
    weight, weight_scale = weight.contiguous(), weight_scale.contiguous()

    def run(x: Tensor) -> Tensor:
        call = linear_op if torch.compiler.is_compiling() else linear
        return call(x, weight, weight_scale, bias)

    return run
