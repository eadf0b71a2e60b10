"""report.json: every figure that the pages show, gathered from what the stages said."""

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from compress import judged, machine, source
from compress.eval import gate
from compress.quoting import typed
from compress.report import tasks
from compress.report.ledger import UNKNOWN, Terms, ledger
from compress.report.load import loads
from compress.report.tiles import tiles
from compress.report.verdict import verdict
from compress.stage import Run

SECTIONS = ("plan", "shrink", "calibrate", "allocate", "quantize", "distill", "extend", "export")
"""The stages whose figures are taken over whole, each under its own name."""


def figures(run: Run, terms: Terms = UNKNOWN, load: Sequence[str] = ()) -> dict[str, Any]:
    """The contents of report.json, costs by these terms, with the loads in these folders. A stage
    that did not run leaves None (or an empty list).

    A figure that is not finite becomes None, which JSON can hold, and is named in `not_finite`.
    """
    config = run.config
    metrics = {name: manifest["metrics"] for name, manifest in run.manifests.items()}
    plan, export = metrics.get("plan"), metrics.get("export")
    serve, score = metrics.get("serve"), metrics.get("score")
    given = judged.facts(*_folders(run)) if config.checkpoint else {}
    stages = [_stage(name, manifest) for name, manifest in run.manifests.items()]
    found: dict[str, Any] = {
        "recipe": config.recipe,
        "model": config.model.path,
        "model_name": config.model.name,
        "model_content": _content(_models(run).get("original")),
        "scheme": _first(metrics, "scheme", ("quantize", "plan")),
        "parameters": plan["parameters"] if plan else None,
        "engine": config.engine,
        "device": config.device,
        "seed": config.seed,
        "bytes": _bytes(plan, export),
        "bits_per_weight": _bits(plan, export),
        "bits_per_weight_before": _bits_before(plan, given),
        "fidelity": score["fidelity"] if score else None,
        "tasks": [tasks.told(row) for row in score["tasks"]] if score else [],
        "unasked": score.get("unasked", []) if score else [],
        "drift": score["drift"] if score else [],
        "faults": score["faults"] if score else [],
        "blocks": score["blocks"] if score else None,
        "gate": _gate(config.score.gate, score, serve),
        "outputs": _outputs(run),
        "latency": dict(serve) if serve else None,
        "loads": loads(load, _models(run)),
        **{name: metrics.get(name) for name in SECTIONS},
        **given,
        "stages": stages,
        "seconds": sum(stage["seconds"] for stage in stages),
        "ledger": ledger(stages, metrics.get("distill"), serve, terms),
        "notes": _notes(metrics),
        "hardware": _where_measured(run.manifests, "hardware") or machine.hardware(),
        "versions": _where_measured(run.manifests, "packages") or machine.packages(),
        "machines": len({json.dumps(m["hardware"]) for m in run.manifests.values()}),
        "command": command(config),
        "config": dataclasses.asdict(config),
    }
    not_finite: list[str] = []
    found = _finite(found, "", not_finite)
    found["not_finite"] = not_finite
    return {**found, "tiles": tiles(found), "verdict": verdict(found)}


def command(config: Any) -> str:
    """The command that makes this run again: the words it was started with, from Hydra.

    `only` and `force` say how a run goes on, not what it is, and are left out. Outside of Hydra
    (a run started from Python) the fields that decide what is run on what are named instead.
    """
    if HydraConfig.initialized():
        given = [typed(word) for word in HydraConfig.get().overrides.task]
        words = [w for w in given if w.lstrip("+").split("=")[0] not in ("only", "force")]
    else:
        names = ("recipe", "out", "seed", "device", "engine")
        words = [f"{name}={getattr(config, name)}" for name in names]
        words.insert(1, f"model.path={config.model.path}")
    return shlex.join(["python", "-m", "compress", *words])


def _models(run: Run) -> dict[str, Path]:
    """Where the models are that the report compares, as far as they are there."""
    places = {
        "original": run.artifacts.get("original", run.artifacts.get("dense")),
        "compressed": run.artifacts.get("checkpoint"),
    }
    return {name: place for name, place in places.items() if place is not None}


def _content(original: Path | None) -> str | None:
    """A hash of what the original holds, whatever it was called; None where it is not there."""
    return source.fingerprint(original) if original is not None and original.exists() else None


def _folders(run: Run) -> tuple[Path, Path]:
    return run.artifacts["dense"], run.artifacts["checkpoint"]


def _first(metrics: Mapping[str, Any], key: str, stages: tuple[str, ...]) -> Any:
    return next((metrics[s][key] for s in stages if metrics.get(s, {}).get(key)), None)


def _gate(
    limits: gate.Gate, score: Mapping[str, Any] | None, serve: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The recipe's limits that were checked and which of them are broken; None where none were."""
    checked = limits.checked(scored=score is not None, served=serve is not None)
    if not checked.limits:
        return None
    return {**dataclasses.asdict(checked), "broken": gate.broken(checked, score, serve)}


def _bytes(plan: Mapping[str, Any] | None, export: Mapping[str, Any] | None) -> dict[str, Any]:
    """Weights before as planned; after as written to disk where the export ran."""
    parts = plan["bytes"] if plan else None
    after: Mapping[str, Any] = parts["after"] if parts else {}
    return {
        "before": parts["before"]["total"] if parts else None,
        "after": export["bytes"] if export else after.get("total"),
        "measured": export is not None,
        "by_part": parts,
        "shares": {part: size / after["total"] for part, size in after.items()},
    }


def _bits(plan: Mapping[str, Any] | None, export: Mapping[str, Any] | None) -> float | None:
    if export and export["bits_per_weight"] is not None:
        return export["bits_per_weight"]
    return plan["bits_per_weight"]["after"] if plan else None


def _bits_before(plan: Mapping[str, Any] | None, given: Mapping[str, Any]) -> float | None:
    """Of the original, as planned; where a checkpoint is judged, as the files have it."""
    if plan:
        return plan["bits_per_weight"]["before"]
    return 8 * given["bytes"]["before"] / given["parameters"] if given else None


def _stage(name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("seconds", "peak_rss_bytes", "temporary_disk_bytes", "started", "finished")
    return {
        "name": name,
        "skipped": bool(manifest.get("skipped", False)),
        **{key: manifest.get(key) for key in keys},
        "seconds_by_part": manifest["metrics"].get("seconds_by_part"),
        "went_on": bool(manifest["metrics"].get("went_on", False)),
    }


def _notes(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the stages remarked in words; a remark that two of them make is kept once."""
    first_said: dict[str, str] = {}
    for name, found in metrics.items():
        for note in found.get("notes") or []:
            first_said.setdefault(str(note), name)
    return [{"stage": name, "text": note} for note, name in first_said.items()]


def _where_measured(manifests: Mapping[str, Any], key: str) -> Any:
    """What the manifest of the stage that measured speed says, or else that of the last stage."""
    if not manifests:
        return None
    return (manifests.get("serve") or list(manifests.values())[-1]).get(key)


def _outputs(run: Run) -> list[dict[str, Any]]:
    """The answers of both models, as the score stage wrote them, a line each."""
    folder = run.artifacts.get("scores")
    file = Path(folder) / "outputs.jsonl" if folder else None
    if file is None or not file.exists() or "score" not in run.manifests:
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def _finite(value: Any, path: str, broken: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v, f"{path}.{k}" if path else str(k), broken) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, f"{path}[{i}]", broken) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        broken.append(path)
        return None
    return value
