"""Put a load on a model: by continuous batching as requests come, or in static batches.

Every request gets exactly the tokens that it asks for, so both ways do the same work.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from compress.runtime.load.workload import LoadRequest
from compress.runtime.server.engine import Engine
from compress.runtime.server.limits import Limits

SAMPLE_SECONDS = 0.05


@dataclass
class Course:
    """One request, in seconds from the start of the load: when it came, and each of its tokens."""

    arrival: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token, waiting included."""
        return self.tokens[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Time of each token after the first."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def whole(self) -> float:
        """From the arrival to the last token."""
        return self.tokens[-1] - self.arrival


@dataclass(frozen=True)
class Moment:
    """What was to do at a second of the load."""

    second: float
    running: int
    waiting: int
    kv_tokens: int


@dataclass(frozen=True)
class Drive:
    """How a load went. cpu_seconds: of all threads of this process, which other work on the machine
    hardly changes. kv_tokens_most: the most tokens that lay in the KV cache, in whole pages.
    """

    seconds: float
    cpu_seconds: float
    forwards: int
    kv_tokens_most: int
    courses: list[Course]
    moments: list[Moment]


def continuous(
    model: PreTrainedModel,
    requests: Sequence[LoadRequest],
    limits: Limits,
    arrivals: Sequence[float] | None = None,
) -> Drive:
    """Serve `requests` as they arrive, whatever is still running; None: all at once."""
    return asyncio.run(_continuous(model, requests, limits, arrivals or [0.0] * len(requests)))


async def _continuous(
    model: PreTrainedModel,
    requests: Sequence[LoadRequest],
    limits: Limits,
    arrivals: Sequence[float],
) -> Drive:
    engine = Engine(model, [], limits)
    await engine.start()
    forwards, start, cpu_start = engine.forwards, time.perf_counter(), time.process_time()
    courses = [Course(arrival) for arrival in arrivals]
    moments: list[Moment] = []

    def now() -> float:
        return time.perf_counter() - start

    async def serve(request: LoadRequest, course: Course) -> None:
        await asyncio.sleep(course.arrival - now())
        async for tokens in engine.tokens(request.prompt, request.new_tokens):
            course.tokens += [now()] * len(tokens)

    async def watch() -> None:
        while True:
            load = engine.load()
            moments.append(Moment(now(), load.running, load.waiting, load.kv_tokens))
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*map(serve, requests, courses))
    finally:
        seconds, cpu_seconds = now(), time.process_time() - cpu_start
        watching.cancel()
        await engine.stop()
    made = engine.forwards - forwards
    return Drive(seconds, cpu_seconds, made, engine.kv_tokens_most, courses, moments)


@torch.inference_mode()
def static(
    model: PreTrainedModel, requests: Sequence[LoadRequest], size: int
) -> tuple[float, float]:
    """Seconds and CPU seconds for `requests` in batches of `size`, in their order, by `generate`.

    A batch is padded to its longest prompt, and ends with its longest answer.
    """
    # An end token that is never drawn: for None, `generate` takes the checkpoint's, and ends there.
    none = model.get_input_embeddings().num_embeddings
    start, cpu_start = time.perf_counter(), time.process_time()
    for first in range(0, len(requests), size):
        batch = requests[first : first + size]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        new_tokens = max(request.new_tokens for request in batch)
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=GenerationConfig(
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=new_tokens,
                eos_token_id=none,
                pad_token_id=0,
            ),
        )
    return time.perf_counter() - start, time.process_time() - cpu_start
