"""Ways to a longer context beside each other, each with and without a short fine-tune.

    .venv/bin/python benchmarks/extend.py --model FOLDER --text FILE.txt --factors 2 4

The model is read as it is, dense or quantized by this project. It is trained on the text of --train
and judged on --text; without the former, on its first three quarters and its last. Every method is
judged scaled alone and after the fine-tune, by perplexity on windows of the new length (whole, and
over its last eighth), by that of the same tokens in windows of the old length, and by the share of
numbers hidden in texts as long as the old and the new window that the model finds again. What is
judged is kept in benchmarks/results/extend-NAME.json and not done again; docs/extend.md gets its
tables from all such files. Results of other settings are not added to.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from kept import results_before, settings, write_between
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from compress.algorithms import rope
from compress.artifact import Artifact, write_json
from compress.eval.length import sliding_windows
from compress.eval.length_judge import LengthJudge, length_judge
from compress.machine import hardware, packages
from compress.model import storage_dtype
from compress.report.words import several
from compress.runtime.loader import load
from compress.stages.distill import PRECISIONS
from compress.training import labels, long_training
from compress.training.scaling import best, scale, search, window_of
from compress.training.teacher import Teacher
from compress.training.trainable import make_trainable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS, PAGE = HERE / "results", ROOT / "docs/extend.md"
UNSCALED = "unscaled"
TOP_K = 64  # of the soft labels, as extend.top_k
LATER = {
    "search": False,
    "precision": "float32",
    "train": None,
    "labels": False,
    "near": 0.0,
    "teacher": None,
}
"""Options that results from before they existed lack."""
NAMES = {UNSCALED: "unscaled", "linear": "linear", "ntk": "NTK-aware", "yarn": "by parts (yarn)"}


def documents(options: argparse.Namespace) -> tuple[list[str], str]:
    """The documents to train on, and the text to judge on."""

    def parts_of(file: Path) -> list[str]:
        text = file.read_text(encoding="utf-8")
        parts = text.split(options.split) if options.split else [text]
        return [part.strip() for part in parts if part.strip()]

    text, parts = options.text.read_text(encoding="utf-8"), parts_of(options.text)
    if options.train:
        return parts_of(options.train), text
    if len(parts) == 1:
        cut = len(text) * 3 // 4
        return [text[:cut]], text[cut:]
    cut = len(parts) * 3 // 4
    return parts[:cut], "\n\n".join(parts[cut:])


def fine_tuned(
    options: argparse.Namespace,
    model: PreTrainedModel,
    judge: LengthJudge,
    docs: list[str],
    longer: int,
    work: Path,
) -> dict[str, Any]:
    """Train `model` in place; what that took."""
    batches = long_training.batches(
        docs,
        judge.tokenizer,
        steps=options.steps,
        batch=options.batch,
        length=min(options.length or longer, judge.window if options.labels else longer),
        passkey=options.passkey,
        seed=2,
        labelled=options.labels,
        near=options.near,
    )
    taught, precision = None, getattr(torch, options.precision)
    if windows := long_training.to_label(batches):
        # The same text is learned by every method and factor.
        home = options.work / f"{options.name}-labels"
        home.mkdir(exist_ok=True)
        vocabulary = model.config.get_text_config().vocab_size
        teacher = Teacher(options.teacher or options.model, vocabulary, TOP_K, precision, "cpu")
        taught = labels.make(Artifact("labels", home / "labels", home), teacher, windows)
    started = time.monotonic()
    history = long_training.fine_tune(
        model,
        batches,
        longer,
        lambda: judge.loss(model),
        rate=options.rate,
        measures=options.measures,
        work=work,
        seed=0,
        dtype=storage_dtype(model.config, "auto"),
        precision=precision,
        labels=taught,
    )
    tokens = sum(len(piece.ids) for batch in batches for piece in batch)
    curve = [{"step": p["step"], "ppl": math.exp(p["value"])} for p in history.curve]
    seconds = time.monotonic() - started
    return {"tokens": tokens, "seconds": seconds, "best_step": history.best_step, "curve": curve}


def rows(options: argparse.Namespace, factor: float, done: dict[str, Any]) -> Iterator[str]:
    """Judge what is missing of one factor, a method at a time, into `done`."""
    config = AutoConfig.from_pretrained(options.model)
    window = window_of(config)
    longer = round(window * factor)
    docs, text = documents(options)
    judge = length_judge(
        AutoTokenizer.from_pretrained(options.model),
        text,
        window=window,
        longer=longer,
        windows=options.windows,
        lengths=(window, longer),
        keys=options.keys,
        depths=options.depths,
        seed=0,
        description=options.text.name,
        precision=getattr(torch, options.precision),
    )
    if UNSCALED not in done:
        done[UNSCALED] = {"scaled": judge.judge(load(options.model, dtype=torch.float32))}
        yield UNSCALED
    for method in options.methods:
        if method in done:
            continue
        work = options.work / f"{options.name}-{method}-{factor:g}"
        work.mkdir(parents=True, exist_ok=True)

        def stretched(
            stretch: float, folder: Path = work / "scaled", method: str = method
        ) -> PreTrainedModel:
            scale(options.model, folder, config, method, factor, stretch)
            return load(folder, dtype=torch.float32)

        searched = {}
        if options.search:
            long = sliding_windows("\n\n".join(docs), judge.tokenizer, 1, longer, "its start")
            searched = search(stretched, factor, long, getattr(torch, options.precision))
        model = make_trainable(stretched(best(searched)))
        found = {"stretch": best(searched), "search": searched, "scaled": judge.judge(model)}
        if options.steps:
            found["training"] = fine_tuned(options, model, judge, docs, longer, work)
            found["tuned"] = judge.judge(model)
        done[method] = found
        yield method


def run(options: argparse.Namespace) -> None:
    """Judge what is missing, write the results and the page's tables."""
    file = RESULTS / f"extend-{options.name}.json"
    asked = settings(options, "work", "factors", "methods")
    done = results_before(file, asked, LATER)
    window = window_of(AutoConfig.from_pretrained(options.model))
    for factor in options.factors:
        of_factor = done.setdefault(f"{factor:g}", {})
        started = time.monotonic()
        for method in rows(options, factor, of_factor):
            of_factor[method]["seconds"] = time.monotonic() - started
            print(f"{factor:g}: {method}", file=sys.stderr, flush=True)
            about = asked | {"window": window, "hardware": hardware()}
            about |= {"versions": packages(), "date": datetime.now(UTC).date().isoformat()}
            write_json(file, {**about, "results": done})
            started = time.monotonic()
    write_page()


def write_page() -> None:
    """Put the tables of all results into docs/extend.md."""
    found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("extend-*.json"))]
    text = "\n\n".join(table(report) for report in found)
    write_between(PAGE, "extend", text)
    print(text)


def table(report: dict[str, Any]) -> str:
    """One model: a line for each factor, method, and with or without the fine-tune."""
    trained = report["length"] or "the whole window"
    lines = [
        f"{report['model']}, trained window {report['window']}; `{report['text']}`, "
        f"{several(report['windows'], 'window')}; fine-tune of {report['steps']} steps of "
        f"{report['batch']} × {trained} tokens {_learned(report)}at {report['rate']:g}, a number "
        f"hidden in {report['passkey']:.0%} of the windows; numbers to find: "
        f"{report['keys']} at each of {report['depths']} depths. "
        f"{report['hardware']['cpu']}, {report['date']}.",
        "",
        "| window | method | fine-tune | perplexity | its last eighth | in old windows | "
        "a number found, old length | new length | one of several, old | new |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for factor, methods in report["results"].items():
        longer = round(report["window"] * float(factor))
        ordered = [name for name in NAMES if name in methods]
        for name, state in ((n, s) for n in ordered for s in ("scaled", "tuned")):
            if (judged := methods[name].get(state)) is None:
                continue
            ppl = judged["ppl"]
            cells = [
                str(longer),
                NAMES[name] + slowed(methods[name].get("stretch", 1.0)),
                "yes" if state == "tuned" else "",
                *(f"{x:.2f}" for x in (ppl["long"], ppl["by_position"][-1], ppl["short"])),
                *found_at(judged["retrieval"], (report["window"], longer)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _learned(report: dict[str, Any]) -> str:
    """Words for what the windows are of and what is learned, where that is not the default."""
    where = f"of `{report['train']}` " if report.get("train") else ""
    labels = "by soft labels " if report.get("labels") else ""
    near = f"({report['near']:.0%} at the first positions) " if report.get("near") else ""
    return where + labels + near


def slowed(stretch: float) -> str:
    """Words for frequencies that a search slowed by another factor than the window's."""
    return "" if stretch == 1 else f", slowed by {stretch:g} × the factor"


def found_at(retrieval: dict[str, Any] | None, lengths: tuple[int, int]) -> list[str]:
    """Shares of the numbers found, over all depths: one needle, then several, at each length."""
    if retrieval is None:
        return [""] * 4
    cells = []
    for kind in ("passkey", "needles"):
        for length in lengths:
            column = retrieval["lengths"].index(length)
            known = [row[column] for row in retrieval[kind]["exact"] if row[column] is not None]
            cells.append(f"{sum(known) / len(known):.0%}" if known else "")
    return cells


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a Hugging Face folder")
    add("--text", type=Path, required=True, help="long text; without --train its end is judged on")
    add("--train", type=Path, help="text to train on")
    add("--split", help="what parts the documents of the text; default: it is one")
    add("--name", help="of the results, extend-NAME.json; default: the model folder's")
    add("--factors", nargs="+", type=float, default=[2.0, 4.0])
    add("--methods", nargs="+", choices=rope.METHODS, default=["linear", "ntk", "yarn"])
    add("--search", action="store_true", help="how far to slow the frequencies, as extend.search")
    add("--steps", type=int, default=100, help="of the fine-tune; 0: none")
    add("--rate", type=float, default=2e-5)
    add("--batch", type=int, default=1, help="training windows a step")
    add(
        "--length",
        type=int,
        help="tokens of a training window; default: the new one, with --labels the old",
    )
    add("--passkey", type=float, default=0.1, help="share of training windows with a number hidden")
    add("--labels", action="store_true", help="learn the model's own soft labels, as extend.labels")
    add("--teacher", type=Path, help="the folder of the original, of a quantized model")
    add("--near", type=float, default=0.0, help="as extend.near")
    add("--precision", choices=PRECISIONS, default="float32", help="as extend.precision")
    add("--measures", type=int, default=4, help="in the course of a fine-tune")
    add("--windows", type=int, default=2, help="to judge on")
    add("--keys", type=int, default=1, help="numbers hidden at each depth and length; 0: none")
    add("--depths", type=int, default=5)
    add("--work", type=Path, default=ROOT / "runs/extend")
    options = parser.parse_args()
    options.name = options.name or options.model.name
    if options.teacher and not options.labels:
        parser.error("--teacher without --labels, which alone asks a teacher")
    if options.train and options.train.resolve() == options.text.resolve():
        parser.error(f"--train {options.train}: that is judged on; leave it out to part the text")
    folders = [folder / "config.json" for folder in (options.model, options.teacher) if folder]
    for path in (*folders, options.text, options.train):
        if path and not path.exists():
            parser.error(f"{path}: no such file")
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
