"""Is a longer context needed at all? What the lengths of real requests say of each way out.

A request is over the window where its prompt and its answer together are. It can be served through
a longer window, by a prompt cut from its start, or from summaries of its parts (hierarchical
merging, Chang et al., BooookScore, 2024; here in two stages).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from compress.planning.memory import cache_room, kv_bytes, logit_bytes
from compress.planning.requests import Request
from compress.planning.timing import Clock

SUMMARY = 256
"""Tokens of a summary of one part of a long text."""
LITTLE = 0.05
"""Share of the long prompts' tokens below which truncation is said to cut little."""
RARE = 0.01
"""Share of the requests below which a window is not extended: that changes the model for all."""


def long_context(
    requests: Sequence[Request], clock: Clock, window: int, memory: int
) -> dict[str, Any]:
    """How many requests are over `window`, and what each way of serving these costs.

    memory: bytes of the device. `windows`: a row for the window, twice, four times it and so on,
    until none is over; on the way the model's own window, which takes no training. `factor`: by
    which the last of them extends the model's own, 1 where that holds it. `ways`: for each of the
    requests that are over, alone on the device, in the mean: `bytes` of KV cache, `at_once`: how
    many such fit beside the weights, `ttft_s` until the answer begins, `seconds` until it ends,
    `tokens` read and written. `dropped`: share of their prompts' tokens that truncation cuts.
    `choice`: none, truncate, summaries, extend, or window where the model has the longer one.
    """
    over = [r for r in requests if r.total > window]
    longest, positions = max(r.total for r in requests), clock.shape.positions
    found: dict[str, Any] = {
        "window": window,
        "longest": longest,
        "over": len(over),
        "share": len(over) / len(requests),
        "windows": [
            _window(requests, clock, w, memory) for w in _windows(window, longest, positions)
        ],
        "choice": "none",
    }
    if not over:
        return found
    turns = {
        "truncate": [[request] for request in within(over, window)],
        "summaries": [_in_parts(request, window) for request in over],
        "extend": [[request] for request in over],
    }
    found |= {
        "factor": math.ceil(found["windows"][-1]["tokens"] / positions),
        "dropped": _cut(over, window) / sum(request.prompt for request in over),
        "parts": fmean(len(of_one) - 1 for of_one in turns["summaries"]),
        "ways": {way: _cost(of_all, clock, memory) for way, of_all in turns.items()},
    }
    return {**found, "choice": _choice(found)}


def _windows(window: int, longest: int, positions: int) -> list[int]:
    """The window, and its doubles up to the first that holds the longest request; none passes over
    the model's own window of so many positions.
    """
    windows = [window]
    while windows[-1] < longest:
        last = windows[-1]
        windows.append(min(2 * last, positions) if last < positions else 2 * last)
    return windows


def _window(requests: Sequence[Request], clock: Clock, tokens: int, memory: int) -> dict[str, Any]:
    """What a window of so many tokens leaves out, and what requests that fill it take."""
    size = kv_bytes(clock.shape, clock.kv_cache, tokens)
    return {
        "tokens": tokens,
        "over": sum(r.total > tokens for r in requests) / len(requests),
        "cut": _cut(requests, tokens) / sum(r.prompt for r in requests),
        "bytes": size,
        "at_once": _at_once(size, tokens, clock, memory),
    }


def _at_once(size: float, longest: int, clock: Clock, memory: int) -> int:
    room = cache_room(clock.shape, clock.weights, memory, longest)
    return max(0, int(room / (size + logit_bytes(clock.shape))))


def _cost(turns: Sequence[Sequence[Request]], clock: Clock, memory: int) -> dict[str, Any]:
    """In the mean over requests, of which each is served in some turns, one after the other."""
    sizes = [max(kv_bytes(clock.shape, clock.kv_cache, t.total) for t in one) for one in turns]
    longest = max(turn.total for one in turns for turn in one)
    before = [sum(_alone(clock, turn) for turn in one[:-1]) for one in turns]
    first = [b + clock.prefill([one[-1].prompt]) for b, one in zip(before, turns, strict=True)]
    whole = [b + _alone(clock, one[-1]) for b, one in zip(before, turns, strict=True)]
    return {
        "bytes": fmean(sizes),
        "at_once": _at_once(fmean(sizes), longest, clock, memory),
        "ttft_s": fmean(first),
        "seconds": fmean(whole),
        "tokens": fmean(sum(turn.total for turn in one) for one in turns),
    }


def _choice(found: dict[str, Any]) -> str:
    """The way that is advised, for requests of which some are over the window."""
    extended, summarized = found["ways"]["extend"], found["ways"]["summaries"]
    sooner = extended["ttft_s"] <= summarized["ttft_s"]
    if found["factor"] == 1 and extended["at_once"] >= 1 and sooner:
        return "window"
    if found["dropped"] <= LITTLE:
        return "truncate"
    if found["share"] <= RARE or extended["at_once"] < 1:
        return "summaries"
    return "extend" if sooner else "summaries"


def within(requests: Sequence[Request], window: int) -> list[Request]:
    """The requests as a model with this window can serve them: prompts cut, and long answers."""
    return [
        r
        if r.total <= window
        else replace(r, prompt=_kept(r, window), new=min(r.new, max(1, window - 1)))
        for r in requests
    ]


def _cut(requests: Sequence[Request], window: int) -> int:
    """Tokens that truncation to `window` takes from the prompts."""
    return sum(request.prompt - _kept(request, window) for request in requests)


def _kept(request: Request, window: int) -> int:
    """Tokens of the prompt that leave room for the answer."""
    return min(request.prompt, max(1, window - request.new))


def _in_parts(request: Request, window: int) -> list[Request]:
    """The requests that a long one becomes: parts that are summarized, then the answer from these.

    In a small window half of it is for the summary.
    """
    summary = max(1, min(SUMMARY, window // 2))
    part = max(1, window - summary)
    starts = range(0, request.prompt, part)
    parts = [Request(min(part, request.prompt - start), summary) for start in starts]
    (cut,) = within([request], window)
    return [*parts, replace(cut, prompt=min(cut.prompt, summary * len(parts)))]


def _alone(clock: Clock, request: Request) -> float:
    """Seconds of a request that has the device for itself."""
    step = clock.decode(1, request.prompt + request.new / 2)
    return clock.prefill([request.prompt]) + (request.new - 1) * step
