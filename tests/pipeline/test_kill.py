"""`kill -9` anywhere, then the same command: the same bytes as a run left alone."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from small import die, forked
from test_run import files

from compress import pipeline
from compress.artifact import Artifact
from compress.blocks.hidden import HiddenStates
from compress.config import Config
from compress.stages import calibrate, quantize
from compress.training import importance, labels, refitting
from compress.training import loop as training

Small = Callable[..., Config]

BUILD = "stages=[plan,calibrate,quantize,distill,extend,export]"
ALL = ("plan", "calibrate", "quantize", "distill", "extend", "export", "serve", "score", "report")
WITH_BARS = (calibrate, quantize, importance, refitting, labels, training)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, bytes]:
    from small import SMALL, composed

    out = tmp_path_factory.mktemp("alone") / "run"
    settings = composed("recipe=tiny", f"model.path={tiny_model}", f"out={out}", *SMALL, BUILD)
    assert forked(lambda: pipeline.run(settings)) == 0
    return files(out / "checkpoint")


def killed_in_bar(bar: str, after: int, config: Config) -> None:
    """Run, and die when the progress bar `bar` has done `after` items."""

    def dying(items: Iterable[object], what: str, *_: object, **__: object) -> Iterator[object]:
        for number, item in enumerate(items):
            if what == bar and number == after:
                die()
            yield item

    for module in WITH_BARS:
        module.progress = dying  # type: ignore[attr-defined]
    pipeline.run(config)


def killed_before_a_commit(config: Config) -> None:
    """Run, and die when a second block is done and kept, but not yet counted as done."""
    commit, calls = HiddenStates.commit, itertools.count()

    def dying(self: HiddenStates, *names: str) -> None:
        if next(calls) == 1:
            die()
        commit(self, *names)

    HiddenStates.commit = dying  # type: ignore[method-assign]
    pipeline.run(config)


def killed_at_finish(stage: str, config: Config) -> None:
    """Run, and die when `stage` has done its work but its result is not yet in place."""
    finish = Artifact.finish

    def dying(self: Artifact, manifest: dict[str, object]) -> None:
        if self.stage == stage:
            die()
        finish(self, manifest)

    Artifact.finish = dying  # type: ignore[method-assign, assignment]
    pipeline.run(config)


@pytest.mark.parametrize(
    ("bar", "after"),
    [("calibrate", 2), ("quantize", 2), ("soft labels", 1), ("distill", 11), ("extend", 11)],
)
def test_killed_inside_a_stage(
    small: Small, left_alone: dict[str, bytes], bar: str, after: int
) -> None:
    assert forked(lambda: killed_in_bar(bar, after, small(BUILD))) == -9
    out = Path(small().out or "")
    stage = {"soft labels": "distill"}.get(bar, bar)
    assert (out / "stages" / f"{stage}.partial" / "key.json").exists()
    assert not (out / "stages" / f"{stage}.json").exists()
    assert forked(lambda: pipeline.run(small(BUILD))) == 0
    assert f"{stage}: goes on" in (out / "log.txt").read_text()
    assert files(out / "checkpoint") == left_alone
    assert not list((out / "stages").glob("*.partial"))


@pytest.mark.parametrize("stage", ALL)
def test_killed_at_the_end_of_a_stage(
    small: Small, left_alone: dict[str, bytes], stage: str
) -> None:
    stages = BUILD if stage in BUILD else f"stages=[{','.join(ALL)}]"
    assert forked(lambda: killed_at_finish(stage, small(stages))) == -9
    out = Path(small().out or "")
    assert not (out / "stages" / f"{stage}.json").exists()
    assert forked(lambda: pipeline.run(small(stages))) == 0
    wanted = dict(left_alone)
    if stages != BUILD:  # then there are scores for the card
        wanted["README.md"] = (out / "stages" / "report" / "card.md").read_bytes()
        assert wanted["README.md"] != left_alone["README.md"]
    assert files(out / "checkpoint") == wanted
    assert (out / "stages" / f"{stage}.json").exists()


def test_progress_is_used_not_redone(small: Small) -> None:
    """After a kill at block 2, calibrate starts at block 2."""
    assert forked(lambda: killed_in_bar("calibrate", 2, small(BUILD))) == -9
    work = Path(small().out or "") / "stages" / "calibrate.partial" / "work"
    states = HiddenStates(work)
    assert states.done("calibration") == states.done("heldout") == 2


@pytest.mark.parametrize(
    ("rounding", "killed", "times"),
    [
        ("nearest", lambda config: killed_in_bar("quantize", 1, config), 3),
        # At each block of calibrate but the first, then at each of quantize.
        ("gptq", killed_before_a_commit, 3 + 4),
        ("learned", killed_before_a_commit, 3 + 4),
    ],
)
def test_killed_at_every_block_one_after_the_other(
    small: Small, tmp_path: Path, rounding: str, killed: Callable[[Config], None], times: int
) -> None:
    settings = ("stages=[plan,calibrate,quantize]", f"quantize.rounding={rounding}")
    settings = (*settings, "quantize.steps=3", "quantize.batch=4", "calibrate.written=2")
    text = tmp_path / "text.txt"  # sooner read than Python's documentation
    text.write_text("".join(f"The number {number} follows. " for number in range(2000)))
    settings = (*settings, f"data.path={text}")
    out, other = Path(small().out or ""), tmp_path / "other"
    for _ in range(times):
        assert forked(lambda: killed(small(*settings))) == -9
    assert forked(lambda: killed(small(*settings))) == 0  # one block is left, and is done
    assert "quantize: goes on" in (out / "log.txt").read_text()
    assert forked(lambda: pipeline.run(small(*settings, f"out={other}"))) == 0
    for stage in ("calibrate", "quantize"):
        assert files(out / "stages" / stage) == files(other / "stages" / stage)
    for folder, went_on in ((out, True), (other, False)):
        told = json.loads((folder / "stages" / "quantize.json").read_text())["metrics"]
        assert told["went_on"] is went_on
        parts = told["seconds_by_part"]
        assert {"reading", "saving", "writing", "held-out"} <= set(parts)
