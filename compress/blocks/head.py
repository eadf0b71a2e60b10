"""The output layer of a model, of which a part is in memory at a time."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from compress.soundness import CHUNK
from compress.tensors import TensorFiles

Parts = Callable[[Tensor], Iterable[tuple[int, Tensor]]]


class _FromDisk(torch.autograd.Function):
    """`hidden` [..., H] times a weight [V, H] of which a part is read at a time, there and back:
    autograd by itself would keep all parts until the way back.

    parts: the weight's rows in order, in the dtype and on the device of the tensor that it is
    given, each part with its first row's number.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return torch.cat([nn.functional.linear(hidden, part) for _, part in parts(hidden)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        given = (gradient[..., n : n + len(part)] @ part for n, part in ctx.parts(gradient))
        return functools.reduce(Tensor.add_, given), None


class Head(nn.Module):
    """The output layer [V, H], read from disk a part of the vocabulary at a time.

    name: of its weight in the files. bias [V], if any, stays in memory.
    """

    def __init__(self, tensors: TensorFiles, name: str, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.tensors = tensors
        self.name = name
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        logits = _FromDisk.apply(hidden, self._parts)
        return logits if self.bias is None else logits + self.bias

    def _parts(self, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        for first, weight in self.tensors.chunks(self.name, CHUNK):
            yield first, weight.to(like.device, like.dtype)
