"""AdamW with its state in 8 bit: near that in 32, a fourth of its size, the same when resumed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress.errors import ConfigError
from compress.planning.training import MOMENT
from compress.stages.distill import Distill
from compress.training import optimizer
from compress.training.loop import History, Schedule, train

WHY = "torchao is not installed (pip install '.[optimizer]')"
pytestmark = pytest.mark.filterwarnings("ignore")
"""torch's compiler warns of torch's own uses of what is deprecated."""


def learned(work: Path, kind: str, fails_at: int | None = None) -> History:
    """Of a vector that is drawn to ones by losses that differ from step to step."""
    work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128))

    def loss_of(step: int) -> Tensor:
        if step == fails_at:
            raise InterruptedError
        noise = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
        return (weight - 1 - noise).square().mean()

    return train(
        [(0.05, {"weight": weight})],
        loss_of,
        lambda: float((weight - 1).square().mean()),
        Schedule(40),
        work,
        what="distill",
        dtype=torch.float32,
        optimizer=kind,
    )


def test_in_8_bit_it_learns_as_in_32_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason=WHY)
    exact, small = (learned(tmp_path / kind, kind) for kind in optimizer.OPTIMIZERS)
    start, *_, end = (point["value"] for point in exact.curve)
    assert end < 0.5 * start
    assert small.curve[-1]["value"] == pytest.approx(end, rel=0.05)
    assert not torch.equal(small.best["weight"], exact.best["weight"])
    again = tmp_path / "again"
    with pytest.raises(InterruptedError):
        learned(again, "adamw_8bit", fails_at=25)
    resumed = learned(again, "adamw_8bit")
    assert torch.equal(resumed.best["weight"], small.best["weight"])
    assert resumed.curve == small.curve


def test_its_state_takes_what_the_plan_says(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason=WHY)
    for kind in optimizer.OPTIMIZERS:
        weight = nn.Parameter(torch.randn(64, 512))
        adam = optimizer.adamw([(0.1, [weight])], kind)
        weight.sum().backward()
        adam.step()
        moment = adam.state[weight]["exp_avg"]
        parts = [moment] if kind == "adamw" else [moment.codes, moment.scale]
        assert sum(p.nbytes for p in parts) == MOMENT[kind] * weight.numel()


def test_without_torchao_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="adamw_8bit needs torchao, which is not installed"):
        Distill(optimizer="adamw_8bit")
    with pytest.raises(ConfigError, match="optimizer is 'sgd'; wanted one of adamw, adamw_8bit"):
        Distill(optimizer="sgd")
    Distill(optimizer="adamw")
