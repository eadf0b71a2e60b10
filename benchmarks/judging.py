"""Can the judging tell compressed models from their original? All suites, and eight published sets.

    .venv/bin/python benchmarks/judging.py --model FOLDER --data FOLDER \
        --checkpoint NAME=FOLDER [NAME=FOLDER ...]

Every checkpoint, whoever made it, goes through `python -m compress recipe=judge`: WikiText-2's test
text, the bundled suites, and the sets of SETS as a user's own tasks would be written. The data
folder holds the published files by their usual names. The runs stay in runs/judging; the results go
to benchmarks/results/judging-MODEL.json and, as a table, to docs/eval.md.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from kept import write_between

from compress.artifact import write_json
from compress.eval.tasks import TASKS
from compress.report.tasks import change, label
from compress.report.words import paired, significant

HERE = Path(__file__).parent
ROOT = HERE.parent
TEXT = "wikitext2_test.txt"
QUESTION = "Question: {query}\nAnswer:"
SETS: Mapping[str, dict[str, Any]] = {
    "hellaswag": {"data": "hellaswag_val.jsonl", "kind": "choice", "prompt": "{query}",
                  "metrics": ["normalized_accuracy"]},
    "arc_easy": {"data": "arc_easy_test.jsonl", "kind": "choice", "prompt": QUESTION,
                 "metrics": ["normalized_accuracy"]},
    "mmlu": {"data": "mmlu_test.jsonl", "kind": "choice", "prompt": QUESTION},
    "copa": {"data": "copa_val.jsonl", "kind": "choice", "prompt": "{query}"},
    "blimp": {"data": "blimp.jsonl", "kind": "choice", "prompt": ""},
    "lambada": {"data": "lambada_openai_test.jsonl", "kind": "cloze", "prompt": "{context}",
                "fields": {"references": "target"}, "metrics": ["accuracy", "likelihood"]},
    "xquad": {"data": "xquad_en.jsonl", "kind": "generation", "max_new_tokens": 24,
              "prompt": "{context}\n\n{question} Answer with a few words from the text.",
              "fields": {"references": "answers"}, "metrics": ["f1", "contained"]},
    "multi30k": {"data": "multi30k_test2016.jsonl", "kind": "generation", "max_new_tokens": 32,
                 "prompt": "Translate into English: {fr}", "fields": {"references": "en"},
                 "metrics": ["chrf"]},
}  # fmt: skip
"""The published sets as tasks, asked as lm-evaluation-harness asks them where it has them."""


def prepare(data: Path, folder: Path, items: int) -> list[Path]:
    """A YAML and a JSONL for every set; returns the YAML files.

    `items` lines, spread evenly over a file, since some are in an order: BLiMP's by phenomenon. A
    line with the same choice twice, of which MMLU has one, has no right answer and is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, task in SETS.items():
        text = (data / task["data"]).read_text(encoding="utf-8")
        lines = [as_choice(json.loads(line)) for line in text.splitlines()]
        lines = [line for line in lines if _differ(line.get("choices", ()))]
        count = min(items, len(lines))
        chosen = [lines[i * len(lines) // count] for i in range(count)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in chosen)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**task, "data": f"{name}.jsonl"}), encoding="utf-8")
        files.append(file)
    return files


def _differ(choices: Sequence[str]) -> bool:
    return len(set(choices)) == len(choices)


def as_choice(line: dict[str, Any]) -> dict[str, Any]:
    """A minimal pair of BLiMP as a choice, of which the first is right; any other line as it is."""
    if "good" not in line:
        return line
    return {"id": line["id"], "choices": [line["good"], line["bad"]], "gold": 0}


def judge(options: argparse.Namespace, name: str, checkpoint: str, sets: Sequence[Path]) -> Path:
    """Run the recipe on one checkpoint; a gate that breaks (status 3) is a result too."""
    out = options.work / name
    asked = [*(task.name for task in TASKS), *map(str, sets)]
    words = [
        "recipe=judge",
        f"model.path={options.model}",
        f"checkpoint={checkpoint}",
        f"score.text={options.data / TEXT}",
        f"score.windows={options.windows}",
        f"score.limit={options.limit or 'null'}",
        f"score.tasks=[{','.join(asked)}]",
        f"score.originals={options.work / 'originals'}",
        "stages=[score,report]",
        f"out={out}",
    ]
    ended = subprocess.run([sys.executable, "-m", "compress", *words], check=False)
    if ended.returncode not in (0, 3):
        raise SystemExit(ended.returncode)
    return out


def result(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report."""
    names = ("scheme", "bytes", "bits_per_weight", "fidelity", "tasks", "gate", "faults")
    kept = {name: report[name] for name in names}
    dropped = ("by_window", "worst")
    kept["fidelity"] = {k: v for k, v in report["fidelity"].items() if k not in dropped}
    return {**kept, "headline": report["verdict"]["headline"]}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Task by task, the first metric of each: the original, and the change in every checkpoint."""
    head = ["task", "items", "original", *results]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    first = next(iter(results.values()))
    rows: dict[str, Any] = {}
    for row in first["tasks"]:
        rows.setdefault(row["name"], row)
    kl = [significant(found["fidelity"]["kl"]) for found in results.values()]
    lines.append(f"| KL on WikiText-2 | | {significant(first['fidelity']['kl_floor'])} | "
                 f"{' | '.join(kl)} |")  # fmt: skip
    for name, row in rows.items():
        cells = [label(row), str(row["n"]), f"{row['before']:.1f}"]
        for found in results.values():
            cells.append(said(next(r for r in found["tasks"] if r["name"] == name)))
        lines.append(f"| {' | '.join(cells)} |")
    gates = ["; ".join(found["gate"]["broken"]) or "passed" for found in results.values()]
    return "\n".join([*lines, f"| gate | | | {' | '.join(gates)} |"])


def said(row: Mapping[str, Any]) -> str:
    """A change with its interval, in bold where it is more than chance."""
    text = "{} ({})".format(*paired(row["after"] - row["before"], row["ci95"]))
    return f"**{text}**" if change(row) in ("worse", "better") else text


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the original's folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the published sets")
    parser.add_argument("--checkpoint", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--items", type=int, default=100, help="of each published set")
    parser.add_argument("--limit", type=int, help="items of each bundled suite; all unless given")
    parser.add_argument("--windows", type=int, default=8, help="of the text, for the KL")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/judging")
    options = parser.parse_args()
    sets = prepare(options.data, options.work / "sets", options.items)
    results = {}
    for pair in options.checkpoint:
        name, _, folder = pair.partition("=")
        out = judge(options, name, folder, sets)
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        results[name] = result(report)
    kept = {
        "model": options.model.name,
        "items": options.items,
        "limit": options.limit,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": report["hardware"],
        "versions": report["versions"],
        "results": results,
    }
    file = HERE / f"results/judging-{options.model.name}.json"
    write_json(file, kept)
    write_between(ROOT / "docs/eval.md", "judging", table(results))
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
