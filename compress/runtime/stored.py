"""Tensors that grow by tokens, as they are or in INT8: what the KV cache keeps of a layer.

Shapes: B requests, H KV heads, T tokens so far, D head size; n units (tokens, or blocks of them).
"""

from collections.abc import Callable

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
"""16 bit in any model, with the range of float32."""
GROWTH = 256
"""Tokens that room is made for at a time: fewer than so many lie unused."""


def quantize(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """`x` as int8 of its shape, and the scales of its slices along `axis`, which they have as 1.

    A scale is the largest magnitude / 127, in bfloat16. Rounds to even, by the scale as it is
    stored, so that an error is at most half a scale. A slice of zeros has scale 0.
    """
    scales = (x.abs().amax(axis, keepdim=True).float() / 127).to(SCALE_DTYPE)
    steps = torch.where(scales != 0, x.float() / scales.float(), 0.0)
    return steps.round_().clamp_(-127, 127).to(torch.int8), scales


class Growing:
    """A tensor [B, H, n, ...] that grows along n, by `growth` units of room at a time."""

    def __init__(self, growth: int = GROWTH) -> None:
        self.growth = growth
        self.room: Tensor | None = None
        self.length = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.room is None else self.room.nbytes

    def extend(self, new: Tensor) -> Tensor:
        """Put `new` [B, H, m, ...] after what is there; returns all, [B, H, n, ...], as a view."""
        end = self.length + new.shape[2]
        if self.room is None or end > self.room.shape[2]:
            batch, heads, _, *unit = new.shape
            capacity = -(-end // self.growth) * self.growth
            room = new.new_empty((batch, heads, capacity, *unit))
            if self.room is not None:
                room[:, :, : self.length] = self.read()
            self.room = room
        self.room[:, :, self.length : end] = new
        self.length = end
        return self.read()

    def read(self) -> Tensor:
        """What is there, [B, H, n, ...], as a view."""
        assert self.room is not None
        return self.room[:, :, : self.length]

    def crop(self, length: int) -> None:
        """Keep the first `length` units."""
        self.length = length

    def change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put `change` of the tensor, which picks or repeats requests, in its place."""
        if self.room is not None:
            self.room = change(self.room)


class Int8:
    """Keys or values [B, H, T, D] in INT8: blocks [block, D] of tokens, scales along one axis.

    Axis -1 of a block gives each token a scale, axis -2 each channel. As they came stay the `first`
    tokens [B, H, `exact`, D], and the newest, too few for a block: the `tail`.
    """

    def __init__(self, block: int, axis: int, exact: int = 0) -> None:
        self.block, self.axis, self.exact = block, axis, exact
        self.ints, self.scales = Growing(GROWTH // block), Growing(GROWTH // block)
        self.first: Tensor | None = None
        self.tail: Tensor | None = None

    @property
    def in_blocks(self) -> tuple[int, int]:
        """The first token that is in a block, and the first after the blocks."""
        start = 0 if self.first is None else self.first.shape[2]
        return start, start + self.ints.length * self.block

    @property
    def length(self) -> int:
        return self.in_blocks[1] + (0 if self.tail is None else self.tail.shape[2])

    @property
    def nbytes(self) -> int:
        exact = sum(part.nbytes for part in (self.first, self.tail) if part is not None)
        return self.ints.nbytes + self.scales.nbytes + exact

    def extend(self, new: Tensor) -> Tensor:
        """Store `new` [B, H, m, D] after what is there; returns all to attend to, [B, H, T, D].

        That is what was stored, dequantized to the dtype of `new`, and `new` itself.
        """
        batch, heads, tokens, size = new.shape
        before = self.length
        out = new.new_empty((batch, heads, before + tokens, size))
        out[:, :, before:] = new
        if self.first is None or self.tail is None:
            self.first = new[:, :, : self.exact].clone()
        else:
            start, end = self.in_blocks
            out[:, :, :start], out[:, :, end:before] = self.first, self.tail
            if self.ints.length:
                blocks = out[:, :, start:end].unflatten(2, (-1, self.block))
                blocks.copy_(self.ints.read()).mul_(self.scales.read())
        self._store(out[:, :, self.in_blocks[1] :])
        return out

    def _store(self, tokens: Tensor) -> None:
        """Make blocks of `tokens`, and the tail of the rest."""
        whole = tokens.shape[2] // self.block * self.block
        if whole:
            blocks = tokens[:, :, :whole].unflatten(2, (-1, self.block))
            ints, scales = quantize(blocks, self.axis)
            self.ints.extend(ints)
            self.scales.extend(scales)
        # A copy: a view would hold all that was attended to.
        self.tail = tokens[:, :, whole:].clone()

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, `exact` at least; a broken block goes to the tail."""
        assert self.tail is not None
        beyond = length - self.in_blocks[0]
        kept = min(beyond // self.block, self.ints.length)
        if kept < self.ints.length:
            ints, scales = (part.read()[:, :, kept] for part in (self.ints, self.scales))
            self.tail = ints.to(self.tail.dtype).mul_(scales)
        self.tail = self.tail[:, :, : beyond - kept * self.block].clone()
        self.ints.crop(kept)
        self.scales.crop(kept)

    def change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put `change` of each tensor, which picks or repeats requests, in its place."""
        self.ints.change_batch(change)
        self.scales.change_batch(change)
        if self.first is not None and self.tail is not None:
            self.first, self.tail = change(self.first), change(self.tail)
