"""The steps of a run: what each depends on, and what on disk does not fit what is asked for."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress import source
from compress.artifact import Artifact, changes, fingerprint
from compress.config import Config
from compress.errors import UserError
from compress.eval.items import records
from compress.eval.own import named
from compress.eval.tasks import TASKS, Task
from compress.given import STAGES
from compress.model_path import TINY, home, locate
from compress.stage import Stage
from compress.text import documents

MANIFESTS = "manifests"
"""The kind that every stage can read: what the stages before it said."""

CONTENT = {
    "model.content": ("model.path", "model"),
    "data.content": ("data.path", "text"),
    "score_text": ("score.text", "text"),
    "teacher": ("distill.teacher", "model"),
    "student": ("shrink.student", "model"),
}
"""What a key holds by its content: the field that names it, and a word for it."""
FIELDS = {
    "heldout.windows": "calibrate.heldout_windows",
    "heldout.length": "calibrate.heldout_length",
    "scheme.spec": "the scheme",
    "scheme.keep": "quantize.keep",
    "kv_cache": "serve.kv_cache",
    "version": "the stage's version",
}
"""What else a key calls otherwise than the user does."""


@dataclass(frozen=True)
class Step:
    """A stage with its place on disk and all that its result depends on.

    reads: the stages whose results it is made from, directly or through others.
    """

    stage: Stage
    artifact: Artifact
    key: dict[str, Any]
    reads: frozenset[str]

    @property
    def name(self) -> str:
        return self.stage.name

    def made(self) -> dict[str, Any] | None:
        """The manifest of what is on disk where it was made from this key, or None."""
        manifest = self.artifact.manifest()
        return manifest if manifest is not None and manifest["key"] == self.key else None


def plan_steps(config: Config, out: Path) -> list[Step]:
    """The steps of this run, each with its key. Raises UserError where they do not fit together.

    An artifact depends on its stage's fields and version, on the sections of the configuration
    that it shares, and on the artifacts it reads, by their own fingerprints.
    """
    refuse_gaps(config)
    path = locate(config.model) if config.model.path != TINY else None
    if path is not None and path.is_dir():
        source.read_config(path, config.model.trust_remote_code)
    content = source.fingerprint(path) if path else TINY
    text = home(config.score.text or "")
    teacher = config.distill.teacher_folder() if "distill" in config.stages else None
    student = config.shrink.student_folder() if "shrink" in config.stages else None
    shared = {
        "model": _by_content(config.section("model"), content),
        "data": _by_content(config.section("data"), documents.fingerprint(config.data)),
        "score_tasks": _questions([t for t in named(config.score.tasks) if t not in TASKS]),
        "teacher": source.fingerprint(teacher) if teacher else None,
        "student": source.fingerprint(student) if student else None,
        "heldout": {
            "windows": config.calibrate.heldout_windows,
            "length": config.calibrate.heldout_length,
        },
        "score_text": source.fingerprint(text) if text.is_file() else None,
        "scheme": {
            "spec": config.quantize.spec.scheme,
            "keep": config.quantize.keep,
            **({"budget": config.budget} if config.budget is not None else {}),
            **({"shrink": config.section("shrink")} if "shrink" in config.stages else {}),
        },
        "kv_cache": config.serve.kv_cache,
        "gate": config.section("score")["gate"],
    }
    learned_by = _questions(named(config.distill.tasks, "distill.tasks"))
    stages = [config.stage(name) for name in config.stages]
    kinds: dict[str, str] = {}
    made_by: dict[str, frozenset[str]] = {}  # of each kind: its stage, and those before it
    if path is not None and path.is_dir():
        kinds["dense"] = content
    else:
        stages.insert(0, source.Source())

    if config.checkpoint is not None:
        kinds["checkpoint"] = source.fingerprint(home(config.checkpoint))

    steps: list[Step] = []
    rebuilt = forced(config, [stage.name for stage in stages])
    absent: set[str] = set()  # neither on disk nor run now: nothing is made from them
    for stage in stages:
        earlier = {s.name: fingerprint(s.key) for s in steps if s.name not in absent}
        key = {
            "stage": stage.name,
            "version": stage.version,
            stage.name: _section(config, stage.name),
            **{n: shared[n] if n in shared else config.section(n) for n in stage.shares},
            **({"distill_tasks": learned_by} if learned_by and stage.name == "distill" else {}),
            "inputs": {k: earlier if k == MANIFESTS else kinds[k] for k in stage.needs},
        }
        artifact = Artifact(
            stage.name, _folder(stage.name, out), out / "stages", stage.name in rebuilt
        )
        if config.only and stage.name not in (config.only, "source") and not artifact.manifest():
            absent.add(stage.name)
        reads = frozenset(earlier) if MANIFESTS in stage.needs else frozenset()
        reads = reads.union(*(made_by.get(kind, ()) for kind in stage.needs))
        steps.append(Step(stage, artifact, key, reads))
        if stage.gives is not None and not (stage.name in absent and stage.gives in kinds):
            kinds[stage.gives] = fingerprint(key)
            made_by[stage.gives] = reads | {stage.name}
    used = _used(steps, config)
    _refuse_changes(used, config)
    if config.only is not None:
        _refuse_untimed(config, absent, out)
        _refuse_stale(used, config, config.only)
    return steps


def _section(config: Config, name: str) -> dict[str, Any]:
    """A stage's own settings, less those of score that change none of its figures: the gate, which
    judges them, and where the original's are kept; and less the tasks of distill where it has none.
    """
    fields = config.section(name) if name != "source" else {}
    without = {"score": {"gate", "originals"}}.get(name, set())
    if name == "distill" and not config.distill.tasks:
        without = {"tasks", "task_items"}
    return {field: value for field, value in fields.items() if field not in without}


def _questions(tasks: list[Task]) -> dict[str, str]:
    """What tasks ask, by name: their settings and their data, by content."""
    found = {}
    for task in tasks:
        settings = dataclasses.asdict(task) | {"file": None, "haystack": None}
        texts = [file.read_text(encoding="utf-8") for file in task.files]
        found[task.name] = fingerprint({**settings, "data": texts or records(task)})
    return found


def _by_content(section: dict[str, Any], content: str) -> dict[str, Any]:
    """A section that names files, by what they hold: a moved or copied file is the same."""
    return {**{k: v for k, v in section.items() if k != "path"}, "content": content}


def _folder(name: str, out: Path) -> Path:
    return out / "checkpoint" if name == "export" else out / "stages" / name


def refuse_gaps(config: Config) -> None:
    """Raise UserError for a stage that needs what none before it makes, whatever the model."""
    kinds = {"dense", *(["checkpoint"] if config.checkpoint is not None else [])}
    for stage in map(config.stage, config.stages):
        missing = [k for k in stage.needs if k != MANIFESTS and k not in kinds]
        if missing:
            raise UserError(_missing(stage.name, missing, config))
        if stage.gives is not None:
            kinds.add(stage.gives)


def _missing(name: str, kinds: list[str], config: Config) -> str:
    makers = [s for s in config.stages if config.stage(s).gives in kinds]
    makers = makers or [s for s in STAGES if config.stage(s).gives in kinds]
    return (
        f"{name} needs {' and '.join(kinds)}, made by {' or '.join(makers)}, "
        f"which stages=[{','.join(config.stages)}] leaves out before it; add it"
        f"{', or give checkpoint=FOLDER' if 'checkpoint' in kinds else ''}"
    )


def forced(config: Config, names: list[str]) -> set[str]:
    """Those of the stages `names` that `force` rebuilds: from the first named one on."""
    first = min((names.index(f) for f in config.force if f in names), default=len(names))
    return set(names[first:])


def unmade(config: Config, steps: list[Step]) -> set[str]:
    """The stages that this run works at: forced, or not on disk as they are asked for."""
    wanted = {config.only, "source"} if config.only else {s.name for s in steps}
    return {s.name for s in steps if s.name in wanted and (s.artifact.rebuilt or not s.made())}


def _used(steps: list[Step], config: Config) -> list[Step]:
    """With `only`, that step and those whose results on disk it reads or is judged by; else all."""
    names = {s.name for s in steps}
    if config.only is not None:
        names = {config.only}.union(*(s.reads for s in steps if s.name == config.only))
    if config.only == "score" and config.score.gate.token_ms is not None:
        names.add("serve")
    return [step for step in steps if step.name in names]


def _refuse_untimed(config: Config, absent: set[str], out: Path) -> None:
    """Raise UserError where `only` would judge scores, and the time of a token, which the recipe
    limits too, is not on disk.
    """
    judges = config.only in ("score", "report") and "score" in set(config.stages) - absent
    if config.score.gate.token_ms is not None and judges and "serve" in absent:
        raise UserError(
            f"score.gate.token_ms limits what serve measures, which is not in {out / 'stages'}; "
            "run it first with only=serve, or without only=, or drop the limit: "
            "score.gate.token_ms=null"
        )


def _refuse_stale(steps: list[Step], config: Config, only: str) -> None:
    """Raise UserError where what `only` would read was not made from what is on disk now."""
    for step in steps:
        manifest = step.artifact.manifest()
        if step.name in (only, "source") or manifest is None or manifest["key"] == step.key:
            continue
        old_key, new_key = ({**key, "inputs": {}} for key in (manifest["key"], step.key))
        changed = _changed(old_key, new_key, config)
        old, new = manifest["key"]["inputs"], step.key["inputs"]
        made_from = [kind for kind in new if old.get(kind) != new[kind]]
        replaced = f"the {' and '.join(made_from)} that it was made from was made again"
        why = "; ".join(changed) or replaced
        raise UserError(
            f"{step.artifact.folder}: stale, and only={only} reads it: {why}. "
            f"Run {step.name} again with only={step.name}, or all that is stale without only="
        )


def _refuse_changes(steps: list[Step], config: Config) -> None:
    """Raise UserError where a stage on disk was made from other settings than those asked for."""
    for step in steps:
        manifest = step.artifact.manifest()
        old = manifest["key"] if manifest else step.artifact.partial_key()
        if step.artifact.rebuilt or old is None:
            continue
        changed = _changed(_settings(step.stage, old), _settings(step.stage, step.key), config)
        if changed:
            without = "" if config.only in (None, step.name) else " without only="
            raise UserError(
                f"{step.artifact.folder}: made with other settings: {'; '.join(changed)}. "
                f"Add force=[{step.name}]{without} to rebuild from there on, "
                "or give another out=FOLDER"
            )


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], config: Config) -> list[str]:
    """What differs between two keys, by the fields that the user sets, with the values as far as
    they are known: of files a key has a hash of what they hold.
    """
    shrunk, shrinks = ("shrink" in key.get("scheme", {}) for key in (old, new))
    told = []
    found = changes(old, new)
    by_content = {field for name, (field, _) in CONTENT.items() if name in found}
    for name, (was, now) in found.items():
        if name in by_content:
            continue
        if name in CONTENT:
            field, what = CONTENT[name]
            section, _, last = field.partition(".")
            value = config.section(section)[last] or "null"
            if "null" in (was, now):
                before = "null" if was == "null" else f"another {what}"
                told.append(f"{field} was {before}, is now {value}")
            else:
                told.append(f"{field} is {value}, another {what} than before")
        elif name.startswith(("score_tasks.", "distill_tasks.")):
            told.append(f"what the task {name.partition('.')[2]} asks has changed")
        elif name.startswith("scheme.shrink.") and shrunk != shrinks:
            told.append(f"shrink was {'' if shrunk else 'not '}run before")
        else:
            field = FIELDS.get(name, name.removeprefix("scheme."))
            told.append(f"{field} was {was}, is now {now}")
    return list(dict.fromkeys(told))


def _settings(stage: Stage, key: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a key that the user sets. Changed inputs are told at the stage that makes them;
    figures that nothing is made from follow what they describe, and how they are drawn, unasked.
    """
    dropped = {"inputs"} | ({"version", *stage.shares} if stage.gives is None else set())
    return {name: value for name, value in key.items() if name not in dropped}
