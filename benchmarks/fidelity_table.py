"""The tables of docs/fidelity.md, from the results of fidelity.py.

.venv/bin/python benchmarks/fidelity_table.py      # write them again
"""

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from kept import write_between
from numpy.typing import NDArray

from compress.eval import statistics

ROOT = Path(__file__).resolve().parents[1]
TASKS = {
    "hellaswag": "HellaSwag",
    "arc_easy": "ARC-Easy",
    "lambada": "LAMBADA",
    "blimp": "BLiMP",
}
OURS = "ours"
SCHEMES = ("w4a16-g64", "w4a16", "w8a8")

Result = dict[str, Any]
Rows = NDArray[np.float64]


def rows(judged: Result) -> Rows:
    """What each item adds to each task, [n, 2 * tasks]: right or not, and one for the count.

    Items of all tasks stand below each other, so that one resampling covers them all.
    """
    found = []
    for column, name in enumerate(TASKS):
        right = np.array([int(digit) for digit in judged["correct"][name]], dtype=np.float64)
        block = np.zeros((len(right), 2 * len(TASKS)))
        block[:, 2 * column], block[:, 2 * column + 1] = right, 1
        found.append(block)
    return np.concatenate(found)


def average(summed: Rows) -> float:
    """Mean over tasks of the accuracy in percent, from a sum of `rows`: every task counts alike."""
    return float(np.mean(100 * summed[::2] / np.maximum(summed[1::2], 1)))


def accuracy(judged: Result, task: str) -> float:
    """Percent of a task's items that are right."""
    digits = judged["correct"][task]
    return 100 * digits.count("1") / len(digits)


def mean(values: list[float]) -> float:
    """Of one figure over the judge's windows."""
    return sum(values) / len(values)


def beside(result: Result, other: Result) -> str:
    """Difference of the two averages over tasks, with its paired 95% interval."""
    before, after = rows(other), rows(result)
    low, high = statistics.paired_interval(before, after, average, seed=0)
    difference = average(after.sum(0)) - average(before.sum(0))
    return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"


def best(report: Result, *, ours: bool) -> Result | None:
    """The checkpoint of the least KL, of ours or of the peers'."""
    results = report["results"].items()
    found = [r for name, r in results if "kl" in r and is_ours(name) == ours]
    return min(found, key=lambda r: mean(r["kl"]), default=None)


def is_ours(name: str) -> bool:
    """Whether the contender of this name is one of this project's own settings."""
    return name.split("-")[0] == OURS


def table(report: Result, first: Result) -> str:
    """One scheme on one text: a line a contender, and what the comparison comes to.

    What `conditions` says of `first` is said again only where it differs.
    """
    original, judge = report["original"], report["judge"]
    text = ", calibrated on " + text_of(report) if text_of(report) != text_of(first) else ""
    machine = "" if machine_of(report) == machine_of(first) else f" {machine_of(report)}."
    tasks = "no tasks asked"
    if judge["items"]:
        tasks = f"{judge['items']} items of each task at most, in {judge['task_dtype']}"
    names = " | ".join(TASKS.values())
    lines = [
        f"### {report['scheme']}{text}",
        "",
        f"{report['quantized']} linears quantized; {tasks}.{machine}",
        "",
        "| | KL | top-1 | perplexity | "
        f"{names} | average | beside the original | MB | bits | s | peak GB |",
        "|---|" + "---|" * (9 + len(TASKS)),
        line("original", original, original),
    ]
    for result in report["results"].values():
        lines.append(line(result["label"], result, original))
    peer, ours = (best(report, ours=side) for side in (False, True))
    if peer is not None and ours is not None:
        ratios = [
            f"{result['label']} {mean(result['kl']) / mean(peer['kl']):.2f}"
            for name, result in report["results"].items()
            if is_ours(name) and "kl" in result
        ]
        comes_to = f"Of the KL of the best peer here ({peer['label']}): {', '.join(ratios)}"
        if "correct" in ours and "correct" in peer:
            difference = beside(ours, peer)
            comes_to += f"; average over the tasks, {ours['label']} less that peer: {difference}"
        lines += ["", f"{comes_to}."]
    return "\n".join(lines)


def line(label: str, result: Result, original: Result) -> str:
    """One contender's line of the table."""
    if "failed" in result:
        return f"| {label} | does not run: `{result['failed']}` |" + " |" * (8 + len(TASKS))
    fidelity = f"{mean(result['kl']):.4f} | {100 * mean(result['top1']):.1f}%"
    perplexity = f"{math.exp(mean(result['nll'])):.2f}"
    scores, difference = " | ".join([""] * (1 + len(TASKS))), ""
    if "correct" in result:
        scores = " | ".join(f"{accuracy(result, task):.1f}" for task in TASKS)
        scores += f" | {average(rows(result).sum(0)):.1f}"
        difference = beside(result, original)
    if result is original:
        return f"| {label} | 0 | 100% | {perplexity} | {scores} | | | | | |"
    cost = (
        f"{result['bytes'] / 1e6:.1f} | {result['bits_per_weight']:.2f} | "
        f"{result['seconds']:.0f} | {result['peak_rss_bytes'] / 1e9:.1f}"
    )
    return f"| {label} | {fidelity} | {perplexity} | {scores} | {difference} | {cost} |"


def tables(reports: list[Result]) -> str:
    """All schemes, below a line that says on what, with what and where they were measured."""
    if not reports:
        return "Nothing is measured yet."
    return "\n\n".join([conditions(reports), *(table(report, reports[0]) for report in reports)])


def conditions(reports: list[Result]) -> str:
    """Model, tokens, machine and versions."""
    first = reports[0]
    judge, calibration = first["judge"], first["calibration"]
    versions = {
        name: version
        for report in reports
        for result in report["results"].values()
        for name, version in result.get("versions", {}).items()
    }
    peers = ", ".join(f"{name} {version}" for name, version in versions.items())
    ours = first["versions"]
    return (
        f"{first['model']}, {first['parameters'] / 1e6:.0f}M parameters; left in 16 bit: "
        f"{', '.join(first['left_alone'])}. Calibration: {calibration['windows']} windows of "
        f"{calibration['tokens']} tokens of {text_of(first)}. Judge: {judge['windows']} windows of "
        f"{judge['tokens']} tokens in float32. {machine_of(first)}; peers: {peers}; ours and the "
        f"judge: torch {ours['torch']}, transformers {ours['transformers']}."
    )


def text_of(report: Result) -> str:
    """The name of the text that all were calibrated on."""
    return f"`{report['calibration']['text']}`"


def machine_of(report: Result) -> str:
    """Processor, cores and memory, in words."""
    hardware = report["hardware"]
    memory = f"{hardware['memory_bytes'] / 1e9:.0f} GB"
    return f"{hardware['cpu']}, {hardware['cores']} cores, {memory}"


def write_tables(results: Path, page: Path) -> str:
    """Put the tables of the results that there are into the page; returns them."""
    on_others = [sorted(results.glob(f"fidelity-{scheme}-on-*.json")) for scheme in SCHEMES]
    files = [*(results / f"fidelity-{scheme}.json" for scheme in SCHEMES), *chain(*on_others)]
    text = tables([json.loads(file.read_text()) for file in files if file.exists()])
    write_between(page, "tables", text)
    return text


if __name__ == "__main__":
    print(write_tables(ROOT / "benchmarks/results", ROOT / "docs/fidelity.md"))
