"""Decoder blocks of a kind that is not known: run as they are, or refused in one line.

What the stages rely on: a block takes hidden states [B, T, H] as its one positional argument and
gives hidden states, nothing beside them; its linears read [B, T, K].
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from compress.errors import UserError


def watch(kind: str, blocks: Iterable[nn.Module]) -> None:
    """Make blocks of models of this `kind` raise UserError where one is not like that."""

    def outputs(_: nn.Module, __: object, given: object) -> None:
        if not isinstance(given, Tensor):
            raise _refusal(kind, f"give {type(given).__name__}, wanted hidden states alone")

    def inputs(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].ndim != 3:
            raise _refusal(kind, f"hold a linear that reads {list(args[0].shape)}, not [B, T, K]")

    for block in blocks:
        block.register_forward_hook(outputs)
        for linear in block.modules():
            if isinstance(linear, nn.Linear):
                linear.register_forward_pre_hook(inputs)


@contextmanager
def told(kind: str) -> Iterator[None]:
    """Tell in one line of what goes wrong around the blocks of a model of this `kind`."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _refusal(kind, f"are called otherwise than those of the known kinds ({line})") from (
            error
        )


def _refusal(kind: str, why: str) -> UserError:
    return UserError(
        f"{kind} is not supported: its decoder blocks {why}; docs/families.md lists the kinds that "
        "were tried"
    )
