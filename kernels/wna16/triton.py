"""W8A16 and W4A16 in Triton, over words in planar order (see `planar`).

Letters as in the package: M tokens, N output channels, K input channels, G scales a row.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.current import current
from compress.kernels.splits import add_up, new_locks, new_parts
from compress.kernels.tiles import Tile
from compress.kernels.tuned import tile_for
from compress.kernels.wna16.planar import block_words
from compress.qtensor import QuantSpec


@triton.jit
def plane_of(word, magic, p, BITS: tl.constexpr, FP16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Plane p of words [N, W]: its values, exact in 16 bit, [N, 2W]. Two at a time, no conversion.

    `magic` is 1024 (float16) or 128 (bfloat16) twice: numbers whose last mantissa bit counts units,
    so that a field put there is added to them. Subtracting takes them off, and the stored offset.
    """
    fields = word >> (p * BITS)
    dtype: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    if BITS == 8 and not FP16:
        # bfloat16 has room for 7 bits: the 8th chooses between subtracting 128 and 256.
        values = (fields & 0x007F007F) | magic
        offsets = (fields & 0x00800080) ^ 0x43804380
        left = values.to(tl.int16).to(dtype, bitcast=True)
        right = (values >> 16).to(tl.int16).to(dtype, bitcast=True)
        left -= offsets.to(tl.int16).to(dtype, bitcast=True)
        right -= (offsets >> 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        mask: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
        values = (fields & mask) | magic
        offset: tl.constexpr = (1024 if FP16 else 128) + (1 << (BITS - 1))
        left = values.to(tl.int16).to(dtype, bitcast=True) - offset
        right = (values >> 16).to(tl.int16).to(dtype, bitcast=True) - offset
    return tl.join(left, right).reshape(word.shape[0], 2 * word.shape[1])


@triton.jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    lock_ptr,
    magic_ptr,
    M,
    N,
    K,
    words,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """y_MN = x_MK @ (q_NK * scale_NG)^T + bias_N.

    x: [M, K]. w: int32 [N, words], planar. scale: [N, groups]. y: [M, N]. parts, lock: see
    `splits`. magic: see `plane_of`. GROUP is the group size, or 0 for one scale a row. The weight
    is the left operand, which tensor cores take from registers, where it is dequantized.
    """
    PLANE: tl.constexpr = 2 * WORDS
    PLANES: tl.constexpr = 16 // BITS
    BLOCK_K: tl.constexpr = PLANE * PLANES
    # Groups of whole planes, at the same places in every block, are summed and then scaled, in
    # float32: the integers are exact in 16 bit. Others scale the weight, which is rounded again.
    ALIGNED: tl.constexpr = GROUP > 0 and (BLOCK_K % GROUP == 0 or GROUP % BLOCK_K == 0)
    SCALE_FIRST: tl.constexpr = GROUP % PLANE != 0 or not ALIGNED
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    FP16: tl.constexpr = dtype == tl.float16
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows past the end read the last row instead of a mask in the loop; they are not stored.
    row_n = tl.minimum(n, N - 1).to(tl.int64)
    w_rows = w_ptr + row_n[:, None] * words + tl.arange(0, WORDS)[None, :]
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K
    scales = scale_ptr + row_n * groups
    # Loaded, since a constant takes an instruction more beside that of the mask; as a tensor, since
    # Triton dequantizes in the operand's own registers only what is all loaded or constant.
    magic = tl.load(magic_ptr + tl.zeros((1, 1), tl.int32))
    blocks = words // WORDS
    blocks_a_split = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(2) * blocks_a_split
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(first, tl.minimum(first + blocks_a_split, blocks)):
        word = tl.load(w_rows + block * WORDS)
        group_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for p in tl.static_range(PLANES):
            start = block * BLOCK_K + p * PLANE
            k = start + tl.arange(0, PLANE)
            if EVEN_K:
                x = tl.load(x_rows + k[:, None])
            else:
                x = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
            q = plane_of(word, magic, p, BITS, FP16)
            if GROUP == 0:
                acc = tl.dot(q.to(dtype), x, acc, input_precision="ieee")
            elif SCALE_FIRST:
                group = tl.minimum(k // GROUP, groups - 1)
                scale = tl.load(scales[:, None] + group[None, :])
                q = q.to(tl.float32) * scale.to(tl.float32)
                acc = tl.dot(q.to(dtype), x, acc, input_precision="ieee")
            else:
                group_acc = tl.dot(q.to(dtype), x, group_acc, input_precision="ieee")
                if (p + 1) * PLANE % GROUP == 0 or p + 1 == PLANES:
                    scale = tl.load(scales + tl.minimum(start // GROUP, groups - 1))
                    acc += group_acc * scale.to(tl.float32)[:, None]
                    group_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    last = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        acc, last = add_up(acc, parts_ptr, lock_ptr, tile, tl.program_id(2), SPLITS)
    if last:
        if GROUP == 0:
            acc *= tl.load(scales).to(tl.float32)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + row_n).to(tl.float32)[:, None]
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@functools.cache
def magic_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """int32 [1]: 1024 in float16, or 128 in bfloat16, twice."""
    one = 0x64006400 if dtype == torch.float16 else 0x43004300
    return torch.tensor([one], dtype=torch.int32, device=device)


def gemm(
    x_MK: Tensor,
    planar: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    y_MN: Tensor,
    *,
    bits: int,
    group_size: int | None,
    tile: Tile | None = None,
) -> None:
    """Write the product into `y_MN`, whose dtype is the output's; `x_MK` is contiguous."""
    (m, k), (n, words) = x_MK.shape, planar.shape
    if not m:
        return
    width = block_words(group_size)
    tile = tile or tile_for(f"w{bits}a16", m, n, k, words // width, x_MK.device)
    grid = (triton.cdiv(n, tile.BLOCK_N), triton.cdiv(m, tile.BLOCK_M), tile.SPLITS)
    with current(x_MK.device):
        gemm_kernel[grid](
            x_MK,
            planar,
            weight_scale,
            weight_scale if bias is None else bias,
            y_MN,
            new_parts(tile, m, n, torch.float32, x_MK.device),
            locks,
            magic_of(x_MK.dtype, x_MK.device),
            m,
            n,
            k,
            words,
            weight_scale.shape[1],
            BITS=bits,
            GROUP=group_size or 0,
            WORDS=width,
            EVEN_K=words * 32 == k * bits,
            HAS_BIAS=bias is not None,
            **tile.arguments(),
        )


def linear(
    x: Tensor,
    planar: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    bits: int,
    group_size: int | None,
) -> Tensor:
    """`x` [..., K] to [..., N] in its dtype; planar int32 [N, words], weight_scale [N, G]."""
    x_MK = x.reshape(-1, x.shape[-1]).contiguous()
    y_MN = torch.empty((len(x_MK), len(planar)), dtype=x.dtype, device=x.device)
    gemm(x_MK, planar, weight_scale, bias, locks, y_MN, bits=bits, group_size=group_size)
    return y_MN.reshape(*x.shape[:-1], len(planar))


# The locks are zeros before and after: to a compiler, nothing is mutated.
linear_op = torch.library.custom_op("compress::wna16_linear", linear, mutates_args=())


@linear_op.register_fake
def _(
    x: Tensor,
    planar: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    bits: int,
    group_size: int | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], planar.shape[0]))


def prepare(
    planar: Tensor, weight_scale: Tensor, bias: Tensor | None, *, spec: QuantSpec
) -> Callable[[Tensor], Tensor]:
    """Bind a weight in planar order [N, words]. As for W8A8, only compilers see the operator."""
    weight_scale, locks = weight_scale.contiguous(), new_locks(planar.device)

    def run(x: Tensor) -> Tensor:
        call = linear_op if torch.compiler.is_compiling() else linear
        return call(x, planar, weight_scale, bias, locks, spec.bits, spec.group_size)

    return run
