"""Several processes of one run, as `accelerate launch` starts them: one leads, the others help.

The leader alone composes, locks, logs and writes, as if it were the only one. What it hands to
`everywhere` runs in all of them at once, each with its share; there alone `count()` is above 1. A
process that was started alone is its own leader: its share is everything, a sum what it was.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from compress.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Sequence[Any] | Tensor)

FOREVER = timedelta(days=30)
"""The others wait through stages that only the leader works at."""
TOLD = "told"


@dataclass(frozen=True)
class _Team:
    """words: the group for objects, on CPU, where waiting costs no GPU. store: shared counters."""

    rank: int = 0
    count: int = 1
    words: Any = None
    store: distributed.Store | None = None


_ALONE = _Team()
_joined: ContextVar[_Team] = ContextVar("joined", default=_ALONE)
_working: ContextVar[_Team] = ContextVar("working", default=_ALONE)


def lead(work: Callable[[], object]) -> None:
    """Run `work` in the leader; a process that was started beside it helps until that ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in os.environ:
        work()
        return
    team = _join()
    _joined.set(team)
    if team.rank > 0:
        _help(team)
    else:
        try:
            work()
        finally:
            if count() == 1:  # else the others are in the midst of what failed here
                _said(team, None)
    distributed.destroy_process_group()


def everywhere(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` gives in the leader, after it ran in all processes, with the same arguments."""
    team = _joined.get()
    if team.count == 1 or count() > 1:
        return work(*args, **kwargs)
    _said(team, (work, args, kwargs))
    return _worked(team, work, *args, **kwargs)


def count() -> int:
    """How many processes are at this work; 1 outside of `everywhere`."""
    return _working.get().count


def rank() -> int:
    """Which of them this process is, from 0 on."""
    return _working.get().rank


def leads() -> bool:
    """Whether this process writes and speaks for all."""
    return rank() == 0


def sharded() -> bool:
    """Whether a model that learns is cut over the processes: `accelerate launch --use_fsdp`."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return asked and _joined.get().count > 1


def share(items: S) -> S:
    """The part of `items` for this process; all parts, in the processes' order, are the whole."""
    team, total = _working.get(), len(items)
    found = items[team.rank * total // team.count : (team.rank + 1) * total // team.count]
    return found  # type: ignore[return-value]


def gathered(value: T) -> list[T]:
    """What each process gave, in their order; none goes on before all have given."""
    team = _working.get()
    found: list[Any] = [value] * team.count
    if team.count > 1:
        distributed.all_gather_object(found, value, team.words)
    return found


def wait() -> None:
    """Let none go on before all are here."""
    gathered(None)


def agreed(value: T) -> T:
    """The leader's value."""
    return gathered(value)[0]


def weight(own: float) -> float:
    """The share of `own` in the sum over all processes."""
    return own / sum(gathered(own))


def refuse_fewer(option: str, value: int) -> None:
    """Raise UserError where `value`, as it was given by `option`, leaves a process of this run
    without any; the leader alone can ask before there is work for all.
    """
    wanted = _joined.get().count
    if value < wanted:
        raise UserError(
            f"{option} is {value} over {wanted} processes; wanted at least {wanted}, or fewer "
            "processes"
        )


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let every process have the sum of all their gradients; those of sharded ones are summed."""
    if count() == 1:
        return
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    for parameter in plain:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for under_way in [distributed.all_reduce(p.grad, async_op=True) for p in plain]:
        under_way.wait()


def first_to_tell() -> bool:
    """Whether this process is the first to say how the run ends: it alone does."""
    store = _joined.get().store
    try:
        return store is None or store.add(TOLD, 1) == 1
    except RuntimeError:  # it went with the process that held it
        return False


def _join() -> _Team:
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=FOREVER)
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    words = distributed.new_group(backend="gloo", timeout=FOREVER)
    return _Team(state.process_index, state.num_processes, words, store)


def _help(team: _Team) -> None:
    while (job := _said(team)) is not None:
        work, args, kwargs = job
        _worked(team, work, *args, **kwargs)


def _said(team: _Team, job: Any = None) -> Any:
    """What the leader says, to all."""
    words = [job]
    with _company():
        distributed.broadcast_object_list(words, src=0, group=team.words)
    return words[0]


def _worked(team: _Team, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    before = _working.set(team)
    with _company():
        found = work(*args, **kwargs)
        wait()
    _working.reset(before)  # not where it failed: see `lead`
    return found


@contextmanager
def _company() -> Iterator[None]:
    """Raise UserError where another process is no longer there."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo/transport" in str(error):
            raise UserError(
                "another process of this run has ended; the same command goes on from here"
            ) from error
        raise
