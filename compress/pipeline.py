"""The order of the stages: what is run, what was done before, what goes on."""

import fcntl
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compress import log, preflight, source
from compress.artifact import fingerprint, write_text
from compress.config import Config
from compress.errors import GateError, UserError
from compress.eval import gate
from compress.machine import PeakDisk, PeakMemory, hardware, packages, release_memory
from compress.model_path import TINY, home, local, locate
from compress.stage import Run
from compress.stages.report import CARD
from compress.steps import MANIFESTS, Step, plan_steps, refuse_gaps, unmade
from compress.text import documents

logger = log.logger


def run(config: Config) -> Path:
    """Take the model through the recipe's stages and return the run's folder.

    Stages whose result is on disk, made from the same settings, are skipped; an interrupted stage
    goes on. Raises UserError for what the user can mend, before anything is loaded where possible,
    and GateError, once all is written, where the result breaks the limits of score.gate.
    """
    out = Path(config.out or "")
    with _own(out):
        started = time.monotonic()
        steps = plan_steps(config, out)
        ahead, original = unmade(config, steps), _original(config, steps)
        if ahead:
            _refuse(config, ahead, original)
        log.start(out / "log.txt")
        try:
            _run_steps(config, steps, ahead, original)
            publish(out)
            seconds = time.monotonic() - started
            if ahead:
                logger.info(f"done in {seconds:.0f} s: {out}")
            else:
                logger.info(f"nothing to do: every stage is done, {out} ({seconds:.1f} s)")
            _judge(config, steps)
            return out
        finally:
            log.stop()


def check(config: Config) -> None:
    """Raise UserError for what the start of `run` would refuse; nothing is written.

    Nothing is fetched either: of a run on a model of the hub the order of its stages is looked at,
    not whether they fit the model, its files or what is on disk, and a data set of the hub is not
    read.
    """
    if config.model.path != TINY and local(config.model.path) is None:
        refuse_gaps(config)
        return
    steps = plan_steps(config, Path(config.out or ""))
    ahead = unmade(config, steps)
    if config.score.text is None and documents.on_hub(config.data):
        ahead -= {"score"}  # of which its text is looked at
    if ahead:
        _refuse(config, ahead, _original(config, steps))


def _original(config: Config, steps: list[Step]) -> Path | None:
    """The folder of the model that was given; None where it is still to be made."""
    first = steps[0]
    if first.name != "source":
        return locate(config.model)
    return first.artifact.folder if first.made() else None


def _refuse(config: Config, ahead: Collection[str], original: Path | None) -> None:
    preflight.refuse(config, source.configuration(config.model, original), original, ahead)


def _run_steps(
    config: Config, steps: list[Step], ahead: Collection[str], original: Path | None
) -> None:
    """Run the stages `ahead`, on what the others left."""
    artifacts: dict[str, Path] = {}
    manifests: dict[str, dict[str, Any]] = {}
    if original is not None:
        artifacts["dense"] = original
    if config.checkpoint is not None:
        artifacts["checkpoint"] = home(config.checkpoint)
    for step in steps:
        manifest, done = step.made(), step.name not in ahead
        if done and manifest is None:
            if step.stage.gives == "dense":
                artifacts.pop("dense", None)  # what came before is not what this run works on
            continue
        if not done:
            for kind in step.stage.needs:
                if kind != MANIFESTS and kind not in artifacts:
                    raise UserError(_missing_on_disk(step, kind, steps))
            manifest = _run_step(config, step, artifacts, manifests)
            if step.name == "source":  # what waited for its tokenizer
                _refuse(config, ahead, step.artifact.folder)
        assert manifest is not None
        manifests[step.name] = {**manifest, "skipped": done}
        if step.stage.gives is not None:
            if step.stage.gives == "dense" and "dense" in artifacts:
                artifacts.setdefault("original", artifacts["dense"])
            artifacts[step.stage.gives] = step.artifact.folder
        if done and config.only in (None, step.name):
            logger.info(f"{step.name}: done before, skipped")


def _missing_on_disk(step: Step, kind: str, steps: list[Step]) -> str:
    maker = next(s.name for s in steps if s.stage.gives == kind and s.name != "source")
    return (
        f"{step.name} needs {kind}, which is not in {step.artifact.stages}; "
        f"run it first with only={maker}, or without only="
    )


def _run_step(
    config: Config, step: Step, artifacts: Mapping[str, Path], manifests: Mapping[str, Any]
) -> dict[str, Any]:
    resumed = step.artifact.begin(step.key)
    logger.info(f"{step.name}{': goes on' if resumed else ''}")
    started, clock = datetime.now(UTC), time.monotonic()
    with PeakMemory() as memory, PeakDisk(step.artifact.work) as disk:
        inputs = Run(config, artifacts, step.artifact.work, manifests)
        metrics = step.stage.run(inputs, step.artifact.out)
    release_memory()
    seconds = time.monotonic() - clock
    manifest = {
        "stage": step.name,
        "version": step.stage.version,
        "fingerprint": fingerprint(step.key),
        "key": step.key,
        "config": step.key[step.name],
        "inputs": step.key["inputs"],
        "metrics": metrics,
        "seconds": seconds,
        "peak_rss_bytes": memory.peak,
        "temporary_disk_bytes": disk.peak,
        "resumed": resumed,
        "packages": packages(),
        "hardware": hardware(),
        "seed": config.seed,
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    step.artifact.finish(manifest)
    logger.info(f"{step.name}: {seconds:.1f} s, peak memory {memory.peak / 1e9:.2f} GB")
    return manifest


def _judge(config: Config, steps: list[Step]) -> None:
    """Raise GateError where the scores and the time of a token, if this run asked for any, break
    the recipe's limits.
    """
    both = config.only in (None, "score", "report")
    names = {"score", "serve"} if both else {"serve"} & {config.only}
    found = {
        step.name: manifest["metrics"]
        for step in steps
        if step.name in names and (manifest := step.artifact.manifest())
    }
    reasons = gate.broken(config.score.gate, found.get("score"), found.get("serve"))
    if reasons:
        raise GateError(reasons)


def publish(out: Path) -> None:
    """Put the report where a person looks for it: report.html, .md and .json in the run folder,
    and the scores on the checkpoint's card.
    """
    made = out / "stages" / "report"
    targets = {file: out / file.name for file in sorted(made.glob("report.*"))}
    if (made / CARD).exists() and (out / "checkpoint").is_dir():
        targets[made / CARD] = out / "checkpoint" / "README.md"
    for file, target in targets.items():
        text = file.read_text(encoding="utf-8")
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            write_text(target, text)


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """Make the run folder and keep other runs out of it while this one works.

    The folders that a run made and put nothing into go again with it.
    """
    stages = out / "stages"
    try:
        made = [folder for folder in (stages, *stages.parents) if not folder.exists()]
        stages.mkdir(parents=True, exist_ok=True)
        lock = (stages / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"out={out}: cannot be written ({error.strerror}); give another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"out={out}: another run is at work there; wait for it") from error
        try:
            yield
        finally:
            if made and list(stages.iterdir()) == [stages / ".lock"]:
                (stages / ".lock").unlink()
                for folder in made:
                    if not any(folder.iterdir()):
                        folder.rmdir()
