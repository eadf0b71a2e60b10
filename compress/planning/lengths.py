"""What the lengths of real requests say of reservations and decoding settings."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from compress.planning.memory import cache_room, kv_bytes, request_bytes
from compress.planning.requests import Request, percentiles
from compress.planning.simulate import MOST_AT_ONCE
from compress.planning.timing import Clock

PAGE = 16
"""Tokens of a block of a paged KV cache: vLLM's default."""


def summarized(requests: Sequence[Request]) -> dict[str, Any]:
    """How many, and the percentiles of prompts, answers and both together."""
    return {
        "count": len(requests),
        "prompt": percentiles([r.prompt for r in requests]),
        "new": percentiles([r.new for r in requests]),
        "total": percentiles([r.total for r in requests]),
        "seconds": requests[-1].at - requests[0].at,
    }


def reservations(requests: Sequence[Request], clock: Clock, memory: int) -> list[dict[str, Any]]:
    """How many requests fit at once into `memory` bytes where each KV cache is allocated by a rule.

    window: the model's whole window. max: the longest request. p80: the 80th percentile, and the
    longest for those above it. paged: what a request has, in blocks of PAGE tokens.
    """
    totals = [r.total for r in requests]
    longest, p80 = max(totals), int(percentiles(totals)["p80"])
    window = max(clock.shape.positions, longest)
    rules = {
        "window": [window],
        "max": [longest],
        "p80": [p80 if total <= p80 else longest for total in totals],
        "paged": [PAGE * math.ceil(total / PAGE) for total in totals],
    }
    found = []
    for rule, lengths in rules.items():
        sizes = [kv_bytes(clock.shape, clock.kv_cache, tokens) for tokens in lengths]
        prefilled = window if rule == "window" else longest
        room = cache_room(clock.shape, clock.weights, memory, prefilled)
        each = fmean(request_bytes(clock.shape, clock.kv_cache, tokens) for tokens in lengths)
        at_once = max(0, int(room / each))
        found.append({"rule": rule, "bytes": fmean(sizes), "requests": at_once, "p80": p80})
    return found


def decoding(requests: Sequence[Request], clock: Clock, room: float, beams: int) -> dict[str, Any]:
    """What beam search, a cap on new tokens and stopping early cost or save.

    Beams share the prompt's cache, as in engines; every step decodes all of them. Without stopping
    at the end token every answer runs to the longest of all.
    """
    new, prompt = [r.new for r in requests], fmean(r.prompt for r in requests)
    mean, longest, cap = fmean(new), max(new), int(percentiles(new)["p95"])

    def size(answer: float, copies: int) -> float:
        """Bytes of a mean request with so many copies of its answer."""
        whole, own = (
            request_bytes(clock.shape, clock.kv_cache, tokens)
            for tokens in (prompt + answer, answer)
        )
        return whole + (copies - 1) * own

    one, many = (max(1, min(MOST_AT_ONCE, int(room / size(mean, copies)))) for copies in (1, beams))
    context = prompt + mean / 2
    alone, in_beams = (
        clock.decode(batch * copies, batch * copies * context)
        for batch, copies in ((one, 1), (many, beams))
    )
    return {
        "beams": beams,
        "most_at_once": MOST_AT_ONCE,
        "beam_requests": {"1": one, str(beams): many},
        "beam_tokens_per_s": {"1": one / alone, str(beams): many / in_beams},
        "cap": cap,
        "cut_share": sum(n > cap for n in new) / len(new),
        "cap_reserves": size(cap, 1) / size(longest, 1),
        "cap_saves_tokens": 1 - sum(min(n, cap) for n in new) / sum(new),
        "without_stop": longest / mean,
    }
