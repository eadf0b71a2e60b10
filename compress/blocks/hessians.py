"""X^T X of what linears read, by which GPTQ rounds, and its factors."""

from collections.abc import Iterable

from torch import Tensor, nn

from compress.algorithms.gptq import DAMPING, Factor, factor
from compress.errors import UserError
from compress.log import logger


class Hessians:
    """X^T X [K, K] of what the linears `names` of a block read, summed by hooks over the real
    tokens of the windows that pass through it. Linears that read the same tensor share one.
    """

    def __init__(self, block: nn.Module, names: Iterable[str]) -> None:
        self.linears = {name: block.get_submodule(name) for name in names}
        self._owners: dict[str, str] = {}
        self._sums: dict[str, Tensor] = {}
        self._seen: list[tuple[Tensor, str]] = []
        self._tokens = 0

    def __enter__(self) -> "Hessians":
        self._hooks = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[0]))
            for name, linear in self.linears.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._seen.clear()

    def start(self, mask: Tensor) -> None:
        """Announce a batch by its mask [B, T]."""
        self._real = mask.bool()
        self._tokens += int(mask.sum())
        self._seen.clear()

    def _see(self, name: str, inputs: Tensor) -> None:
        owner = next((owner for tensor, owner in self._seen if tensor is inputs), name)
        self._owners[name] = owner
        if owner != name:
            return
        self._seen.append((inputs, name))
        rows = inputs[self._real].float()
        if name not in self._sums:
            self._sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
        self._sums[name].addmm_(rows.T, rows)

    def means(self) -> list[tuple[list[str], Tensor]]:
        """A token's mean of every sum, which it takes the place of, each after the names of all
        linears that read the same tensor.
        """
        owners = self._owners.items()
        return [
            ([name for name, of in owners if of == owner], sums.div_(self._tokens))
            for owner, sums in self._sums.items()
        ]


def factored(name: str, hessian: Tensor, stage: str) -> Factor:
    """The factor of a Hessian [K, K], which is used up, of what the linear `name` reads.

    Tells more damping than usual. Raises UserError, with the way out in `stage`, where it cannot
    be factored.
    """
    try:
        found = factor(hessian)
    except ValueError as error:
        raise UserError(f"{name}: {error}; {stage}.rounding=nearest does without") from error
    if found.damping > DAMPING:
        logger.info(f"  {name}: Hessian damped by {found.damping:g}")
    return found
