"""One request on CPU, decode and prefill: our runtime beside transformers and llama.cpp.

    .venv/bin/python benchmarks/decode.py --original DIR --checkpoint W8A8_DIR W4A16_DIR
        --compiled W8A8_DIR --llamacpp PYTHON Q8_0.gguf Q4_0.gguf --threads 2

Each round asks every contender once for the same number of tokens, so that what the machine does
meanwhile hits all; figures are medians over rounds (of the medians over a round's tokens), and
ratios are to transformers' bf16 `generate` in the same run. With one thread seconds are CPU seconds
of the process, as a shared core tells no others; with more they are the clock's. --compiled: of
the folders above those that are asked with their step compiled too. --llamacpp: a Python that has
cyllama (benchmarks/worker_llamacpp.py, which also makes the files).
Prints a table and writes a JSON file with hardware and versions.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from compress.artifact import write_json
from compress.log import progress
from compress.machine import hardware, packages
from compress.runtime.decode import Decoder
from compress.runtime.loader import load

WORKER = Path(__file__).parent / "worker_llamacpp.py"
BASE = "transformers bf16, generate"

Clock = Callable[[], float]
Contender = Callable[[int, int], list[float]]
"""Tokens of the prompt and of the answer to the seconds of each token of the answer."""


class Marks(BaseStreamer):
    """When each token came: `generate` hands on the prompt first."""

    def __init__(self, now: Clock) -> None:
        self.now = now
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with each token."""
        self.at.append(self.now())

    def end(self) -> None:
        """Called after the last."""


def transformers_generate(folder: Path, now: Clock) -> Contender:
    """`generate` of the original as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def ask(prompt: int, new: int) -> list[float]:
        marks = Marks(now)
        config = GenerationConfig(
            do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
        )
        model.generate(prompt_ids(prompt), generation_config=config, streamer=marks)
        return differences(marks.at)

    return ask


def ours(decoder: Decoder, now: Clock) -> Contender:
    """Our runtime's decoding of one request."""

    def ask(prompt: int, new: int) -> list[float]:
        decoder.prepare(prompt + new)
        marks = [now()]
        for _ in decoder.tokens(prompt_ids(prompt), new):
            marks.append(now())
        return differences(marks)

    return ask


def llamacpp(python: str, model: str, threads: int, clock: str) -> Contender:
    """llama.cpp in a process of its own, which ends with this one's stdin."""
    command = [python, str(WORKER), "serve", model, str(threads), clock]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(prompt: int, new: int) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(prompt, new, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    return ask


def prompt_ids(tokens: int) -> Tensor:
    """A prompt [1, tokens]; the time does not depend on what it says."""
    return torch.full((1, tokens), 100)


def differences(marks: list[float]) -> list[float]:
    """Seconds between neighbours."""
    return [after - before for before, after in pairwise(marks)]


def contenders(options: argparse.Namespace, clock: str) -> dict[str, Contender]:
    """What is compared, by name."""
    now = getattr(time, clock)
    found: dict[str, Contender] = {BASE: transformers_generate(options.original, now)}
    for folder in (options.original, *options.checkpoint):
        name = "bf16" if folder == options.original else scheme(folder)
        found[f"ours {name}"] = ours(Decoder(load(folder)), now)
        if folder in options.compiled:
            decoder = Decoder(load(folder), compile="auto")
            found[f"ours {name}, {decoder.step}"] = ours(decoder, now)
    if options.llamacpp:
        python, *models = options.llamacpp
        for model in models:
            name = f"llama.cpp {Path(model).stem}"
            found[name] = llamacpp(python, model, options.threads, clock)
    return found


def scheme(folder: Path) -> str:
    """The weights of the checkpoint in a word or two."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    weights, activations = group["weights"], group["input_activations"]
    size = f" g{weights['group_size']}" if weights.get("group_size") else ""
    return f"W{weights['num_bits']}A{activations['num_bits'] if activations else 16}{size}"


def main() -> None:
    """Ask by turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, nargs="+", default=[])
    parser.add_argument("--compiled", type=Path, nargs="+", default=[])
    parser.add_argument("--llamacpp", nargs="+", metavar=("PYTHON", "GGUF"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=33)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = "process_time" if options.threads == 1 else "perf_counter"
    asked = contenders(options, clock)
    prefill: dict[str, list[float]] = {name: [] for name in asked}
    decode: dict[str, list[float]] = {name: [] for name in asked}
    for turn in progress(range(options.rounds + 1), "rounds", "round"):
        for name, ask in asked.items():
            first, *others = ask(options.prompt, options.new)
            if turn > 0:
                prefill[name].append(first)
                decode[name].append(statistics.median(others))
    rows = {
        name: {
            "prefill_ms": 1e3 * statistics.median(prefill[name]),
            "decode_ms": 1e3 * statistics.median(decode[name]),
            "prefill_ratio": ratio(prefill, name),
            "decode_ratio": ratio(decode, name),
            "rounds": {"prefill_s": prefill[name], "decode_s": decode[name]},
        }
        for name in asked
    }
    result = {
        "rows": rows,
        "prompt_tokens": options.prompt,
        "new_tokens": options.new,
        "threads": options.threads,
        "clock": clock,
        "hardware": hardware(),
        "packages": packages(),
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(options.out, result)
    print(table(rows))


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """How many times as fast as the base: the median of the rounds' ratios."""
    pairs = zip(seconds[BASE], seconds[name], strict=True)
    return statistics.median(base / own for base, own in pairs)


def table(rows: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| | ms a token | times | prefill, ms | times |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {row['decode_ms']:.1f} | {row['decode_ratio']:.2f} | "
        f"{row['prefill_ms']:.0f} | {row['prefill_ratio']:.2f} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
