"""Static and continuous batching on real lengths, as a small discrete simulation.

A clock says what a prefill and a decoding step take; nothing else takes time. Within a batch that
does not change, many steps are taken at once, since the time of a step is linear in its context.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from compress.planning.devices import LINK_BYTES_PER_S
from compress.planning.memory import kv_bytes, request_bytes
from compress.planning.requests import Request, percentiles
from compress.planning.timing import Clock

MOST_AT_ONCE = 256
"""Requests in a batch at most, whatever fits: vLLM's max_num_seqs."""


@dataclass(frozen=True)
class Served:
    """A request with the seconds of its first and its last token."""

    request: Request
    first: float
    last: float


def static(requests: Sequence[Request], clock: Clock, slots: int) -> list[Served]:
    """Batches of up to `slots` in order of arrival; the next starts when the longest has ended.

    Prompts are padded to the longest of the batch.
    """
    served: list[Served] = []
    now, start = 0.0, 0
    while start < len(requests):
        now = max(now, requests[start].at)
        end = start + 1
        while end < len(requests) and end - start < slots and requests[end].at <= now:
            end += 1
        batch = requests[start:end]
        prompt, new = max(r.prompt for r in batch), max(r.new for r in batch)
        first = now + clock.prefill([prompt] * len(batch))
        step = clock.decode(len(batch), len(batch) * (prompt + new / 2))
        served += [Served(r, first, first + step * (r.new - 1)) for r in batch]
        now, start = first + step * (new - 1), end
    return served


def continuous(
    requests: Sequence[Request], clock: Clock, room: float, *, prefills: bool = True
) -> list[Served]:
    """Requests join the batch as soon as they fit into `room` bytes, and leave it when
    they end.

    Who joins is prefilled in one forward, for which all others wait. A cache has room for its whole
    request from the start, so that nobody is put back. prefills: False where another machine does
    them.
    """
    waiting, batch, now = deque(requests), _Batch(clock, room), 0.0
    while waiting or batch.ends:
        joining = []
        while waiting and waiting[0].at <= now and batch.takes(waiting[0]):
            joining.append(waiting.popleft())
            batch.reserve(joining[-1])
        if joining:
            now += clock.prefill([request.prompt for request in joining]) if prefills else 0.0
            batch.join(joining, now)
        elif batch.ends:
            next_one = waiting[0] if waiting and batch.takes(waiting[0]) else None
            now = batch.advance(now, next_one.at if next_one else math.inf)
        else:
            now = max(now, waiting[0].at)
    return batch.served


class _Batch:
    """Who is decoding: `ends` is a heap by the step at which each has its last token."""

    def __init__(self, clock: Clock, room: float) -> None:
        self.clock, self.room = clock, room
        self.ends: list[tuple[int, int, Request, float]] = []
        self.served: list[Served] = []
        self.step = self.context = self.held = 0
        self.reserved = 0.0
        self._order = count()

    def takes(self, request: Request) -> bool:
        """Whether there is room for it; an empty batch takes anyone."""
        fits = self.reserved + self._size(request) <= self.room
        return self.held == 0 or (self.held < MOST_AT_ONCE and fits)

    def reserve(self, request: Request) -> None:
        self.held += 1
        self.reserved += self._size(request)

    def join(self, requests: Sequence[Request], now: float) -> None:
        """They have their first tokens `now`."""
        for request in requests:
            self.context += request.prompt
            entry = (self.step + request.new - 1, next(self._order), request, now)
            heapq.heappush(self.ends, entry)
        self._leave(now)

    def advance(self, now: float, arrival: float) -> float:
        """Decode until somebody ends, or somebody comes at `arrival`; returns the time then."""
        steps = self.ends[0][0] - self.step
        if arrival < math.inf:
            steps = min(steps, max(1, math.ceil((arrival - now) / self._seconds(1))))
        now += steps * self._seconds(steps)
        self.step += steps
        self.context += steps * len(self.ends)
        self._leave(now)
        return now

    def _seconds(self, steps: int) -> float:
        """Of one step, in the mean of the next `steps`."""
        size = len(self.ends)
        return self.clock.decode(size, self.context + size * steps / 2)

    def _leave(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= self.step:
            _, _, request, first = heapq.heappop(self.ends)
            self.served.append(Served(request, first, now))
            self.held -= 1
            self.reserved -= self._size(request)
            self.context -= request.total - 1

    def _size(self, request: Request) -> float:
        return request_bytes(self.clock.shape, self.clock.kv_cache, request.total)


def split(requests: Sequence[Request], clock: Clock, room: float) -> list[Served]:
    """One machine prefills, a prompt at a time, another decodes what it is sent.

    Between them the KV cache goes over a link of LINK_BYTES_PER_S.
    """
    free, origin = 0.0, {}
    for request in requests:
        free = max(free, request.at) + clock.prefill([request.prompt])
        sent = kv_bytes(clock.shape, clock.kv_cache, request.prompt) / LINK_BYTES_PER_S
        handed = replace(request, at=free + sent)  # no two alike: prefills take time
        origin[handed] = request, free
    decoded = continuous(list(origin), clock, room, prefills=False)
    return [Served(*origin[one.request], one.last) for one in decoded]


def two_alike(requests: Sequence[Request], clock: Clock, room: float) -> list[Served]:
    """Two machines that each prefill and decode, the requests by turns: what `split` competes
    with.
    """
    halves = (requests[0::2], requests[1::2])
    return [one for half in halves for one in continuous(half, clock, room)]


def outcome(served: Sequence[Served]) -> dict[str, Any]:
    """Seconds until all are done, new tokens a second, and percentiles over the requests: TTFT from
    arrival, TPOT with its waiting for others' prefills, and the whole.
    """
    begun = min(one.request.at for one in served)
    seconds = max(one.last for one in served) - begun
    paced = [
        (one.last - one.first) / (one.request.new - 1) for one in served if one.request.new > 1
    ]
    return {
        "seconds": seconds,
        "tokens_per_s": sum(one.request.new for one in served) / seconds,
        "ttft_s": percentiles([one.first - one.request.at for one in served]),
        "tpot_s": percentiles(paced or [0.0]),
        "latency_s": percentiles([one.last - one.request.at for one in served]),
    }
