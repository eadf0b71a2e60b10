"""A load put on a checkpoint in each way, and what came out."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from transformers import PreTrainedModel

from compress.log import logger
from compress.machine import hardware, packages
from compress.model_path import home
from compress.report import words
from compress.runtime.attention import in_words
from compress.runtime.load import figures
from compress.runtime.load.drive import Drive, continuous, static
from compress.runtime.load.options import Options
from compress.runtime.load.workload import LoadRequest, arrivals, requests
from compress.runtime.loader import load_with_tokenizer
from compress.runtime.server.engine import context_of

ROOM = 0.7
"""Of the throughput that continuous batching reaches: the rate of arrivals unless one is given."""


def prepared(settings: Options) -> tuple[PreTrainedModel, list[LoadRequest]]:
    """The checkpoint, loaded, and the requests of the workload; tells how many had to be cut."""
    limits = settings.limits()
    model, tokenizer = load_with_tokenizer(
        home(settings.checkpoint),
        device=settings.device,
        backend=settings.backend,
        trust_remote_code=settings.trust_remote_code,
    )
    context = context_of(model, limits)
    asked = requests(settings.workload, settings.requests, tokenizer, context, settings.seed)
    if cut := sum(request.cut for request in asked):
        logger.info(f"{cut} of {len(asked)} requests are cut to the context of {context} tokens")
    return model, asked


def measured(
    settings: Options, model: PreTrainedModel, asked: Sequence[LoadRequest]
) -> dict[str, Any]:
    """Put the load on the model in each way, and return the figures."""
    limits = settings.limits()
    tokens = sum(request.new_tokens for request in asked)

    statics, drives = [], []
    for turn in range(settings.rounds):
        logger.info(f"static and continuous batching, {turn + 1} of {settings.rounds}")
        statics.append(static(model, asked, limits.running))
        drives.append(continuous(model, asked, limits))
    static_s, static_cpu_s = map(statistics.median, zip(*statics, strict=True))
    continuous_s = statistics.median(drive.seconds for drive in drives)
    continuous_cpu_s = statistics.median(drive.cpu_seconds for drive in drives)
    rate = settings.rate or ROOM * len(asked) / continuous_s
    logger.info(f"as requests arrive, {words.significant(rate)} a second")
    opened = continuous(model, asked, limits, arrivals(len(asked), rate, settings.seed))
    logger.info("prefill alone")
    first_tokens = [LoadRequest(request.prompt, 1) for request in asked]
    prefill = continuous(model, first_tokens, limits)
    halves = figures.apart(model, asked, prefill, drives[-1], figures.measure_peaks(model.device))
    return {
        "checkpoint": settings.checkpoint,
        "workload": settings.workload,
        "verdict": dict(zip(("headline", "reason"), figures.verdict(halves), strict=True)),
        "lengths": figures.lengths(asked),
        "cut": sum(request.cut for request in asked),
        "batching": {
            "static": {"seconds": static_s, "tokens_per_s": tokens / static_s},
            "continuous": {
                "seconds": continuous_s,
                "tokens_per_s": tokens / continuous_s,
                "kv_tokens_most": drives[-1].kv_tokens_most,
            },
            "ratio": static_s / continuous_s,
            "cpu_ratio": static_cpu_s / continuous_cpu_s,
            "rounds": [
                {
                    "static_s": seconds,
                    "static_cpu_s": cpu_seconds,
                    "continuous_s": drive.seconds,
                    "continuous_cpu_s": drive.cpu_seconds,
                }
                for (seconds, cpu_seconds), drive in zip(statics, drives, strict=True)
            ],
        },
        "open_loop": {"rate": rate} | _open_loop(opened, tokens),
        "halves": halves,
        "attention": in_words(model),
        "limits": asdict(limits),
        "seed": settings.seed,
        "rounds": settings.rounds,
        "hardware": hardware(),
        "packages": packages(),
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _open_loop(drive: Drive, tokens: int) -> dict[str, Any]:
    return {
        "seconds": drive.seconds,
        "tokens_per_s": tokens / drive.seconds,
        "kv_tokens_most": drive.kv_tokens_most,
        **figures.latencies(drive.courses),
        "requests": [
            {"arrival_s": course.arrival, "ttft_s": course.ttft, "whole_s": course.whole}
            for course in drive.courses
        ],
        "moments": [asdict(moment) for moment in drive.moments],
    }
