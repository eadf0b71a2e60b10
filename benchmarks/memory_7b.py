"""Memory, temporary disk and time of the 7B recipes, on a model of that shape with random weights.

    .venv/bin/python benchmarks/memory_7b.py FOLDER               # 32 blocks, 13.5 GB
    .venv/bin/python benchmarks/memory_7b.py FOLDER --blocks 2    # the same, cut short
    .venv/bin/python benchmarks/memory_7b.py FOLDER --blocks 2 --train    # distill instead

Makes the model in FOLDER, takes it through plan, calibrate, quantize and export by each recipe, in
processes of their own, checks that the checkpoint holds what its config.json wants, prints the
table, writes benchmarks/results/memory-7b.json (with the blocks in its name where cut short), and
removes FOLDER. Needs there the model, its temporary files and a checkpoint: 35 GB for 32 blocks.

--train: int4_7b with plain rounding, then distill in each of --ways of learning, steps of 2 windows
of --length tokens, beside what plan said (memory-7b-train.json).
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from make_llama import make

from compress.runtime.loader import build_empty
from compress.tensors import TensorFiles
from compress.training.trainable import WAYS

RECIPES = ("int4_7b", "int8_7b")
STAGES = ("plan", "calibrate", "quantize", "export")
TRAINED = ("plan", "calibrate", "quantize", "distill")
PLAIN = ("quantize.rounding=nearest", "quantize.smooth=false", "quantize.clip=false")
# Every head of this Llama has keys and values of its own: a batch would not fit the recipes' cards.
ALONE = ("plan.batch=1",)
SHORT = ("distill.recompute=true", "distill.measures=1", "calibrate.heldout_windows=1")
RESULTS = Path(__file__).resolve().parent / "results"


def measure(model: Path, out: Path, recipe: str, options: list[str]) -> dict[str, Any]:
    """Run the recipe in a process of its own; what the manifests say of each stage."""
    command = [sys.executable, "-m", "compress", f"recipe={recipe}", f"model.path={model}", *ALONE]
    subprocess.run([*command, f"out={out}", f"stages=[{','.join(STAGES)}]", *options], check=True)
    manifests = {s: json.loads((out / "stages" / f"{s}.json").read_text()) for s in STAGES}
    odd = mismatches(out / "checkpoint")
    if odd:
        sys.exit(f"{out / 'checkpoint'}: {odd[:5]}")
    keys = ("seconds", "peak_rss_bytes", "temporary_disk_bytes")
    return {
        "scheme": manifests["quantize"]["metrics"]["scheme"],
        "stages": {s: {key: m[key] for key in keys} for s, m in manifests.items()},
        "quantize_seconds_by_part": manifests["quantize"]["metrics"]["seconds_by_part"],
        "checkpoint_bytes": manifests["export"]["metrics"]["bytes"],
        "hardware": manifests["quantize"]["hardware"],
        "packages": manifests["quantize"]["packages"],
    }


def measure_training(model: Path, out: Path, way: str, length: int) -> dict[str, Any]:
    """Let the model learn in a process of its own; the peak that plan said, and the one it had."""
    text = (
        f"data.samples=4 data.length={length} distill.samples=4 distill.length={length}"
    ).split()
    command = [sys.executable, "-m", "compress", "recipe=int4_7b", f"model.path={model}"]
    stages = f"stages=[{','.join(TRAINED)}]"
    settings = (*PLAIN, *SHORT, *text, f"distill.train={way}", "force=[distill]")
    subprocess.run([*command, f"out={out}", stages, *settings], check=True)
    plan, distill = (
        json.loads((out / "stages" / f"{s}.json").read_text()) for s in ("plan", "distill")
    )
    return {
        "planned": plan["metrics"]["training"][way],
        "peak_rss_bytes": distill["peak_rss_bytes"],
        "seconds": distill["seconds"],
        "steps": distill["metrics"]["steps"],
        "trained_parameters": distill["metrics"]["trained_parameters"],
        "hardware": distill["hardware"],
        "packages": distill["packages"],
    }


def training_table(results: dict[str, Any]) -> str:
    """Results by what learned as Markdown."""
    lines = ["| learns | planned GB | peak GB | off |", "|---|---:|---:|---:|"]
    for way, result in results.items():
        planned, peak = result["planned"]["total"], result["peak_rss_bytes"]
        lines.append(
            f"| {way} | {planned / 1e9:.2f} | {peak / 1e9:.2f} | {planned / peak - 1:+.0%} |"
        )
    return "\n".join(lines)


def mismatches(checkpoint: Path) -> list[str]:
    """Tensors that are not as the model of config.json, on the meta device, wants them: absent,
    too many, or of another shape or dtype.
    """
    model = build_empty(checkpoint, "meta", None)
    tied = model.all_tied_weights_keys
    wanted = {n: (tuple(t.shape), t.dtype) for n, t in model.state_dict().items() if n not in tied}
    found = TensorFiles(checkpoint).shapes()
    names = sorted(wanted.keys() | found.keys())
    return [
        f"{name} is {found.get(name)}, wanted {wanted.get(name)}"
        for name in names
        if found.get(name) != wanted.get(name)
    ]


def table(results: dict[str, Any]) -> str:
    """Results by recipe as Markdown."""
    lines = ["| recipe | stage | s | peak GB | temporary disk GB |", "|---|---|---:|---:|---:|"]
    for recipe, result in results.items():
        lines += [
            f"| {recipe} | {stage} | {row['seconds']:.0f} | {row['peak_rss_bytes'] / 1e9:.2f} "
            f"| {row['temporary_disk_bytes'] / 1e9:.2f} |"
            for stage, row in result["stages"].items()
        ]
        parts = result["quantize_seconds_by_part"].items()
        lines.append(f"| | of quantize: {', '.join(f'{n} {s:.0f} s' for n, s in parts)} | | | |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to work; must not be there yet")
    parser.add_argument("--blocks", type=int, help="decoder blocks, instead of 32")
    parser.add_argument("--samples", type=int, default=8, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--train", action="store_true", help="measure distill instead")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of it to learn")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} is there already; remove it, or name another folder")
    model = options.folder / "model"
    size = make(model, "7b", blocks=options.blocks)
    if options.train:
        out = options.folder / "train"
        results = {way: measure_training(model, out, way, options.length) for way in options.ways}
    else:
        results = {name: _measured(options, name) for name in RECIPES}
    shutil.rmtree(options.folder)
    name = "memory-7b" + ("-train" if options.train else "")
    name += f"-{options.blocks}-blocks" if options.blocks else ""
    record = {"model_bytes": size, "data": _data(options), "recipes": results}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(training_table(results) if options.train else table(results))


def _data(options: argparse.Namespace) -> list[str]:
    return [f"data.samples={options.samples}", f"data.length={options.length}"]


def _measured(options: argparse.Namespace, recipe: str) -> dict[str, Any]:
    out = options.folder / recipe
    found = measure(options.folder / "model", out, recipe, _data(options))
    shutil.rmtree(out)
    return found


if __name__ == "__main__":
    main()
