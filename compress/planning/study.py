"""All figures of a plan, as plain data: what plan.json holds and the page is drawn from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.errors import UserError
from compress.planning import lengths, simulate
from compress.planning.context import long_context, within
from compress.planning.devices import CPU, Device
from compress.planning.memory import (
    OVERHEAD,
    Weights,
    all_schemes,
    cache_room,
    kv_sliding,
    largest_batch,
    largest_length,
    needed,
)
from compress.planning.requests import Request
from compress.planning.shape import Shape
from compress.planning.timing import Clock

BATCHES = (1, 8, 32)
SIMULATED = 5000
"""Requests that batching is simulated on at most, the first to come: seconds."""


@dataclass(frozen=True)
class Question:
    """What is to be planned for.

    memory: bytes of the device. beams: of a beam search that is weighed. window: tokens that the
    model is served with; requests over it are planned for as cut to it. engine: which linears may
    be quantized, as in the recipes. student: the model with half of its blocks, for the figure on
    distillation. scheme: of the weights beside which caches and batches are planned; None: the
    mildest that fits.
    """

    shape: Shape
    student: Shape
    device: Device
    memory: int
    requests: Sequence[Request]
    window: int
    beams: int = 4
    engine: str = "any"
    scheme: str | None = None

    @property
    def process(self) -> int:
        """Bytes of the device's memory that the serving process takes without a model; those of
        this machine's CPU are measured.
        """
        if self.device.name != CPU:
            return 0
        from compress.planning import probe  # here, since no plan for a GPU needs torch

        return probe.serving_process()

    @property
    def left(self) -> int:
        """Bytes of the device's memory that are left by it."""
        return self.memory - self.process

    @property
    def simulated(self) -> Sequence[Request]:
        """The requests that batching is simulated on."""
        return self.requests[:SIMULATED]


def study(question: Question) -> dict[str, Any]:
    """The plan. Raises UserError where not even the smallest scheme leaves room for a request."""
    shape, memory, asked = question.shape, question.left, question.requests
    question = replace(question, requests=within(asked, question.window))
    schemes, refused = all_schemes(shape, question.engine, on_cpu=question.device.name == CPU)
    longest = max(request.total for request in question.requests)
    mean = lengths.summarized(question.requests)["total"]["mean"]
    rows = [_scheme(question, weights, longest, mean) for weights in schemes]
    fitting = [w for w, row in zip(schemes, rows, strict=True) if row["fits"]]
    if not fitting:
        smallest = min(schemes, key=lambda weights: weights.total)
        raise UserError(f"{_too_little(question, smallest)}, shorter requests, or a smaller model")
    base = _base(question, schemes, fitting, refused)
    clock = Clock(shape, base, question.device)
    room = cache_room(shape, base, memory, longest)
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "blocks": shape.blocks,
        "positions": shape.positions,
        "device": {"name": question.device.name, "source": question.device.source},
        "memory": question.memory,
        "overhead": question.process + OVERHEAD * memory,
        "engine": question.engine,
        "kv_cache": dict(shape.kv_per_token),
        "kv_sliding": kv_sliding(shape),
        "schemes": rows,
        "refused": refused,
        "base": base.scheme,
        "requests": lengths.summarized(asked),
        "longest": longest,
        "reservations": lengths.reservations(question.requests, clock, memory),
        "decoding": lengths.decoding(question.requests, clock, room, question.beams),
        "batching": _batching(question, clock, room, longest),
        "long_context": long_context(asked, clock, question.window, memory),
        "student": _student(question, base, longest),
    }


def _base(
    question: Question,
    schemes: Sequence[Weights],
    fitting: Sequence[Weights],
    refused: Mapping[str, str],
) -> Weights:
    """The weights that are planned for. Raises UserError for a scheme that they cannot be in."""
    asked = question.scheme
    if asked is None:
        return fitting[0]
    names = ", ".join(weights.scheme for weights in fitting)
    found = next((weights for weights in schemes if weights.scheme.lower() == asked.lower()), None)
    if found is None:
        reasons = {scheme.lower(): reason for scheme, reason in refused.items()}
        why = reasons.get(asked.lower(), "no such scheme")
        raise UserError(f"scheme={asked}: {why}; wanted one of {names}")
    if found not in fitting:
        raise UserError(f"{_too_little(question, found)}, or one of {names}")
    return found


def _too_little(question: Question, weights: Weights) -> str:
    """Words for memory that one request does not fit into beside the weights."""
    longest = max(request.total for request in question.requests)
    taken = sum(needed(question.shape, weights, "16", 1, longest).values()) / (1 - OVERHEAD)
    wanted = math.ceil((taken + question.process) / 1e5) / 10
    return (
        f"memory={question.memory / 1e6:g}MB: one request of {longest} tokens takes {wanted:.1f}MB "
        f"with {weights.scheme}; wanted memory={wanted:.1f}MB or more"
    )


def _scheme(question: Question, weights: Weights, longest: int, mean: float) -> dict[str, Any]:
    """One scheme: its bytes, what fits beside it, and its times."""
    shape, memory = question.shape, question.left
    clock = Clock(shape, weights, question.device)
    parts = needed(shape, weights, "16", 1, longest)
    prompt = round(lengths.summarized(question.requests)["prompt"]["mean"])
    room = cache_room(shape, weights, memory, longest)
    fits = largest_batch(shape, weights, "16", longest, memory) > 0
    served = simulate.continuous(question.simulated, clock, room) if fits else []
    return {
        "scheme": weights.scheme,
        "bytes": {part: size for part, size in weights.parts.items() if size},
        "weights": weights.total,
        "bits_per_weight": 8 * weights.total / shape.parameters,
        "one_request": parts,
        "fits": fits,
        "largest_batch": {
            kind: largest_batch(shape, weights, kind, longest, memory)
            for kind in shape.kv_per_token
        },
        "largest_length": {
            kind: largest_length(shape, weights, kind, 1, memory) for kind in shape.kv_per_token
        },
        "frontier": [
            {"tokens": tokens, "batch": largest_batch(shape, weights, "16", tokens, memory)}
            for tokens in _ladder(shape.positions)
        ],
        "ttft_s": clock.prefill([prompt]),
        "tpot_s": {str(batch): clock.decode(batch, batch * mean) for batch in BATCHES},
        "continuous": simulate.outcome(served) if served else None,
    }


def _ladder(longest: int) -> list[int]:
    """Powers of two from 256 tokens to the model's window."""
    rungs = [256]
    while rungs[-1] * 2 <= longest:
        rungs.append(rungs[-1] * 2)
    return rungs


def _batching(question: Question, clock: Clock, room: float, longest: int) -> dict[str, Any]:
    """One machine with static and with continuous batching; two, alike and split."""
    requests = question.simulated
    slots = largest_batch(clock.shape, clock.weights, "16", longest, question.left)
    slots = min(max(1, slots), simulate.MOST_AT_ONCE)
    ways = {
        "static": simulate.static(requests, clock, slots),
        "continuous": simulate.continuous(requests, clock, room),
        "two alike": simulate.two_alike(requests, clock, room),
        "split": simulate.split(requests, clock, room),
    }
    simulated = {"slots": slots, "requests": len(requests)}
    return {**simulated, **{way: simulate.outcome(served) for way, served in ways.items()}}


def _student(question: Question, base: Weights, longest: int) -> dict[str, Any]:
    """A student with half of the blocks, in 16 bit and in the smallest of its schemes."""
    student = question.student
    schemes, _ = all_schemes(student, question.engine, on_cpu=question.device.name == CPU)
    smallest = min(schemes, key=lambda weights: weights.total)
    return {
        "blocks": student.blocks,
        "parameters": student.parameters,
        "rows": [
            {
                "scheme": weights.scheme,
                "weights": weights.total,
                "tpot_s": Clock(student, weights, question.device).decode(1, longest),
                "largest_batch": largest_batch(student, weights, "16", longest, question.left),
            }
            for weights in (schemes[0], smallest)
        ],
    }
