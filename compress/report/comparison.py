"""Several runs side by side: size, speed and quality, and what makes them hard to compare."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import UserError
from compress.report import words
from compress.report.tasks import label
from compress.report.verdict import without_numbers
from compress.report.words import listed

Report = Mapping[str, Any]
Row = dict[str, Any]

ORIGINAL = "original"
SPEEDS = {
    "decode_tokens_per_s": ("faster", "slower"),
    "prefill_tokens_per_s": ("faster", "slower"),
    "ttft_ms": ("slower", "faster"),
    "peak_rss_bytes": ("larger", "smaller"),
}
"""What `serve` measures, with the words for a figure above and below the original's."""
TIMES = {"decode_tokens_per_s": "tpot", "prefill_tokens_per_s": "ttft", "ttft_ms": "ttft"}
"""By what times these are told apart."""
HELD = {
    *("bits_per_weight", "bytes", "config", "faults", "fidelity", "gate", "hardware", "latency"),
    *("model", "model_content", "model_name", "parameters", "plan", "scheme", "seconds", "tasks"),
    "verdict",
}
"""What is read of a report."""
APART = 1.1
"""Originals of which one decodes so many times as fast as another were not measured alike."""


def comparison(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """The contents of comparison.json, from the report.json of each run's folder.

    out: where it will lie, from which `page` leads to the run's own report.html, if it has one.

    `rows`: each original, then its runs, numbered, whose `original` names it; what was not
    measured is None. Runs share an original where model and text of the KL are the same; its
    figures are those of the first run that measured it, its speeds None where its runs did not
    measure alike. `against`: a run's speeds beside those that it measured of its original,
    `decode_ratio` the one over the other, `decode_interval` the ends between which it lies as far
    as requests by turns tell. `beaten_by` names a run of the same original that is no worse in
    size, speed and KL, as far as both measured them, and better in one; `not_numbers`, where a run
    gave outputs that are none: it beats nothing. `remarks`: what keeps the runs from comparing.
    Raises UserError for a folder without a report.
    """
    reports = [_read(folder) for folder in folders]
    names = _names(folders)
    groups = _groups(names, reports)
    rows: list[Row] = []
    for original, group in groups.items():
        own = [reports[i] for i in group]
        runs = [_row(names[i], folders[i], out, reports[i], original) for i in group]
        for row, report in zip(runs, own, strict=True):
            pairs = zip(runs, own, strict=True)
            beating = (o["name"] for o, other in pairs if _beats(o, row, _alike(other, report)))
            row["beaten_by"] = next(beating, None)
        rows += [_original(original, own), *runs]
    for number, row in enumerate((row for row in rows if row["folder"]), 1):
        row["number"] = number
    columns = dict.fromkeys(task for row in rows for task in row["tasks"])
    return {
        "models": list(dict.fromkeys(report["model_name"] for report in reports)),
        "rows": rows,
        "tasks": list(columns),
        "remarks": _remarks(names, reports, groups),
    }


def _read(folder: Path) -> Report:
    file = folder / "report.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if (
            not isinstance(found, dict)
            or not found.keys() >= HELD
            or "headline" not in found["verdict"]
        ):
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


def _groups(names: Sequence[str], reports: Sequence[Report]) -> dict[str, list[int]]:
    """The positions of the runs with the same original and text, by what that original is called:
    where there are several, by its first runs.
    """
    groups: list[list[int]] = []
    for i, report in enumerate(reports):
        alike = (g for g in groups if _same(_basis(reports[g[0]]), _basis(report)))
        group = next(alike, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    if len(groups) == 1:
        return {ORIGINAL: groups[0]}
    called = [[names[i] for i in group] for group in groups]
    short = [own if len(own) < 4 else [own[0], f"{len(own) - 1} others"] for own in called]
    return {f"{ORIGINAL} of {listed(o)}": g for o, g in zip(short, groups, strict=True)}


def _basis(report: Report) -> tuple[Any, ...]:
    """What KL, and what is called smaller or faster, refers to."""
    return (*_identity(report), _text(report))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether the two agree in all that both know."""
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _identity(report: Report) -> tuple[Any, ...]:
    """Which original: what it holds; where that is not known its path and revision, and how many
    parameters it has. `parameters` of a report are the student's where a student took its place.
    """
    if report["model_content"] is not None:
        return report["model_content"], None
    plan = report["plan"]
    parameters = (
        round(8 * plan["bytes"]["before"]["total"] / plan["bits_per_weight"]["before"])
        if plan
        else report["parameters"]
    )
    return (report["model"], report["config"]["model"].get("revision")), parameters


def _original(name: str, reports: Sequence[Report]) -> Row:
    close, latency = (
        next((r[part] for r in reports if r[part]), None) for part in ("fidelity", "latency")
    )
    apart = len({_prompt(r) for r in reports} - {None}) > 1 or _spread(reports)
    tasks: dict[str, float] = {}
    for task in (task for report in reports for task in report["tasks"]):
        tasks.setdefault(label(task), task["before"])
    return {
        "name": name,
        "number": None,
        "model": reports[0]["model_name"],
        "original": None,
        "folder": None,
        "page": None,
        "headline": None,
        "scheme": None,
        "bytes": next((r["bytes"]["before"] for r in reports if r["bytes"]["before"]), None),
        "bits_per_weight": next(
            (r["bits_per_weight_before"] for r in reports if r["bits_per_weight_before"]), None
        ),
        "kl": 0.0 if close else None,
        "top1": 1.0 if close else None,
        "ppl": close["ppl"]["before"] if close else None,
        **_speed(latency["before"] if latency and not apart else None),
        "against": {},
        "decode_ratio": 1.0 if latency else None,
        "decode_interval": None,
        "not_numbers": [],
        "tasks": tasks,
        "changes": {},
        "gate_broken": [],
        "faults": [],
        "seconds": None,
        "beaten_by": None,
    }


def _row(name: str, folder: Path, out: Path, report: Report, original: str) -> Row:
    close = report["fidelity"] or {}
    latency = report["latency"] or {}
    before, after = (_speed(latency.get(when)) for when in ("before", "after"))
    against = {
        key: {
            "original": before[key],
            "said": words.comparison(
                before[key], after[key], *said, words.timed(latency, TIMES.get(key))
            ),
        }
        for key, said in SPEEDS.items()
        if before[key] and after[key]
    }
    decode = "decode_tokens_per_s"
    ratio = after[decode] / before[decode] if decode in against else None
    page = folder.resolve() / "report.html"
    return {
        "name": name,
        "model": report["model_name"],
        "original": original,
        "folder": str(folder),
        "page": os.path.relpath(page, out.resolve()) if page.exists() else None,
        "headline": report["verdict"]["headline"],
        "scheme": report["scheme"],
        "bytes": report["bytes"]["after"],
        "bits_per_weight": report["bits_per_weight"],
        "kl": close.get("kl"),
        "top1": close.get("top1"),
        "ppl": close["ppl"]["after"] if close else None,
        **after,
        "against": against,
        "decode_ratio": ratio,
        "decode_interval": _decode_interval(latency, ratio),
        "not_numbers": without_numbers(report),
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


def _decode_interval(latency: Report, ratio: float | None) -> list[float] | None:
    """Between what the ratio of decoding speeds lies: one point where requests were not by turns,
    None where too few of them were, or the machine was busy.
    """
    if ratio is None:
        return None
    low, high = words.timed(latency, "tpot") or (1 / ratio, 1 / ratio)
    return [1 / high, 1 / low] if low else None


def _beats(one: Row, other: Row, alike: bool) -> bool:
    """Whether `one` is no worse than `other` in size, speed and KL, and better in one of them.

    A measure that either lacks is left out; with one alone, nothing is said, and nothing where the
    two were not measured `alike`. Speeds are by each run's own original, and differ where their
    intervals lie apart. Outputs that are no numbers are further from the original than any KL.
    """
    if one["not_numbers"] or not alike:
        return False
    both = [key for key in ("bytes", "kl") if None not in (one[key], other[key])]
    worse = [(one[key] > other[key]) - (one[key] < other[key]) for key in both]
    if other["not_numbers"]:
        worse.append(-1)
    mine, theirs = one["decode_interval"], other["decode_interval"]
    if mine and theirs:
        worse.append((mine[1] < theirs[0]) - (theirs[1] < mine[0]))
    return len(worse) > 1 and max(worse) <= 0 and min(worse) < 0


def _remarks(
    names: Sequence[str], reports: Sequence[Report], groups: Mapping[str, Sequence[int]]
) -> list[str]:
    """What differs between the runs beside what was done to the model."""
    checks = (
        ("The originals differ", [_identity(r) for r in reports]),
        ("KL and perplexity are of different text", [(_text(r),) for r in reports]),
        (
            "The tasks had other items",
            [([(label(t), t["n"]) for t in r["tasks"]],) for r in reports],
        ),
        ("Speed was measured on different machines", [(_machine(r),) for r in reports]),
    )
    remarks = []
    for said, found in checks:
        others = [n for n, value in zip(names, found, strict=True) if not _same(value, found[0])]
        if others:
            remarks.append(f"{said}: {listed(others)} beside {names[0]}.")
    prompts: dict[int, list[str]] = {}
    for name, report in zip(names, reports, strict=True):
        if tokens := _prompt(report):
            prompts.setdefault(tokens, []).append(name)
    if len(prompts) > 1:
        each = listed(f"{words.several(p, 'token')} ({listed(n)})" for p, n in prompts.items())
        remarks.append(f"Speed was measured with prompts of different lengths: {each}.")
    for original, group in groups.items():
        if spread := _spread([reports[i] for i in group]):
            low, high = map(words.rate, spread)
            remarks.append(
                f"Decoding by the {original} was measured by its runs at {low} to {high}: compare "
                "their ratios, not their speeds."
            )
    return remarks


def _spread(reports: Sequence[Report]) -> tuple[float, float] | None:
    """The least and most tokens a second at which these runs measured one original; None where
    they are about the same.
    """
    found = [r["latency"]["before"]["decode_tokens_per_s"] for r in reports if r["latency"]]
    if not found or max(found) <= APART * min(found):
        return None
    return min(found), max(found)


def _alike(one: Report, other: Report) -> bool:
    """Whether KL and speed of two runs, as far as both have them, were measured alike."""
    first, second = ((*_basis(r), _machine(r), _prompt(r)) for r in (one, other))
    return _same(first, second)


def _prompt(report: Report) -> Any:
    """The length of the prompts that speed was measured with; None where it was not."""
    return report["latency"] and report["latency"]["before"]["prompt_tokens"]


def _text(report: Report) -> Any:
    """What KL and perplexity are of; None where they were not measured."""
    close = report["fidelity"]
    return close and (close["text"], close["windows"], close["window_tokens"])


def _machine(report: Report) -> Any:
    """Where speed was measured; None where it was not."""
    return report["latency"] and [report["hardware"].get(k) for k in ("cpu", "cores", "gpu")]
