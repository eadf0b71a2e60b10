"""Linears that read the same input as one product, for a token at a time on CPU.

A small model's products take a few microseconds each, and starting the threads for one takes about
as long: Q, K and V, and gate and up, are each a product over the rows of all. Their weights stay
where they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.kernels import dense
from compress.runtime.linear import QuantLinear


def joined(linears: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """One token [1, K] to the outputs of `linears` side by side: by one product where they are of
    one format, else by theirs.
    """
    parts = [_bound(linear) for linear in linears]
    kinds = {type(part) for part in parts}
    join = getattr(kinds.pop(), "joined", None) if len(kinds) == 1 else None
    run = join(parts) if join is not None else None
    if run is not None:
        return run
    forwards = [linear.forward for linear in linears]
    return lambda x: torch.cat([forward(x) for forward in forwards], -1)


def _bound(linear: Any) -> Any:
    """The kernel and the tensors that serve `linear`."""
    if isinstance(linear, QuantLinear):
        return linear.kernel
    if type(linear) is nn.Linear and dense.takes(linear.weight):
        return dense.Dense(linear.weight, linear.bias)
    return None
