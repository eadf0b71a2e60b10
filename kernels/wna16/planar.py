"""The order in which the Triton kernels want the integers of a weight-only linear.

A word of the checkpoint holds 8 (INT4) or 4 (INT8) neighbours; to meet the right rows of x, each
would have to move to a lane of its own. Here a word holds neighbours 16 bits apart: one shift and
one mask give two 16-bit fields side by side, which is how tensor cores take their operands.

A row is cut into blocks of W words, and a block into P = 16 / bits planes of 2W neighbouring values
each. Word i holds of each plane p the values 2i, at bit `bits * p`, and 2i + 1, at bit
`bits * p + 16`. As in the checkpoint, a value is stored as value + 2^(bits-1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS = 32
ROWS = 1024
"""Rows repacked at a time: meanwhile a value takes 4 bytes."""


def block_words(group_size: int | None) -> int:
    """W: 32, but 16 for groups of an odd multiple of 32, which a plane of 64 would straddle."""
    return WORDS // 2 if group_size is not None and group_size % 64 == 32 else WORDS


def to_planar(packed: Tensor, bits: int, group_size: int | None) -> Tensor:
    """The checkpoint's words, int32 [N, words], in planar order; rows padded to whole blocks.

    The padding stands for zeros. `from_planar` is the inverse.
    """
    width = block_words(group_size)
    words = -(-packed.shape[1] // width) * width
    planar = packed.new_empty((len(packed), words))
    # Fields of 2^(bits-1), which stand for zeros, as a signed integer.
    zeros = -0x77777778 if bits == 4 else -0x7F7F7F80
    for rows, out in zip(packed.split(ROWS), planar.split(ROWS), strict=True):
        padded = F.pad(rows, (0, words - packed.shape[1]), value=zeros)
        values = _fields(padded, bits, _checkpoint_shifts(bits, packed.device))
        planes = values.view(len(rows), -1, 16 // bits, width, 2).transpose(2, 3)
        shifted = planes << _planar_shifts(bits, packed.device)
        out.copy_(shifted.sum((-2, -1), dtype=torch.int32).view(len(rows), words))
    return planar


def from_planar(planar: Tensor, bits: int, group_size: int | None, in_features: int) -> Tensor:
    """The checkpoint's words, int32 [N, ceil(in_features * bits / 32)], of `to_planar`'s."""
    width, words = block_words(group_size), -(-in_features * bits // 32)
    packed = planar.new_empty((len(planar), words))
    for rows, out in zip(planar.split(ROWS), packed.split(ROWS), strict=True):
        fields = _fields(rows, bits, _planar_shifts(bits, planar.device))
        values = fields.view(len(rows), -1, width, 16 // bits, 2).transpose(2, 3)
        shifted = values.reshape(len(rows), -1, 32 // bits) << _checkpoint_shifts(
            bits, planar.device
        )
        out.copy_(shifted.sum(-1, dtype=torch.int32)[:, :words])
    return packed


def _fields(words: Tensor, bits: int, shifts: Tensor) -> Tensor:
    """[..., *shifts.shape]: the field of each word at each bit of `shifts`."""
    spread = words.view(*words.shape, *[1] * shifts.ndim)
    return (spread >> shifts) & ((1 << bits) - 1)


def _checkpoint_shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int32, device=device)


def _planar_shifts(bits: int, device: torch.device) -> Tensor:
    """[P, 2]: the bits of a plane's two values."""
    return _checkpoint_shifts(bits, device).view(2, -1).t()
