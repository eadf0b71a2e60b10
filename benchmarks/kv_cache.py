"""What the KV cache in 8 bit costs and saves, by length of the text.

    .venv/bin/python benchmarks/kv_cache.py --model FOLDER --text FILE

The text goes through the model with each kind of cache (16, v8, kv8), 64 tokens at a time, so that
all later tokens read the history as it is stored. At each length: KL and top-1 of the last 256
predictions to the same model with the cache in 16 bit, and to the original in float32; four pass
keys that were told near the start are asked for; decoding is timed, the kinds by turns (not with
--no-timing); the bytes that the cache holds are counted. Every kind sees the same tokens. Runs on
one thread and times by its CPU seconds, which other work on the machine moves little. Writes a JSON
file with hardware and versions after each length, so that a run that is stopped leaves what it has
(lengths_asked says what is missing), and prints a table.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from compress.artifact import write_json
from compress.machine import hardware, packages
from compress.runtime.cache import KEY_BLOCK, KV_CACHES, bytes_held, make_cache
from compress.runtime.loader import load

HERE = Path(__file__).parent
LENGTHS = (512, 1024, 2048, 4096, 8192)
MEASURED = 256
"""Predictions before each length that are compared: a multiple of KEY_BLOCK."""
KEYS = {"red": "71432", "blue": "50918", "green": "36275", "white": "84609"}
TOLD = " The pass key of the {color} door is {key}."
ASKED = "\n\nThe pass key of the {color} door is"
ANSWER_TOKENS = 8


def tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> Tensor:
    """`count` tokens of `text`, [1, count], the pass keys told in its first 256."""
    ids = tokenizer(text, verbose=False).input_ids
    for place, (color, key) in enumerate(KEYS.items()):
        told = tokenizer(TOLD.format(color=color, key=key), add_special_tokens=False).input_ids
        ids[48 * (place + 1) : 48 * (place + 1)] = told
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens; wanted {count}, or shorter --lengths")
    return torch.tensor([ids[:count]])


def feed(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Put `ids` [1, T] through, KEY_BLOCK at a time; the last MEASURED final hidden states."""
    hidden: list[Tensor] = []
    for part in ids.split(KEY_BLOCK, 1):
        output = model.base_model(input_ids=part, cache=cache, use_cache=True)
        hidden = [*hidden, output.last_hidden_state[0]][-MEASURED // KEY_BLOCK :]
    return torch.cat(hidden)


def log_probabilities(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Log-softmax in float32 of the head on `hidden` [n, H]: [n, V]."""
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)


def compared(before: Tensor, after: Tensor) -> dict[str, float]:
    """KL in nats a token, and the share of equal first choices, of log-probabilities [n, V]."""
    same = before.argmax(-1) == after.argmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    return {"kl": float(kl.double().mean()), "top1": float(same.double().mean())}


def ask(
    model: PreTrainedModel, cache: Cache, question: Tensor, answer_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy answer to `question` [1, T] and the seconds of each step; the cache is as before."""
    answer, seconds, ids = [], [], question
    for _ in range(answer_tokens):
        start = time.process_time()
        ids = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = ids.argmax(-1, keepdim=True)
        answer.append(int(ids))
        seconds.append(time.process_time() - start)
    cache.crop(-(question.shape[1] + answer_tokens - 1))
    return answer, seconds[1:]


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    original: list[Tensor],
    head: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    lengths: list[int],
    timing: bool,
) -> Iterator[list[dict[str, Any]]]:
    """The records of each length, one a kind, as soon as they are there.

    original: its final hidden states [MEASURED, H] before each length; head [V, H]; both float32.
    """
    caches = {kind: make_cache(kind, model.config) for kind in KV_CACHES}
    for start, length, hidden in zip([0, *lengths], lengths, original, strict=False):
        truth = F.linear(hidden, head).log_softmax(-1)
        found = {
            kind: log_probabilities(model, feed(model, cache, ids[:, start:length]))
            for kind, cache in caches.items()
        }
        held = {kind: bytes_held(cache) for kind, cache in caches.items()}
        keys, seconds = asked(model, caches, tokenizer)
        records = [
            {
                "length": length,
                "kv_cache": kind,
                "to_original": compared(truth, found[kind]),
                "to_16_bit": compared(found["16"], found[kind]),
                "bytes_per_token": held[kind] / length,
                "decode_tokens_per_s": 1 / float(np.median(seconds[kind])) if timing else None,
                "keys_found": keys[kind],
            }
            for kind in caches
        ]
        for record in records:
            print(json.dumps(record), file=sys.stderr, flush=True)
        yield records


def asked(
    model: PreTrainedModel, caches: dict[str, Cache], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Of each kind: how many pass keys it finds, and the seconds of its decoding steps."""
    keys = dict.fromkeys(caches, 0)
    seconds: dict[str, list[float]] = {kind: [] for kind in caches}
    for color, key in KEYS.items():
        text = ASKED.format(color=color)
        question = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        for kind, cache in caches.items():
            answer, taken = ask(model, cache, question, ANSWER_TOKENS)
            keys[kind] += tokenizer.decode(answer).strip().startswith(key)
            seconds[kind] += taken
    return keys, seconds


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, a line for each length and kind."""
    lines = [
        "| tokens | cache | KL to 16 bit | same first choice | KL to the original | pass keys "
        "| bytes a token | decode, tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        lines.append(
            f"| {r['length']} | {r['kv_cache']} | {r['to_16_bit']['kl']:.5f} "
            f"| {r['to_16_bit']['top1']:.1%} | {r['to_original']['kl']:.5f} "
            f"| {r['keys_found']} of {len(KEYS)} | {r['bytes_per_token']:.0f} "
            f"| {_rate(r['decode_tokens_per_s'])} |"
        )
    return "\n".join(lines)


def _rate(tokens_per_s: float | None) -> str:
    return "not timed" if tokens_per_s is None else f"{tokens_per_s:.1f}"


@torch.inference_mode()
def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was measured so far, after each length."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lengths = sorted(options.lengths)
    text = options.text.read_text(encoding="utf-8")
    ids = tokens(tokenizer, text, lengths[-1])
    exact = load(options.original or options.model, dtype=torch.float32)
    cache = make_cache("16", exact.config)
    pieces = zip([0, *lengths], lengths, strict=False)
    original = [feed(exact, cache, ids[:, start:end]) for start, end in pieces]
    head = exact.get_output_embeddings().weight.detach()
    del exact, cache
    model = load(options.model, dtype=getattr(torch, options.dtype) if options.dtype else None)
    result: dict[str, Any] = {
        "model": options.model.name,
        "original": (options.original or options.model).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "text": options.text.name,
        "measured": MEASURED,
        "threads": 1,
        "lengths_asked": lengths,
        "records": [],
        "hardware": hardware(),
        "versions": packages(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    for records in measure(model, original, head, tokenizer, ids, lengths, options.timing):
        result["records"] += records
        yield result


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a model folder, quantized or not"
    )
    parser.add_argument("--text", type=Path, required=True, help="long enough for the lengths")
    parser.add_argument("--original", type=Path, help="its original; default: the model itself")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as stored")
    parser.add_argument("--no-timing", dest="timing", action="store_false", help="time nothing")
    parser.add_argument("--out", type=Path, help="the JSON; default benchmarks/results/kv-cache-*")
    options = parser.parse_args()
    for file in (options.model / "config.json", options.text):
        if not file.exists():
            parser.error(f"{file}: no such file")
    steps = np.diff([0, *sorted(options.lengths)])
    if min(steps) < MEASURED or any(step % KEY_BLOCK for step in steps):
        parser.error(f"--lengths: wanted multiples of {KEY_BLOCK}, {MEASURED} apart at least")
    for result in run(options):
        name = f"kv-cache-{options.model.name}-{result['dtype']}.json"
        out = options.out or HERE / "results" / name
        write_json(out, result)
    print(f"{table(result['records'])}\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
