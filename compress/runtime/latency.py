"""How fast a model answers one request at a time: prefill and decode apart.

TTFT, time to first token: the prompt in one forward, with the first token chosen. TPOT, time per
output token: each later token, one forward of one token. Milliseconds where a name says so.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.log import progress
from compress.runtime.decode import Decoder

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Timing:
    """One request, in seconds: `ttft`, and `tpot` of each token after the first."""

    ttft: float
    tpot: list[float]


def time_request(decoder: Decoder, prompt: Tensor, new_tokens: int) -> Timing:
    """Answer `prompt` [1, tokens] greedily with exactly `new_tokens`, at least 2, and time it.

    Compiling is left out.
    """
    device = decoder.model.device
    decoder.prepare(prompt.shape[1] + new_tokens)
    marks = [_now(device)]
    for _ in decoder.tokens(prompt, new_tokens):
        marks.append(_now(device))
    steps = np.diff(marks).tolist()
    return Timing(ttft=steps[0], tpot=steps[1:])


def time_models(
    decoders: Mapping[str, Decoder],
    *,
    prompt_tokens: int,
    new_tokens: int,
    requests: int,
    warmup: int,
    seed: int,
) -> dict[str, list[Timing]]:
    """Time `requests` of each model by turns, so that what the machine does meanwhile hits all;
    every other turn goes backwards, so that none always follows the same.

    Prompts are random tokens, the same for every model: the time does not depend on them.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(d.model.get_input_embeddings().num_embeddings for d in decoders.values())
    timings: dict[str, list[Timing]] = {name: [] for name in decoders}
    rounds, order = range(warmup + requests), list(decoders)
    for turn in progress(rounds, "requests to " + " and ".join(decoders), "request"):
        prompt = torch.randint(vocabulary, (1, prompt_tokens), generator=generator)
        for name in order if turn % 2 == 0 else reversed(order):
            timing = time_request(decoders[name], prompt, new_tokens)
            if turn >= warmup:
                timings[name].append(timing)
    return timings


def summarize(timings: list[Timing], prompt_tokens: int) -> dict[str, Any]:
    """Percentiles of the requests, and rates from the medians: a busy moment does not move them."""
    ttft = percentiles_ms([timing.ttft for timing in timings])
    tpot = percentiles_ms([step for timing in timings for step in timing.tpot])
    return {
        "ttft_ms": ttft,
        "tpot_ms": tpot,
        "prefill_tokens_per_s": 1e3 * prompt_tokens / ttft["p50"],
        "decode_tokens_per_s": 1e3 / tpot["p50"],
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(timings[0].tpot) + 1,
        "requests": len(timings),
    }


Interval = tuple[float, float | None]


def time_ratio(before: Sequence[Timing], after: Sequence[Timing]) -> dict[str, Interval]:
    """Of models timed by turns, how many times as long the second took: the ends of an interval
    that holds the median over requests with at least 95%, for `ttft` and for the median `tpot`.

    By order statistics (Conover, Practical Nonparametric Statistics, 3.2), which ask nothing of how
    times are spread; fewer than 6 requests cannot promise so much, and all is left open: 0 to None.
    """
    pairs = list(zip(before, after, strict=True))
    ratios = {
        "ttft": [b.ttft / a.ttft for a, b in pairs],
        "tpot": [float(np.median(b.tpot) / np.median(a.tpot)) for a, b in pairs],
    }
    return {name: _median_interval(sorted(values)) for name, values in ratios.items()}


def _median_interval(ordered: Sequence[float]) -> Interval:
    """The narrowest pair of order statistics between which the median lies with at least 95%."""
    count, cut, outside = len(ordered), 0, 0.0
    while (outside := outside + 2 * comb(count, cut) / 2**count) <= 0.05:
        cut += 1
    return (ordered[cut - 1], ordered[-cut]) if cut else (0.0, None)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """P50, P95, P99 and mean, in milliseconds."""
    found = {f"p{p}": float(np.percentile(seconds, p)) * 1e3 for p in PERCENTILES}
    return found | {"mean": float(np.mean(seconds)) * 1e3}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
