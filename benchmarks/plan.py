"""What planning predicts beside what is then measured, on this machine's CPU.

    .venv/bin/python benchmarks/plan.py --model FOLDER --checkpoint FOLDER [--checkpoint FOLDER ...]

The model and its quantized checkpoints are loaded and answer batches of prompts (--settings, batch
x prompt tokens), NEW tokens each. Predicted from config.json and the scheme alone: the memory that
this takes, Python and its libraries included, and TTFT and TPOT from a probe of the machine. Memory
is measured in PROCESSES of its own, as the most that is resident while one answers. On one thread
(the default) times are CPU seconds, which other work on the machine moves little; on more, wall
seconds. Rounds of the probe and of the model take turns, and the fastest of both are compared: a
virtual machine can be nearly twice as slow for some seconds (all rounds are in the results), and is
never faster than it is. --memory measures memory alone, which no other work moves. Prints the
errors and writes benchmarks/results/plan-MODEL.json, or plan-memory-MODEL.json, with hardware and
versions.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compress.artifact import write_json
from compress.machine import PeakMemory, hardware, packages
from compress.planning.memory import Weights, needed, weights_of
from compress.planning.probe import Probe, held, serving_process
from compress.planning.shape import Shape, read_model, shape_of
from compress.planning.timing import Clock
from compress.quantization_config import read_quantization_config
from compress.runtime.cache import make_cache
from compress.runtime.loader import load
from compress.source import describe

HERE = Path(__file__).resolve().parent
SETTINGS = ("1x128", "1x512", "8x256")
NEW = 16
ROUNDS, PROCESSES = 12, 3


def scheme_of(folder: Path, shape: Shape) -> Weights:
    """What planning makes of the checkpoint's scheme; ends the program where other linears are
    quantized than it says.
    """
    quantization = describe(folder).get("quantization_config")
    if quantization is None:
        return weights_of(shape, None, on_cpu=True)
    specs = read_quantization_config(quantization, [*shape.linears, *shape.heads])
    spec = next(iter(specs.values()))
    for engine in ("any", "vllm", "native"):
        weights = weights_of(shape, spec, engine, on_cpu=True)
        if weights.quantized == len(specs):
            return weights
    sys.exit(f"{folder}: {len(specs)} linears are quantized, by no engine's rules")


@torch.inference_mode()
def answer(
    model: PreTrainedModel, batch: int, prompt: int, timer: Callable[[], float]
) -> list[float]:
    """Seconds of each forward of a batch of random prompts, answered greedily with NEW tokens."""
    cache, ids = make_cache("16", model.config), torch.randint(model.vocab_size, (batch, prompt))
    marks = [timer()]
    for _ in range(NEW):
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        marks.append(timer())
    return [end - start for start, end in pairwise(marks)]


def memory_of(folder: Path, batch: int, prompt: int, threads: int) -> dict[str, int]:
    """Bytes resident `before` the model is loaded, and at most while it answers (`peak`); of
    PROCESSES of its own the one that took most, since their heaps do not fall in the same pieces.
    """
    asked = json.dumps({"folder": str(folder), "batch": batch, "prompt": prompt})
    command = [sys.executable, __file__, "--threads", str(threads), "--measure-memory", asked]
    done = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for _ in range(PROCESSES)
    ]
    return max(
        (json.loads(said.splitlines()[-1]) for said in done), key=lambda found: found["peak"]
    )


def measure_memory(folder: str, batch: int, prompt: int) -> dict[str, int]:
    """What `memory_of` starts. Libraries load more of themselves at the first forward, which is
    not the model's: a small one is made first.
    """
    before = held()
    model = load(Path(folder))
    with PeakMemory() as memory:
        answer(model, batch, prompt, time.perf_counter)
    return {"before": before, "peak": memory.peak}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a checkpoint and setting: pairs of what was predicted and what was measured."""
    shape = shape_of(read_model(str(options.model)), options.model.name)
    rows = []
    for folder in (options.model, *options.checkpoint):
        weights = scheme_of(folder, shape)
        timed = times(folder, weights, shape, options) if not options.memory else {}
        for setting in options.settings:
            batch, prompt = sizes(setting)
            resident = memory_of(folder, batch, prompt, options.threads)
            parts = needed(shape, weights, "16", batch, prompt + NEW, prompts=batch)
            row = {"scheme": weights.scheme, "setting": setting, "before": resident["before"]}
            row["memory"] = serving_process() + sum(parts.values()), resident["peak"]
            rows.append(row | timed.get(setting, {}))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def times(
    folder: Path, weights: Weights, shape: Shape, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """By setting, TTFT and TPOT, predicted by the fastest rounds of a probe and measured as the
    fastest of ROUNDS between them. rounds: all that were measured.
    """
    timer = time.process_time if options.threads == 1 else time.perf_counter
    model, probe = load(folder), Probe(shape, timer)
    steps: dict[str, list[list[float]]] = {setting: [] for setting in options.settings}
    for setting in options.settings:
        answer(model, *sizes(setting), timer)  # which warms up
    for _ in range(ROUNDS):
        probe.take(1)
        for setting, rounds in steps.items():
            rounds.append(answer(model, *sizes(setting), timer))
    clock, found = Clock(shape, weights, probe.device()), {}
    for setting, rounds in steps.items():
        batch, prompt = sizes(setting)
        first = [step[0] for step in rounds]
        later = [statistics.median(step[1:]) for step in rounds]
        found[setting] = {
            "ttft": (clock.prefill([prompt] * batch), min(first)),
            "tpot": (clock.decode(batch, batch * (prompt + NEW / 2)), min(later)),
            "rounds": {"ttft": first, "tpot": later},
        }
    return found


def sizes(setting: str) -> tuple[int, int]:
    """Batch and prompt tokens of "8x256"."""
    batch, prompt = map(int, setting.split("x"))
    return batch, prompt


COLUMNS = {"memory": ("memory, MB", 1e6), "ttft": ("TTFT, ms", 1e-3), "tpot": ("TPOT, ms", 1e-3)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: predicted, measured, and how far the prediction is off."""
    columns = {key: column for key, column in COLUMNS.items() if key in rows[0]}
    head = ["scheme", "batch x prompt", *(name for name, _ in columns.values())]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [
            f"{row[key][0] / unit:.0f}, measured {row[key][1] / unit:.0f} "
            f"({row[key][0] / row[key][1] - 1:+.1%})"
            for key, (_, unit) in columns.items()
        ]
        lines.append(f"| {row['scheme']} | {row['setting']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="the original's folder")
    parser.add_argument("--checkpoint", type=Path, action="append", default=[], help="of it")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="memory alone, no times")
    parser.add_argument("--measure-memory", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure_memory:
        print(json.dumps(measure_memory(**options.measure_memory)))
        return 0
    if options.model is None:
        parser.error("--model is missing; wanted a model's folder")
    rows = measure(options)
    kind = "plan-memory" if options.memory else "plan"
    out = HERE / "results" / f"{kind}-{options.model.name}.json"
    write_json(
        out,
        {
            "model": options.model.name,
            "new_tokens": NEW,
            "rows": rows,
            "threads": options.threads,
            "hardware": hardware(),
            "versions": packages(),
            "date": datetime.now(UTC).date().isoformat(),
        },
    )
    print(f"{table(rows)}\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
