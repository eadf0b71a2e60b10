"""W8A16 and W4A16 in Triton, straight from the checkpoint's int32 words.

Letters as in the package: M tokens, N output channels, K input channels, G scales a row.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.qtensor import QuantSpec


@dataclass(frozen=True)
class Tile:
    """Block sizes and pipelining. BLOCK_K is cut down to what divides the group."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


DECODE = Tile(16, 64, 128, num_warps=4, num_stages=4)
PREFILL = Tile(64, 128, 64, num_warps=8, num_stages=3)


def tile_for(m: int, group_size: int | None) -> Tile:
    """The tile for `m` tokens; one K block never spans two groups where 16 divides the group."""
    tile = DECODE if m <= 16 else PREFILL
    if group_size is None or group_size % 16:
        return tile
    fields = asdict(tile)
    # The largest power of two in the group size.
    fields["BLOCK_K"] = min(tile.BLOCK_K, group_size & -group_size)
    return Tile(**fields)


@triton.jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    words,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y_MN = x_MK @ (q_NK * scale_NG)^T + bias_N.

    w: int32 [N, words]. scale: [N, groups]. GROUP is the group size, or 0 for one scale a row.
    """
    per_word: tl.constexpr = 32 // BITS
    mask_bits: tl.constexpr = (1 << BITS) - 1
    offset: tl.constexpr = 1 << (BITS - 1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row instead of a mask in the loop; they are not stored.
    row_n = tl.minimum(n, N - 1).to(tl.int64)
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    # Every value loads its word: neighbours load the same one, which the cache answers.
    w_ptrs = w_ptr + row_n[None, :] * words + (k // per_word)[:, None]
    shift = ((k % per_word) * BITS)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            word = tl.load(w_ptrs + start // per_word)
        else:
            x = tl.load(x_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
            word = tl.load(w_ptrs + start // per_word, mask=(start + k < K)[:, None], other=0)
        q = ((word >> shift) & mask_bits) - offset
        if GROUP == 0:
            acc = tl.dot(x, q.to(x.dtype), acc)
        elif GROUP % BLOCK_K == 0:
            # One scale for the block multiplies the float32 partial sum; integers stay exact.
            scale = tl.load(scale_ptr + row_n * groups + start // GROUP).to(tl.float32)
            acc += tl.dot(x, q.to(x.dtype)) * scale[None, :]
        else:
            group = tl.minimum((start + k) // GROUP, groups - 1)
            scale = tl.load(scale_ptr + row_n[None, :] * groups + group[:, None]).to(tl.float32)
            acc = tl.dot(x, (q.to(tl.float32) * scale).to(x.dtype), acc)
    if GROUP == 0:
        acc *= tl.load(scale_ptr + row_n).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def gemm(
    x_MK: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    y_MN: Tensor,
    *,
    bits: int,
    group_size: int | None,
    tile: Tile | None = None,
) -> None:
    """Write the product into `y_MN`, whose dtype is the output's; `x_MK` is contiguous."""
    (m, k), n = x_MK.shape, len(packed)
    if not m:
        return
    tile = tile or tile_for(m, group_size)
    grid = (triton.cdiv(m, tile.BLOCK_M), triton.cdiv(n, tile.BLOCK_N))
    gemm_kernel[grid](
        x_MK,
        packed,
        weight_scale,
        weight_scale if bias is None else bias,
        y_MN,
        m,
        n,
        k,
        packed.shape[1],
        weight_scale.shape[1],
        BITS=bits,
        GROUP=group_size or 0,
        HAS_BIAS=bias is not None,
        EVEN_K=k % tile.BLOCK_K == 0,
        **asdict(tile),
    )


@torch.library.custom_op("compress::wna16_linear", mutates_args=())
def linear(
    x: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int | None,
) -> Tensor:
    """`x` [..., K] to [..., N] in its dtype; packed int32 [N, words], weight_scale [N, G]."""
    x_MK = x.reshape(-1, x.shape[-1]).contiguous()
    y_MN = torch.empty((len(x_MK), len(packed)), dtype=x.dtype, device=x.device)
    gemm(x_MK, packed, weight_scale, bias, y_MN, bits=bits, group_size=group_size)
    return y_MN.reshape(*x.shape[:-1], len(packed))


@linear.register_fake
def _(
    x: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def prepare(
    packed: Tensor, weight_scale: Tensor, bias: Tensor | None, *, spec: QuantSpec
) -> Callable[[Tensor], Tensor]:
    """Bind the checkpoint's words [N, words]; nothing is repacked."""
    packed, weight_scale = packed.contiguous(), weight_scale.contiguous()
    return lambda x: linear(x, packed, weight_scale, bias, spec.bits, spec.group_size)
