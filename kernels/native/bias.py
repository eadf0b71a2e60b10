"""The biases of linears whose outputs lie side by side."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Biased(Protocol):
    """A weight [N, ...] and its bias [N], if it has one."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


def side_by_side(parts: Sequence[Biased]) -> Tensor | None:
    """One bias for all: zeros where a part has none, None where none has."""
    known = next((part.bias for part in parts if part.bias is not None), None)
    if known is None:
        return None
    return torch.cat([known.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in parts])
