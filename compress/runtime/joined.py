"""Products for a token at a time on CPU, those of linears that read the same input as one.

A small model's products take a few microseconds each, and starting the threads for one takes about
as long: Q, K and V, and gate and up, are each a product over the rows of all. Their weights stay
where they are.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from compress.kernels import dense
from compress.kernels.dense import Dense
from compress.kernels.w8a8.cpu import Int8
from compress.kernels.wna16.cpu import Packed
from compress.runtime.linear import QuantLinear

Product = Callable[[Tensor], Tensor]
"""One token [1, K] to [1, N]."""
JOINABLE = (Dense, Int8, Packed)


def joined(linears: Sequence[nn.Module]) -> Product:
    """One token [1, K] to the outputs of `linears` side by side: neighbours of one format by one
    product. The tensors are taken as they are now.
    """
    products: list[Product] = []
    for _, same in groupby([_bound(linear) for linear in linears], type):
        products += _together(list(same))
    if len(products) == 1:
        return products[0]
    return lambda x: torch.cat([product(x) for product in products], -1)


def _together(parts: list[Any]) -> list[Product]:
    """One product for all `parts`, of one type, or theirs."""
    join = type(parts[0]).joined if isinstance(parts[0], JOINABLE) else None
    one = join(parts) if join else None
    return parts if one is None else [one]


def _bound(linear: nn.Module) -> Product:
    """The kernel and the tensors that serve `linear`; `linear` itself where there is none."""
    if isinstance(linear, QuantLinear) and linear.kernel is not None:
        return linear.kernel
    if type(linear) is nn.Linear and dense.takes(linear.weight):
        return Dense(linear.weight, linear.bias)
    return linear
