"""Several runs side by side: size, speed and quality, and what makes them hard to compare."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import UserError
from compress.report.tasks import label
from compress.report.words import listed

Report = Mapping[str, Any]
Row = dict[str, Any]

ORIGINAL = "original"


def comparison(folders: Sequence[Path]) -> dict[str, Any]:
    """The contents of comparison.json, from the report.json of each run's folder.

    `rows`: the original, each figure as the first run that measured it has it, then a row a run;
    what was not measured is None. `beaten_by` names a run that is no worse in size, speed and KL,
    as far as both measured them, and better in one. `remarks`: what keeps the runs from comparing.
    Raises UserError for a folder without a report.
    """
    reports = [_read(folder) for folder in folders]
    names = _names(folders)
    runs = zip(names, folders, reports, strict=True)
    rows = [_original(reports), *(_row(*run) for run in runs)]
    for row in rows[1:]:
        row["beaten_by"] = next((o["name"] for o in rows[1:] if _beats(o, row)), None)
    columns = dict.fromkeys(task for row in rows for task in row["tasks"])
    return {
        "model_name": reports[0]["model_name"],
        "rows": rows,
        "tasks": list(columns),
        "remarks": _remarks(names, reports),
    }


def _read(folder: Path) -> Report:
    file = folder / "report.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "tiles" not in found:
            raise ValueError("written before it held all that its page shows")
    except OSError as error:
        raise UserError(
            f"{folder}: no report.json; wanted the folder of a run that ended with its report"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{file}: not a report of this version; make it again with force=[report]"
        ) from error
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """What tells the folders apart: their paths below what all share."""
    whole = [folder.resolve() for folder in folders]
    if len(set(whole)) < len(whole):
        raise UserError("the same run is given twice; wanted each once")
    parent = os.path.commonpath([folder.parent for folder in whole])
    return [str(folder.relative_to(parent)) for folder in whole]


def _original(reports: Sequence[Report]) -> Row:
    plan, close, latency = (
        next((r[part] for r in reports if r[part]), None)
        for part in ("plan", "fidelity", "latency")
    )
    tasks: dict[str, float] = {}
    for task in (task for report in reports for task in report["tasks"]):
        tasks.setdefault(label(task), task["before"])
    return {
        "name": ORIGINAL,
        "folder": None,
        "headline": None,
        "scheme": None,
        "bytes": next((r["bytes"]["before"] for r in reports if r["bytes"]["before"]), None),
        "bits_per_weight": plan["bits_per_weight"]["before"] if plan else None,
        "kl": 0.0 if close else None,
        "top1": 1.0 if close else None,
        "ppl": close["ppl"]["before"] if close else None,
        **_speed(latency and latency["before"]),
        "tasks": tasks,
        "changes": {},
        "gate_broken": [],
        "faults": [],
        "seconds": None,
        "beaten_by": None,
    }


def _row(name: str, folder: Path, report: Report) -> Row:
    close = report["fidelity"] or {}
    return {
        "name": name,
        "folder": str(folder),
        "headline": report["verdict"]["headline"],
        "scheme": report["scheme"],
        "bytes": report["bytes"]["after"],
        "bits_per_weight": report["bits_per_weight"],
        "kl": close.get("kl"),
        "top1": close.get("top1"),
        "ppl": close["ppl"]["after"] if close else None,
        **_speed((report["latency"] or {}).get("after")),
        "tasks": {label(task): task["after"] for task in report["tasks"]},
        "changes": {label(task): task["change"] for task in report["tasks"]},
        "gate_broken": (report["gate"] or {}).get("broken", []),
        "faults": [fault["name"] for fault in report["faults"]],
        "seconds": report["seconds"],
    }


def _speed(latency: Report | None) -> Row:
    return {
        "decode_tokens_per_s": latency["decode_tokens_per_s"] if latency else None,
        "prefill_tokens_per_s": latency["prefill_tokens_per_s"] if latency else None,
        "ttft_ms": latency["ttft_ms"]["p50"] if latency else None,
        "peak_rss_bytes": latency["peak_rss_bytes"] if latency else None,
    }


def _beats(one: Row, other: Row) -> bool:
    """Whether `one` is no worse than `other` in size, speed and KL, and better in one of them.

    A measure that either lacks is left out; with one alone, nothing is said.
    """
    pairs = [
        (sign * one[key], sign * other[key])
        for key, sign in (("bytes", 1), ("kl", 1), ("decode_tokens_per_s", -1))
        if one[key] is not None and other[key] is not None
    ]
    return len(pairs) > 1 and all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _remarks(names: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """What differs between the runs beside what was done to the model."""
    checks = (
        ("The originals differ", [(r["model"], r["parameters"]) for r in reports]),
        ("KL and perplexity are of different text", [_text(r) for r in reports]),
        ("The tasks had other items", [[(label(t), t["n"]) for t in r["tasks"]] for r in reports]),
        ("Speed was measured on different machines", [_machine(r) for r in reports]),
    )
    remarks = []
    for said, found in checks:
        others = [name for name, value in zip(names, found, strict=True) if value != found[0]]
        if others:
            remarks.append(f"{said}: {listed(others)} beside {names[0]}.")
    return remarks


def _text(report: Report) -> Any:
    """What KL and perplexity are of; None where they were not measured."""
    close = report["fidelity"]
    return close and (close["text"], close["windows"], close["window_tokens"])


def _machine(report: Report) -> Any:
    """Where speed was measured; None where it was not."""
    return report["latency"] and [report["hardware"].get(k) for k in ("cpu", "cores", "gpu")]
