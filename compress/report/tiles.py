"""The few figures that stand large at the head of the page, in words."""

from collections.abc import Iterator, Mapping
from typing import Any

from compress.report.words import (
    comparison,
    milliseconds,
    percent,
    rate,
    significant,
    size,
    timed,
)

Figures = Mapping[str, Any]


def tiles(figures: Figures) -> list[dict[str, Any]]:
    """`name`, `value` and `notes` of each, from the figures of report.json."""
    return [
        {"name": name, "value": value, "notes": list(notes)}
        for tiles_of in (_weights, _speed, _closeness)
        for name, value, *notes in tiles_of(figures)
    ]


def _weights(figures: Figures) -> Iterator[tuple[str, ...]]:
    sizes = figures["bytes"]
    if sizes["before"] and sizes["after"]:
        bits = f"{significant(figures['bits_per_weight'])} bits a weight"
        yield "Weights", size(sizes["after"]), f"from {size(sizes['before'])}", bits


def _speed(figures: Figures) -> Iterator[tuple[str, ...]]:
    if not figures["latency"]:
        return
    before, after = (figures["latency"][when] for when in ("before", "after"))
    decode = before["decode_tokens_per_s"], after["decode_tokens_per_s"]
    first = before["ttft_ms"]["p50"], after["ttft_ms"]["p50"]
    faster = comparison(*decode, "faster", "slower", timed(figures["latency"], "tpot"))
    yield "Decode", rate(decode[1]), f"from {rate(decode[0])}", faster
    sooner = comparison(*first, "slower", "faster", timed(figures["latency"], "ttft"))
    yield "First token, median", milliseconds(first[1]), f"from {milliseconds(first[0])}", sooner


def _closeness(figures: Figures) -> Iterator[tuple[str, ...]]:
    close = figures["fidelity"]
    if not close:
        return
    same = f"{percent(close['top1'])} same next token"
    yield "KL to the original", significant(close["kl"]), "nats a token", same
    before, after = (significant(close["ppl"][when], 4) for when in ("before", "after"))
    yield "Perplexity", after, f"from {before}", "on held-out text"
