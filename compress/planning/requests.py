"""The lengths of real requests, from a JSONL file: a line each, in tokens.

{"prompt": 812, "new": 95}
{"prompt": 240, "new": 310, "at": 1.7}
"""

import codecs
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.errors import UserError
from compress.given import once
from compress.model_path import home

UNIFORM = re.compile(r"(\d+)x(\d+)")
UNIFORM_COUNT = 64
PERCENTILES = (50, 80, 95, 99)
MOST = 10_000_000
"""Tokens of a prompt or an answer: what a plan goes through part by part takes seconds."""
LATEST = 10_000_000_000
"""Seconds of an arrival: a clock of Unix is below it, and told from one in milliseconds; beyond,
the step of a decoder is no longer told in float64.
"""


@dataclass(frozen=True)
class Request:
    """prompt, new: tokens that come in and go out, at least 1. at: seconds from the start."""

    prompt: int
    new: int
    at: float = 0.0

    @property
    def total(self) -> int:
        return self.prompt + self.new


def read_requests(source: str, rate: float | None = None, seed: int = 0) -> list[Request]:
    """The requests of a file, or of PROMPTxNEW such as 512x128 (64 of them), in order of arrival.

    rate: requests a second that come in at random times (a Poisson process) where the file has no
    `at`; None: all are there at the start. Raises UserError with the line for what is no request,
    and for times that some lines alone have, or that are given beside a rate.
    """
    uniform = UNIFORM.fullmatch(source)
    if uniform:
        lengths = {"prompt": int(uniform[1]), "new": int(uniform[2])}
        lines = [(source, lengths)] * UNIFORM_COUNT
    else:
        lines = _lines(source)
    requests = [_request(where, fields) for where, fields in lines]
    timed_lines = ["at" in fields for _, fields in lines]
    if any(timed_lines) and not all(timed_lines):
        bare, _ = lines[timed_lines.index(False)]
        raise UserError(f'{bare}: no "at", which other lines have; wanted it in all, or in none')
    if rate is not None and any(timed_lines):
        raise UserError(
            f'rate={rate:g}, but the lines of {source} have "at"; wanted one of the two'
        )
    if rate is not None:
        draw, now = random.Random(seed), 0.0
        timed = []
        for request in requests:
            timed.append(Request(request.prompt, request.new, now))
            now += draw.expovariate(rate)
        requests = timed
    return sorted(requests, key=lambda request: request.at)


def _lines(source: str) -> list[tuple[str, Any]]:
    file = home(source)
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no path
        why: dict[type, str] = {FileNotFoundError: "no such file", IsADirectoryError: "a folder"}
        raise UserError(
            f"requests={source}: {why.get(type(error), error)}; wanted a JSONL of lines such as "
            '{"prompt": 812, "new": 95}, or PROMPTxNEW such as 512x128'
        ) from error
    found = []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        try:
            if text := line.decode("utf-8").strip():
                found.append((f"{source}:{number}", json.loads(text, object_pairs_hook=once)))
        except UnicodeDecodeError as error:
            raise UserError(f"{source}:{number}: not UTF-8 ({error})") from error
        except ValueError as error:
            raise UserError(f"{source}:{number}: not JSON ({error})") from error
        except RecursionError as error:
            raise UserError(f"{source}:{number}: JSON nested too deep") from error
    if not found:
        raise UserError(f"requests={source}: empty; wanted a request a line")
    return found


def _request(where: str, fields: Any) -> Request:
    if not isinstance(fields, Mapping):
        raise UserError(f'{where}: found {fields!r}; wanted {{"prompt": tokens, "new": tokens}}')
    counts = []
    for name in ("prompt", "new"):
        value = fields.get(f"{name}_tokens", fields.get(name))
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise UserError(f'{where}: "{name}" is {value!r}; wanted tokens, 1 to {MOST:,}')
        counts.append(value)
    at = fields.get("at", 0)
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at <= LATEST:
        raise UserError(
            f'{where}: "at" is {at!r}; wanted seconds, 0 to {LATEST:,}, not milliseconds or less'
        )
    prompt, new = counts
    return Request(prompt, new, float(at))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By name: p50, p80, p95, p99, max, and the mean. A percentile is the least of the values that
    so many of a hundred are not above.
    """
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": float(max(values)), "mean": float(np.mean(values))}
