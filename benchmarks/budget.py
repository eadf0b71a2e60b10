"""Mixed precision beside uniform precision in the same bytes, by this project's own pipeline.

    .venv/bin/python benchmarks/budget.py --model FOLDER --data FOLDER

For each uniform scheme: its checkpoint, and one with `budget=` the very bits a weight that it
takes. Both are calibrated on the first 48 windows of 512 tokens of wikitext2_train.txt, rounded
alike (--rounding), loaded from disk and judged in float32 on the first windows of
wikitext2_test.txt, which nothing saw. Q, K and V stay in 16 bit (engine=vllm). Sensitivities are
measured once. What is judged is kept in benchmarks/results/budget-ROUNDING.json and not done again.
"""

import argparse
import json
import math
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from fidelity_make import LENGTH, SAMPLES, prepare
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from compress import choices
from compress.artifact import write_json
from compress.eval import fidelity
from compress.machine import hardware, packages
from compress.model import linear_shapes
from compress.qtensor import QuantSpec
from compress.runtime.loader import load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
UNIFORM = (QuantSpec(4, 64), QuantSpec(4, 32), QuantSpec(8))
CHOICES = "[W4A16,W4A16 g128,W4A16 g64,W4A16 g32,W8A16]"


def bits_of(spec: QuantSpec, model: Path) -> float:
    """Bits a weight of the linears that may be quantized, all in one scheme, scales counted."""
    shapes = linear_shapes(AutoConfig.from_pretrained(model))
    groups, _ = choices.offered(shapes, [spec], "vllm", [], ["lm_head"])
    sizes = sum(group.sizes[spec] for group in groups)
    # Upwards, so that the uniform choice itself is within the budget.
    return math.ceil(8e6 * sizes / sum(group.weights for group in groups)) / 1e6


def command(options: argparse.Namespace, spec: QuantSpec, budget: float | None) -> list[str]:
    """The pipeline's command line; `spec` for all without a budget."""
    work = options.work.absolute()
    fields = {
        "recipe": "int4_7b",
        "stages": "[calibrate,quantize]",
        "model.path": options.model.absolute(),
        "engine": "vllm",
        "data.path": work / "calibration.txt",
        "data.heldout": work / "heldout.txt",
        "data.samples": SAMPLES,
        "data.length": LENGTH,
        "quantize.bits": 4 if budget else spec.bits,
        "quantize.group_size": 64 if budget else spec.group_size or "null",
        "quantize.rounding": options.rounding,
        "budget": budget or "null",
        "allocate.choices": options.choices,
        "force": "[allocate]" if budget else "[quantize]",
        "out": work / "run",
    }
    return [sys.executable, "-m", "compress", *(f"{name}={v}" for name, v in fields.items())]


def judged(folder: Path, reference: fidelity.Reference, windows: Tensor) -> dict[str, Any]:
    """How far the checkpoint of `folder` is from the original, a value a window."""
    close = fidelity.compare_to(reference, load(folder, dtype=torch.float32), windows)
    return {"kl": close.mean_kl, "top1": close.mean_top1, "ppl": close.perplexity[1]}


def run(options: argparse.Namespace) -> None:
    """Make and judge what is missing, write the results."""
    file = HERE / "results" / f"budget-{options.name or options.rounding}.json"
    done = json.loads(file.read_text())["results"] if file.exists() else {}
    prepare("w4a16-g64", options.model, options.data / "wikitext2_train.txt", options.work)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = (options.data / "wikitext2_test.txt").read_text(encoding="utf-8")
    windows = fidelity.windows(text, tokenizer, options.windows, 1024)
    reference = fidelity.remember(load(options.model, dtype=torch.float32), windows)
    for spec in UNIFORM:
        bits = bits_of(spec, options.model)
        for budget, kind in ((bits, "mixed"), (None, "uniform")):
            name = f"{spec.scheme} {kind}"
            if name in done:
                continue
            print(name, file=sys.stderr, flush=True)
            subprocess.run(command(options, spec, budget), cwd=ROOT, check=True)
            stages = options.work / "run/stages"
            stage = "allocate" if budget else "quantize"
            manifest = json.loads((stages / f"{stage}.json").read_text())
            metrics = manifest["metrics"]
            keys = ("bits_per_weight", "kl", "counts", "uniform", "tokens")
            done[name] = {
                "bits_per_weight": bits,
                **judged(stages / "quantize", reference, windows),
                "heldout_kl": json.loads((stages / "quantize.json").read_text())["metrics"][
                    "heldout_kl"
                ]["after"],
                "allocate": {key: metrics[key] for key in keys} if budget else None,
                "taken": {layer["name"]: layer["taken"] for layer in metrics["layers"]}
                if budget
                else None,
                "seconds": manifest["seconds"],
            }
            write_json(
                file,
                {
                    "model": options.model.name,
                    "rounding": options.rounding,
                    "choices": options.choices,
                    "judge": {"windows": len(windows), "tokens": 1024},
                    "hardware": hardware(),
                    "versions": packages(),
                    "date": datetime.now(UTC).date().isoformat(),
                    "results": done,
                },
            )
    print(table(done))


def table(results: dict[str, Any]) -> str:
    """Markdown: a line each."""
    lines = ["| bits a weight | | KL | top-1 | perplexity |", "|---|---|---|---|---|"]
    for name, found in results.items():
        lines.append(
            f"| {found['bits_per_weight']:.3f} | {name} | {found['kl']:.4f} | "
            f"{100 * found['top1']:.1f}% | {found['ppl']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the WikiText-2 texts")
    parser.add_argument("--rounding", default="nearest", choices=("nearest", "gptq", "learned"))
    parser.add_argument("--choices", default=CHOICES, help="allocate.choices")
    parser.add_argument("--windows", type=int, default=8, help="of 1024 tokens, to judge on")
    parser.add_argument("--name", help="of the results, budget-NAME.json; default: the rounding")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/budget")
    options = parser.parse_args()
    for path in (options.model / "config.json", options.data / "wikitext2_train.txt"):
        if not path.exists():
            parser.error(f"{path}: no such file")
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
