"""What a load came to: percentiles, throughput, and which half of the work bounds it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from compress.report import words
from compress.runtime.latency import percentiles_ms
from compress.runtime.load.drive import Course, Drive
from compress.runtime.load.workload import LoadRequest

BUSY = 0.5
"""Of a peak: what reaches this share of it is bounded by it."""


def latencies(courses: Sequence[Course]) -> dict[str, dict[str, float]]:
    """TTFT, TPOT (of every token after the first) and end to end, in milliseconds."""
    return {
        "ttft_ms": percentiles_ms([course.ttft for course in courses]),
        "tpot_ms": percentiles_ms([gap for course in courses for gap in course.gaps]),
        "whole_ms": percentiles_ms([course.whole for course in courses]),
    }


def lengths(requests: Sequence[LoadRequest]) -> dict[str, Any]:
    """Tokens of the prompts and of the answers."""
    told: dict[str, Any] = {"requests": len(requests)}
    for name, found in (
        ("prompt_tokens", [len(request.prompt) for request in requests]),
        ("new_tokens", [request.new_tokens for request in requests]),
    ):
        p50, p95 = np.percentile(found, [50, 95])
        told[name] = {"total": sum(found), "p50": float(p50), "p95": float(p95), "most": max(found)}
    return told


@dataclass(frozen=True)
class Peaks:
    """What this machine does at best: bf16 products (FLOP/s), and reads of memory (bytes/s)."""

    flops: float
    bytes: float


@torch.inference_mode()
def measure_peaks(device: torch.device, seconds: float = 0.3) -> Peaks:
    """Matrix products of 1024 x 1024 in bf16, and sums over 256 MB; the best of some each.

    On a GPU, which is done with these before the next is launched, of 8192 x 8192 and over 1 GB.
    """
    side, length = (8192, 1 << 28) if device.type == "cuda" else (1024, 1 << 26)
    square = torch.randn((side, side), device=device).to(torch.bfloat16)
    long = torch.ones(length, device=device)

    def best(work: Any) -> float:
        work()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    flops = 2 * side**3 / best(lambda: square @ square)
    return Peaks(flops, long.nbytes / best(long.sum))


def apart(
    model: PreTrainedModel,
    requests: Sequence[LoadRequest],
    prefill: Drive,
    whole: Drive,
    peaks: Peaks,
) -> dict[str, Any]:
    """Prefill and decode apart: seconds, tokens a second, and what share of the peaks they reach.

    prefill: the same prompts answered with one token each. Decode is the rest: what the whole load
    takes beyond, with its forwards. Arithmetic is 2 FLOP for each weight of a linear and token (of
    the head, and token of an answer); memory is the weights once a forward. Attention and the KV
    cache are left out of both.
    """
    linears = {id(m): m for m in model.modules() if hasattr(m, "out_features")}
    head = model.get_output_embeddings()
    inside, at_head = [
        sum(m.in_features * m.out_features for m in linears.values() if (m is head) == is_head)
        for is_head in (False, True)
    ]
    stored = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    prompt_tokens = sum(len(request.prompt) for request in requests)
    new_tokens = sum(request.new_tokens - 1 for request in requests)
    rest_s, rest_forwards = whole.seconds - prefill.seconds, whole.forwards - prefill.forwards
    return {
        name: {
            "seconds": seconds,
            "tokens": tokens,
            "forwards": forwards,
            "tokens_per_s": tokens / seconds,
            "compute_share": 2 * (inside * tokens + at_head * answers) / seconds / peaks.flops,
            "memory_share": stored * forwards / seconds / peaks.bytes,
        }
        for name, tokens, answers, seconds, forwards in (
            ("prefill", prompt_tokens, len(requests), prefill.seconds, prefill.forwards),
            ("decode", new_tokens, new_tokens, max(rest_s, 1e-9), max(rest_forwards, 1)),
        )
    }


def verdict(halves: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Which half takes the time of this load, and what bounds that half: a few words each."""
    seconds = {name: half["seconds"] for name, half in halves.items()}
    name = max(seconds, key=lambda n: seconds[n])
    share = words.percent(seconds[name] / sum(seconds.values()), 0)
    compute, memory = halves[name]["compute_share"], halves[name]["memory_share"]
    if max(compute, memory) < BUSY:
        what = "Neither bounds it: the cost of many small operations does"
    elif compute >= memory:
        what = "Arithmetic bounds it"
    else:
        what = "Reading the weights bounds it"
    return (
        f"{name.capitalize()} takes {share} of this load's time",
        f"It reaches {words.percent(compute, 0)} of the bf16 arithmetic and "
        f"{words.percent(memory, 0)} of the memory bandwidth that were measured here. {what}.",
    )
