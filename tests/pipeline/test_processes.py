"""Several processes at one run: what they share, how they end, and that two give what one gives."""

import json
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import launched
from safetensors.torch import load_file
from small import SMALL, composed, die, forked

from compress import pipeline, processes
from compress.config import Config
from compress.errors import UserError
from compress.runtime.loader import load
from compress.text import documents
from compress.training import loop as training
from compress.training.long_training import Piece, loss_of

SETTINGS = (
    *SMALL,
    "stages=[plan,calibrate,quantize,distill]",
    "quantize=w4a16",
    "quantize.group_size=32",
    "distill.samples=28",
)


def halves(folder: Path) -> str:
    """Each process notes what it got; the leader's answer."""
    own = processes.share(list(range(5)))
    parameter = torch.nn.Parameter(torch.zeros(2))
    if processes.leads():
        parameter.grad = torch.ones(2)
    processes.sum_gradients([parameter])
    assert parameter.grad is not None
    found = {
        "own": own,
        "parts": processes.gathered(own),
        "agreed": processes.agreed(processes.rank()),
        "weight": processes.weight(len(own)),
        "gradient": parameter.grad.tolist(),
    }
    (folder / f"{processes.rank()}.json").write_text(json.dumps(found))
    return f"from {processes.rank()}"


def test_what_runs_everywhere_gets_shares_and_is_alone_again_after(tmp_path: Path) -> None:
    def work() -> None:
        assert processes.count() == 1
        assert processes.everywhere(halves, tmp_path) == "from 0"
        assert (processes.count(), processes.share([1, 2, 3])) == (1, [1, 2, 3])

    assert launched(work) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first["own"], second["own"]) == ([0, 1], [2, 3, 4])
    assert (first["weight"], second["weight"]) == (0.4, 0.6)
    for found in (first, second):
        assert found["parts"] == [[0, 1], [2, 3, 4]]
        assert found["agreed"] == 0
        assert found["gradient"] == [1, 1]


def test_a_process_alone_has_everything() -> None:
    done = []
    processes.lead(lambda: done.append(processes.everywhere(processes.count)))
    assert done == [1]
    assert processes.share(torch.arange(3)).tolist() == [0, 1, 2]
    assert processes.gathered("a") == ["a"]
    assert processes.weight(7) == 1.0


def fail(rank: int) -> None:
    if processes.rank() == rank:
        raise UserError("weights: nothing but zeros")
    processes.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_ends_all_with_one_line(
    capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    assert launched(lambda: processes.everywhere(fail, rank)) == [2, 2]
    assert capfd.readouterr().err == "compress: weights: nothing but zeros\n"


@pytest.fixture(scope="module")
def settings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Config]:
    folder = tmp_path_factory.mktemp("runs")

    def make(out: str) -> Config:
        return composed("recipe=tiny", f"model.path={tiny_model}", f"out={folder / out}", *SETTINGS)

    documents.fingerprint(make("any").data)  # reads the text, once for all that is forked
    return make


@pytest.fixture(scope="module")
def alone(settings: Callable[[str], Config]) -> Path:
    """The stages of a run by one process."""
    assert forked(lambda: pipeline.run(settings("alone"))) == 0
    return stages_of(settings("alone"))


def stages_of(config: Config) -> Path:
    return Path(config.out or "") / "stages"


def with_all_but_distill(config: Config, alone: Path) -> Config:
    """The run has the results of the one by one process, but for those of distill."""
    shutil.copytree(alone, stages_of(config), ignore=shutil.ignore_patterns("distill*"))
    return config


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def killed_at(step: int, config: Config, stage: str = "distill") -> None:
    """Run, and die when `step` steps of a stage's training are done."""

    def dying(items: Iterable[object], what: str, *_: object, **__: object) -> Iterator[object]:
        for number, item in enumerate(items):
            if (what, number) == (stage, step):
                die()
            yield item

    training.progress = dying  # type: ignore[assignment]
    pipeline.run(config)


def test_two_processes_give_what_one_gives_and_go_on_where_they_were_killed(
    settings: Callable[[str], Config], alone: Path
) -> None:
    two, whole = settings("two"), with_all_but_distill(settings("whole"), alone)
    assert launched(lambda: killed_at(11, two)) == [-signal.SIGKILL, 2]
    state = torch.load(stages_of(two) / "distill.partial" / "work" / "distill.state")
    assert state["step"] == training.KEEP_EVERY
    assert launched(lambda: pipeline.run(two)) == [0, 0]
    assert "distill: goes on" in (stages_of(two).parent / "log.txt").read_text()
    for stage in ("calibrate", "labels", "quantize"):
        assert files(stages_of(two) / stage) == files(alone / stage)
    near(stages_of(two), alone)
    assert launched(lambda: pipeline.run(whole)) == [0, 0]
    assert files(stages_of(two) / "distill") == files(stages_of(whole) / "distill")


def near(
    found: Path, wanted: Path, stage: str = "distill", figure: str = "kl", differ: bool = True
) -> None:
    """The students of two runs differ by no more than sums in another order do, rounded to 16 bit;
    some of it shows if they `differ`, or both would be the same computation.
    """
    told = [json.loads((s / f"{stage}.json").read_text())["metrics"] for s in (found, wanted)]
    curves = [[point[figure] for point in figures["curve"]] for figures in told]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert (curves[0] != curves[1]) >= differ
    best = [figures["best_step"] for figures in told]
    assert best[0] == best[1] > 0  # which step, the machine's arithmetic decides
    one, other = (load_file(s / stage / "model.safetensors") for s in (found, wanted))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        largest = other[name].abs().max().float()
        assert (tensor.float() - other[name].float()).abs().max() <= largest / 256, name


def test_a_model_cut_over_two_processes_learns_what_one_learns_killed_or_not(
    settings: Callable[[str], Config], alone: Path
) -> None:
    cut = with_all_but_distill(settings("cut"), alone)
    cut.distill.recompute = True
    cut.distill.tasks, cut.distill.task_items = ["knowledge"], 4
    sharded = {"ACCELERATE_USE_FSDP": "true"}
    assert launched(lambda: killed_at(11, cut), **sharded) == [-signal.SIGKILL, 2]
    assert launched(lambda: pipeline.run(cut), **sharded) == [0, 0]
    told = json.loads((stages_of(cut) / "distill.json").read_text())["metrics"]
    assert told["tasks"]["knowledge"]["items"] == 4
    assert all(point["tasks"]["knowledge"] in (0, 25, 50, 75, 100) for point in told["curve"])
    near(stages_of(cut), alone)


def test_two_processes_teach_a_smaller_model_as_one_does_killed_or_not(
    settings: Callable[[str], Config],
) -> None:
    def smaller(out: str) -> Config:
        config = settings(out)
        config.stages = ["shrink"]
        cut, taught = {"blocks": 3, "mlp": 256, "kv_heads": 1}, {"samples": 24, "length": 64}
        config.shrink = replace(
            config.shrink, **cut, **taught, batch=2, rate=1e-3, measures=1, fit=0
        )
        return config

    one, two = smaller("shrunk-by-one"), smaller("shrunk-by-two")
    assert forked(lambda: pipeline.run(one)) == 0
    assert launched(lambda: killed_at(11, two, "shrink")) == [-signal.SIGKILL, 2]
    assert launched(lambda: pipeline.run(two)) == [0, 0]
    assert files(stages_of(two) / "shrink_labels") == files(stages_of(one) / "shrink_labels")
    near(stages_of(two), stages_of(one), "shrink")


def test_two_processes_stretch_a_window_as_one_does_killed_or_not(
    settings: Callable[[str], Config],
) -> None:
    def longer(out: str) -> Config:
        config = settings(out)
        config.stages = ["calibrate", "quantize", "extend"]
        exact = {"precision": "float32", "measures": 1}
        config.extend = replace(config.extend, method="yarn", factor=4, batch=4, **exact)
        assert config.extend.labels
        return config

    one, two = longer("stretched-by-one"), longer("stretched-by-two")
    assert forked(lambda: pipeline.run(one)) == 0
    assert launched(lambda: killed_at(11, two, "extend")) == [-signal.SIGKILL, 2]
    assert launched(lambda: pipeline.run(two)) == [0, 0]
    assert files(stages_of(two) / "extend_labels") == files(stages_of(one) / "extend_labels")
    near(stages_of(two), stages_of(one), "extend", "ppl", differ=False)


def losses_of_pieces(folder: Path) -> list[float]:
    """The part of one step's loss that each process has."""
    model = load(folder, dtype=torch.float32)
    pieces = [Piece(torch.arange(first, first + 20)) for first in (5, 40, 70, 90)]
    with torch.no_grad():
        found = loss_of(model, pieces, 256, torch.Generator().manual_seed(0))
    return processes.gathered(float(found))


def test_the_losses_of_all_processes_are_that_of_a_step(tiny_model: Path) -> None:
    def work() -> None:
        (alone,) = losses_of_pieces(tiny_model)
        parts = processes.everywhere(losses_of_pieces, tiny_model)
        assert len(parts) == 2
        assert sum(parts) == pytest.approx(alone, rel=1e-5)
        assert min(parts) > alone / 4

    assert launched(work) == [0, 0]


def test_a_process_without_a_window_is_refused(
    settings: Callable[[str], Config], alone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    few = with_all_but_distill(settings("few"), alone)
    assert launched(lambda: pipeline.run(few), 3) == [2, 0, 0]  # before anything is computed
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("compress:")]
    assert told == [
        "compress: distill.batch is 2 over 3 processes; wanted at least 3, or fewer processes"
    ]


def test_a_batch_too_small_for_a_smaller_model_is_refused_before_its_trials(
    settings: Callable[[str], Config], capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings("smaller")
    config.shrink.blocks, config.stages = 3, ["shrink"]
    assert launched(lambda: pipeline.run(config)) == [2, 0]
    assert "compress: shrink.batch is 1 over 2 processes; wanted at" in capfd.readouterr().err
    assert not (stages_of(config) / "shrink.partial").exists()
