"""Mixed precision beside uniform precision in the same bytes, by this project's own pipeline.

    .venv/bin/python benchmarks/budget.py --model FOLDER --train FILE.txt --test FILE.txt

For each uniform scheme: its checkpoint, and one with `budget=` the very bits a weight that it takes
on disk, over the linears that the mixture chooses for. For each of --budgets: one, beside the
largest uniform scheme within it. All are calibrated on the same windows of the training text and
rounded alike, loaded from disk and judged in float32 on the first windows of the test text, which
nothing saw. Sensitivities are estimated once. Each result also holds the KL that was added up from
the layers alone, by which the choice was made: how far it lies from the measured one is how far the
estimate and additivity carry. What is judged is kept in benchmarks/results/budget-NAME.json and not
done again; docs/fidelity.md gets its table from all such files. Results of other settings are not
added to.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from kept import results_before, settings, write_between
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from compress.artifact import write_json, write_text
from compress.budget import choices
from compress.eval import fidelity
from compress.machine import hardware, packages
from compress.model import linear_shapes
from compress.qtensor import QuantSpec, parse_scheme
from compress.runtime.loader import load
from compress.sizes import tensor_bytes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS, PAGE = HERE / "results", ROOT / "docs/fidelity.md"
STAGES = "run/stages"


def bits_on_disk(folder: Path, options: argparse.Namespace) -> float:
    """Bits a weight in a checkpoint, scales counted, of the linears that have a choice of formats.

    A group size may have been lowered and a linear kept in 16 bit, so they are read, not reckoned.
    """
    shapes = linear_shapes(AutoConfig.from_pretrained(options.model))
    specs = filter(None, map(parse_scheme, options.choices))
    groups = choices.offered(shapes, specs, options.engine, [], ["lm_head"]).groups
    stored = tensor_bytes(folder)
    size = sum(
        stored.get(f"{name}.{part}", 0)
        for group in groups
        for name in group.names
        for part in ("weight", "weight_packed", "weight_scale")
    )
    # Upwards, so that the uniform choice itself is within the budget.
    return math.ceil(8e6 * size / sum(group.weights for group in groups)) / 1e6


def command(options: argparse.Namespace, spec: QuantSpec, budget: float | None) -> list[str]:
    """The pipeline's command line; `spec` for all without a budget."""
    work = options.work.absolute()
    fields = {
        "recipe": "int4_7b",
        "stages": "[calibrate,quantize]",
        "model.path": options.model.absolute(),
        "engine": options.engine,
        "data.path": work / "calibration.txt",
        "data.heldout": work / "heldout.txt",
        "data.samples": options.samples,
        "data.length": options.length,
        "quantize.bits": spec.bits,
        "quantize.activation_bits": spec.activation_bits or "null",
        "quantize.group_size": spec.group_size or "null",
        "quantize.rounding": options.rounding,
        "budget": budget or "null",
        "allocate.choices": f"[{','.join(options.choices)}]",
        "allocate.windows": options.sensitivity_windows,
        "force": "[allocate]" if budget else "[quantize]",
        "out": work / "run",
    }
    return [sys.executable, "-m", "compress", *(f"{name}={v}" for name, v in fields.items())]


def metrics(options: argparse.Namespace, stage: str) -> dict[str, Any]:
    """What the stage's manifest says, with its seconds."""
    manifest = json.loads((options.work / STAGES / f"{stage}.json").read_text())
    return {**manifest["metrics"], "seconds": manifest["seconds"]}


def made(
    options: argparse.Namespace,
    spec: QuantSpec,
    budget: float | None,
    reference: Callable[[], fidelity.Reference],
    windows: Tensor,
) -> dict[str, Any]:
    """Compress and judge one checkpoint."""
    subprocess.run(command(options, spec, budget), cwd=ROOT, check=True)
    model = load(options.work / STAGES / "quantize", dtype=torch.float32)
    close = fidelity.compare_to(reference(), model, windows)
    found = {
        "kl": close.mean_kl,
        "top1": close.mean_top1,
        "ppl": close.perplexity[1],
        "heldout_kl": metrics(options, "quantize")["heldout_kl"]["after"],
    }
    if budget is None:
        return found
    chosen = metrics(options, "allocate")
    keys = ("tokens", "rounding", "bits_per_weight", "kl", "counts", "uniform", "seconds")
    taken = {layer["name"]: layer["taken"] for layer in chosen["layers"]}
    return {**found, "allocate": {key: chosen[key] for key in keys} | {"taken": taken}}


def run(options: argparse.Namespace) -> None:
    """Make and judge what is missing, write the results and the page's table."""
    file = RESULTS / f"budget-{options.name}.json"
    asked = settings(options, "work", "uniform", "budgets")
    done = results_before(file, asked)
    options.work.mkdir(parents=True, exist_ok=True)
    train = options.train.read_text(encoding="utf-8")
    write_text(options.work / "calibration.txt", train[: -len(train) // 10])
    write_text(options.work / "heldout.txt", train[-len(train) // 10 :])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    test = options.test.read_text(encoding="utf-8")
    windows = fidelity.windows(test, tokenizer, options.windows, options.window_tokens)

    @cache
    def reference() -> fidelity.Reference:
        return fidelity.remember(load(options.model, dtype=torch.float32), windows)

    folder = options.work / STAGES / "quantize"

    def judge(name: str, kind: str, spec: QuantSpec, budget: float | None) -> None:
        if kind in done.setdefault(name, {}):
            return
        print(f"{name}: {kind}", file=sys.stderr, flush=True)
        done[name][kind] = made(options, spec, budget, reference, windows)
        if kind == "uniform":
            done[name]["bits_per_weight"] = bits_on_disk(folder, options)
        about = asked | {"hardware": hardware(), "versions": packages()}
        about["date"] = datetime.now(UTC).date().isoformat()
        write_json(file, {**about, "uniform": list(done), "results": done})

    schemes = {text: parse_scheme(text) for text in options.uniform}
    for text, spec in schemes.items():
        assert spec is not None
        judge(text, "uniform", spec, None)
        judge(text, "mixed", spec, done[text]["bits_per_weight"])
    for budget in options.budgets:
        fitting = {name: done[name]["bits_per_weight"] for name in schemes}
        fitting = {name: bits for name, bits in fitting.items() if bits <= budget}
        if not fitting:
            sys.exit(
                f"--budgets {budget:g}: no uniform scheme of {', '.join(schemes)} is within it"
            )
        beside = max(fitting, key=lambda name: fitting[name])
        spec = schemes[beside]
        assert spec is not None
        done.setdefault(f"{budget:g}", {}).update(beside=beside, bits_per_weight=budget)
        judge(f"{budget:g}", "mixed", spec, budget)
    write_page()


def write_page() -> None:
    """Put the table of all results into docs/fidelity.md."""
    found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("budget-*.json"))]
    text = "\n\n".join(filter(None, map(table, found)))
    write_between(PAGE, "budget", text)
    print(text)


def table(report: dict[str, Any]) -> str:
    """One model and rounding: a line a budget that is done."""
    done = {name: pair for name, pair in report["results"].items() if "mixed" in pair}
    if not done:
        return ""
    first = next(iter(done.values()))["mixed"]["allocate"]
    cores = report["hardware"]["cores"]
    lines = [
        f"{report['model']}, engine={report['engine']}, rounding {report['rounding']}, choices "
        f"{', '.join(report['choices'])} and 16 bit; {report['samples']} calibration windows of "
        f"{report['length']} tokens, sensitivities on {first['tokens']} tokens; judged on "
        f"{report['windows']} windows of {report['window_tokens']} tokens of `{report['test']}`. "
        f"{report['hardware']['cpu']}, {cores} core{'s' if cores > 1 else ''}.",
        "",
        "| bits a weight | uniform | its KL | mixed: KL | of the uniform's | added up: uniform "
        "| mixed | linears |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, pair in sorted(done.items(), key=lambda item: item[1]["bits_per_weight"]):
        scheme = pair.get("beside", name)
        mixed, uniform = pair["mixed"], report["results"][scheme]["uniform"]
        chosen, bits = mixed["allocate"], report["results"][scheme]["bits_per_weight"]
        added = {row["scheme"]: row["kl"] for row in chosen["uniform"]}.get(scheme)
        less = f", {bits:.3f}" if "beside" in pair else ""
        lines.append(
            f"| {pair['bits_per_weight']:.3f} | {scheme}{less} | {uniform['kl']:.5f} | "
            f"{mixed['kl']:.5f} | {mixed['kl'] / uniform['kl']:.2f} | "
            f"{'' if added is None else f'{added:.5f}'} | {chosen['kl']:.5f} | "
            f"{', '.join(f'{count} {name}' for name, count in chosen['counts'].items())} |"
        )
    return "\n".join(lines)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a Hugging Face folder")
    add("--train", type=Path, required=True, help="text to calibrate on; its end is held out")
    add("--test", type=Path, required=True, help="text to judge on")
    add("--name", required=True, help="of the results, budget-NAME.json")
    add("--engine", default="vllm")
    add("--rounding", default="nearest", choices=("nearest", "gptq", "learned"))
    add("--uniform", nargs="+", default=["W4A16 g64", "W4A16 g32", "W8A16"], metavar="SCHEME")
    add("--budgets", nargs="*", type=float, default=[], metavar="BITS", help="more of them")
    add("--choices", nargs="+", metavar="SCHEME", help="allocate.choices; default: --uniform")
    add("--samples", type=int, default=48)
    add("--length", type=int, default=512)
    add("--sensitivity-windows", type=int, default=16)
    add("--windows", type=int, default=8, help="to judge on")
    add("--window-tokens", type=int, default=1024)
    add("--work", type=Path, default=ROOT / "runs/budget")
    options = parser.parse_args()
    options.choices = options.choices or options.uniform
    for path in (options.model / "config.json", options.train, options.test):
        if not path.exists():
            parser.error(f"{path}: no such file")
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
