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
    """Block sizes and pipelining; BLOCK_W >= 16 counts words, of 4 or 8 values each."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_W: int
    num_warps: int
    num_stages: int


DECODE = Tile(16, 64, 32, num_warps=4, num_stages=4)
PREFILL = Tile(64, 128, 16, num_warps=4, num_stages=3)


def tile_for(m: int) -> Tile:
    """The tile for `m` tokens."""
    return DECODE if m <= 16 else PREFILL


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
    x_stride,
    words,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANAR_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """y_MN = x_MK @ (q_NK * scale_NG)^T + bias_N.

    w: int32 [N, words]. scale: [N, groups]. GROUP is the group size, or 0 for one scale a row.

    Each word is loaded once. Field j of all words of a block is a plane [BLOCK_W, BLOCK_N] that
    meets every 8th (INT8: 4th) column of x from the j-th on, so the values never change places.
    PLANAR_X says that x is stored in that order already (`planar`), else it is read with a stride.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    BLOCK_K: tl.constexpr = BLOCK_W * PER_WORD
    SUM_THEN_SCALE: tl.constexpr = GROUP % BLOCK_K == 0  # One scale a row counts: 0 % n == 0.
    SCALE_A_WORD: tl.constexpr = not SUM_THEN_SCALE and GROUP % PER_WORD == 0
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_W)
    # Rows past the end read the last row instead of a mask in the loop; they are not stored.
    row_n = tl.minimum(n, N - 1).to(tl.int64)
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
    w_ptrs = w_ptr + row_n[None, :] * words + i[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, words, BLOCK_W):
        word = tl.load(w_ptrs + first, mask=(first + i < words)[:, None], other=0)
        block_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if SCALE_A_WORD:
            group = tl.minimum((first + i) * PER_WORD // GROUP, groups - 1)
            scale = tl.load(scale_ptr + row_n[None, :] * groups + group[:, None]).to(tl.float32)
        for j in tl.static_range(PER_WORD):
            k = (first + i) * PER_WORD + j
            place = first * PER_WORD + j * BLOCK_W + i if PLANAR_X else k
            x = tl.load(x_rows + place[None, :], mask=(k < K)[None, :], other=0.0)
            q = ((word >> (j * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
            if SUM_THEN_SCALE:
                block_acc = tl.dot(x, q.to(x.dtype), block_acc)
            else:
                if not SCALE_A_WORD:
                    group = tl.minimum(k // GROUP, groups - 1)
                    scale = tl.load(scale_ptr + row_n[None, :] * groups + group[:, None])
                acc = tl.dot(x, (q.to(tl.float32) * scale.to(tl.float32)).to(x.dtype), acc)
        if SUM_THEN_SCALE:
            # The scale multiplies the float32 partial sum: the integers are exact in 16 bit.
            group_scale = scale_ptr + row_n * groups
            if GROUP > 0:
                group_scale += first * PER_WORD // GROUP
            acc += block_acc * tl.load(group_scale).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def planar(x_MK: Tensor, per_word: int, block_words: int) -> Tensor:
    """The columns of every block of words in the order of the kernel's planes, zeros at the end.

    Column `per_word * i + j` of a block goes to `block_words * j + i`.
    """
    m, k = x_MK.shape
    x = torch.nn.functional.pad(x_MK, (0, -k % (per_word * block_words)))
    return x.view(m, -1, block_words, per_word).transpose(2, 3).reshape(m, -1)


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
    tile = tile or tile_for(m)
    # A strided read of few rows costs less than a kernel more; of many rows it does not.
    reorder = m > DECODE.BLOCK_M
    x = planar(x_MK, 32 // bits, tile.BLOCK_W) if reorder else x_MK
    grid = (triton.cdiv(m, tile.BLOCK_M), triton.cdiv(n, tile.BLOCK_N))
    gemm_kernel[grid](
        x,
        packed,
        weight_scale,
        weight_scale if bias is None else bias,
        y_MN,
        m,
        n,
        k,
        x.shape[1],
        packed.shape[1],
        weight_scale.shape[1],
        BITS=bits,
        GROUP=group_size or 0,
        PLANAR_X=reorder,
        HAS_BIAS=bias is not None,
        **asdict(tile),
    )


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


linear_op = torch.library.custom_op("compress::wna16_linear", linear, mutates_args=())


@linear_op.register_fake
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
    """Bind the checkpoint's words [N, words]; nothing is repacked. As for W8A8, only compilers see
    the operator.
    """
    packed, weight_scale = packed.contiguous(), weight_scale.contiguous()

    def run(x: Tensor) -> Tensor:
        call = linear_op if torch.compiler.is_compiling() else linear
        return call(x, packed, weight_scale, bias, spec.bits, spec.group_size)

    return run
