"""A training run keeps its state on disk, whole or as it was."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress.training import loop as training
from compress.training.loop import History, Schedule, train


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What a full disk does, to files of more than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def trained(work: Path, steps: int, full_from: int | None = None) -> History:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100, 100))
    wanted = torch.ones(100, 100)

    def loss_of(step: int) -> Tensor:
        if full_from is not None and step >= full_from:
            soft = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, soft[1]))
        return (weight - wanted).square().mean()

    return train(
        [(0.1, {"weight": weight})],
        loss_of,
        lambda: float((weight - wanted).square().mean()),
        Schedule(steps),
        work,
        what="distill",
        dtype=torch.float32,
    )


def test_a_full_disk_leaves_the_state_before(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    wanted = trained(alone, 30)
    with largest_file(10**9), pytest.raises(OSError, match="File too large") as raised:
        trained(tmp_path, 30, full_from=15)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / "distill.state")
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["distill.state"]
    assert torch.load(tmp_path / "distill.state")["step"] == training.KEEP_EVERY
    found = trained(tmp_path, 30)
    assert found.curve == wanted.curve
    assert torch.equal(found.best["weight"], wanted.best["weight"])


def test_training_ends_after_measures_that_are_no_better(tmp_path: Path) -> None:
    values = iter([1.0, 0.5, 0.7, 0.6, 0.4, 0.3])
    weight = nn.Parameter(torch.zeros(3))

    def run(work: Path, patience: int | None) -> History:
        work.mkdir()
        return train(
            [(0.1, {"weight": weight})],
            lambda step: weight.square().sum() + step,
            lambda: next(values),
            Schedule(50, measures=5, patience=patience),
            work,
            what="distill",
            dtype=torch.float32,
        )

    stopped = run(tmp_path / "patient", 2)
    assert [point["step"] for point in stopped.curve] == [0, 10, 20, 30]
    assert stopped.best_step == 10
    values = iter([1.0, 0.5, 0.7, 0.6, 0.4, 0.3])
    assert [p["step"] for p in run(tmp_path / "on", None).curve] == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_best_step_is_kept_as_it_was_measured(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.rand(3))
    values, seen = iter([1.0, 0.5, 0.7]), []

    def measure() -> float:
        seen.append(weight.detach().clone())
        return next(values)

    history = train(
        [(0.1, {"weight": weight})],
        lambda _: weight.sum(),
        measure,
        Schedule(20, measures=2),
        tmp_path,
        what="distill",
        dtype=dtype,
    )
    assert history.best_step == 10
    assert history.best["weight"].dtype == dtype
    assert torch.equal(history.best["weight"].float(), seen[1])
    assert torch.equal(weight, seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_no_gradient_is_held_while_it_is_measured(tmp_path: Path) -> None:
    """Their room is that of the exact values, which plan counts on."""
    weight, held = nn.Parameter(torch.ones(8)), []

    def measure() -> float:
        held.append(weight.grad is not None)
        return float(weight.detach().square().sum())

    train(
        [(0.1, {"weight": weight})],
        lambda _: weight.square().sum(),
        measure,
        Schedule(4),
        tmp_path,
        what="distill",
        dtype=torch.bfloat16,
    )
    assert held == [False] * 5
