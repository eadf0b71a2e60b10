"""W8A8 in Triton: an INT8 GEMM with the scales in its epilogue, over activations in INT8.

Letters as in the package: M tokens, N output channels, K input channels.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.current import current
from compress.kernels.quantize import triton as quantize
from compress.kernels.splits import add_up, new_locks, new_parts
from compress.kernels.tiles import Tile
from compress.kernels.tuned import tile_for

BLOCK_K = 128
"""Bytes of each row a step: a cache line."""


@triton.jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    w_ptr,
    q_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    lock_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """y_MN = (q_MK @ w_NK^T in int32) * w_scale_N * q_scale_M + bias_N, all row-major.

    parts, lock: see `splits`; the parts are int32, so that the sum stays exact.
    """
    # Programs that run together share columns of w: the weight is read once from memory.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row instead of a mask in the loop; they are not stored.
    q_ptrs = q_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    first = tl.program_id(2) * span
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(first, tl.minimum(first + span, K), BLOCK_K):
        if EVEN_K:
            q = tl.load(q_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            q = tl.load(q_ptrs + start, mask=(start + k < K)[None, :], other=0)
            w = tl.load(w_ptrs + start, mask=(start + k < K)[:, None], other=0)
        acc = tl.dot(q, w, acc, out_dtype=tl.int32)
    last = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        acc, last = add_up(acc, parts_ptr, lock_ptr, tile, tl.program_id(2), SPLITS)
    if last:
        q_scale = tl.load(q_scale_ptr + m, mask=m < M, other=0.0)
        w_scale = tl.load(w_scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        y = acc.to(tl.float32) * w_scale[None, :] * q_scale[:, None]
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def gemm(
    q_MK: Tensor,
    q_scale_M1: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    y_MN: Tensor,
    tile: Tile | None = None,
) -> None:
    """Write the product into `y_MN`, whose dtype is the output's."""
    (m, k), n = q_MK.shape, len(weight)
    if not m:
        return
    tile = tile or tile_for("w8a8", m, n, k, triton.cdiv(k, BLOCK_K), q_MK.device)
    grid = (triton.cdiv(m, tile.BLOCK_M), triton.cdiv(n, tile.BLOCK_N), tile.SPLITS)
    with current(q_MK.device):
        gemm_kernel[grid](
            q_MK,
            weight,
            q_scale_M1,
            weight_scale,
            weight_scale if bias is None else bias,
            y_MN,
            new_parts(tile, m, n, torch.int32, q_MK.device),
            locks,
            m,
            n,
            k,
            HAS_BIAS=bias is not None,
            EVEN_K=k % BLOCK_K == 0,
            BLOCK_K=BLOCK_K,
            **tile.arguments(),
        )


def quantized_linear(
    q_MK: Tensor,
    q_scale_M1: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """int8 [M, K] with scales [M, 1], from any of `compress.kernels.quantize`, to [M, N]."""
    y_MN = torch.empty((len(q_MK), len(weight)), dtype=dtype, device=q_MK.device)
    gemm(q_MK, q_scale_M1, weight, weight_scale, bias, locks, y_MN)
    return y_MN


def linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, locks: Tensor
) -> Tensor:
    """`x` [..., K] to [..., N] in the dtype of `x`; the rest as in the reference."""
    q_MK, scale_M1 = quantize.per_token(x.reshape(-1, x.shape[-1]))
    y_MN = quantized_linear(q_MK, scale_M1, weight, weight_scale, bias, locks, x.dtype)
    return y_MN.reshape(*x.shape[:-1], len(weight))


# The locks are zeros before and after: to a compiler, nothing is mutated.
linear_op = torch.library.custom_op("compress::w8a8_linear", linear, mutates_args=())
quantized_linear_op = torch.library.custom_op(
    "compress::w8a8_quantized_linear", quantized_linear, mutates_args=()
)


@linear_op.register_fake
def _(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, locks: Tensor
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@quantized_linear_op.register_fake
def _(
    q_MK: Tensor,
    q_scale_M1: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return q_MK.new_empty((q_MK.shape[0], weight.shape[0]), dtype=dtype)


def prepare(
    weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Bind the weight [N, K], as it is in the checkpoint.

    Compilers see the operator. Eager mode calls the function, as an operator written in Python adds
    15 microseconds a call and more, which is what a linear takes at decode.
    """
    weight, weight_scale = weight.contiguous(), weight_scale.contiguous()
    locks = new_locks(weight.device)

    def run(x: Tensor) -> Tensor:
        call = linear_op if torch.compiler.is_compiling() else linear
        return call(x, weight, weight_scale, bias, locks)

    return run


def prepare_product(
    weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Bind the weight [N, K] for activations that are quantized: see `quantized_linear`."""
    weight, weight_scale = weight.contiguous(), weight_scale.contiguous()
    locks = new_locks(weight.device)

    def run(q_MK: Tensor, q_scale_M1: Tensor, dtype: torch.dtype) -> Tensor:
        compiling = torch.compiler.is_compiling()
        call = quantized_linear_op if compiling else quantized_linear
        return call(q_MK, q_scale_M1, weight, weight_scale, bias, locks, dtype)

    return run
