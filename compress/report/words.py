"""Numbers as people read them: units, sensible digits, real minus signs, no line break inside."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import floor, inf, isfinite, log10
from typing import Any

SPACE = "\u00a0"
MINUS = "\u2212"
NOTHING = "\u2013"
COMMA = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))")
"""One that parts words, not thousands."""

BUSY = 2.0
"""A machine with slower slow steps (`busy`) did something else meanwhile."""

Number = float | int | None


def significant(value: Number, digits: int = 3) -> str:
    """`digits` significant digits, thousands apart, never an exponent: 0.0123, 29.2, 1,540."""
    if value is None or not isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - floor(log10(abs(value))))
    # Rounding can add a digit (9.996 is 10.0 in three), which costs a decimal.
    rounded = round(value, decimals)
    if rounded:
        decimals = max(0, digits - 1 - floor(log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}".replace("-", MINUS)


def p_value(p: float) -> str:
    """`p 0.031`, `p < 0.0001`."""
    return f"p {significant(p, 2)}" if p >= 1e-4 else "p < 0.0001"


def plain(value: float) -> str:
    """A round number as on an axis: 0.005, 2.5, 10,000."""
    return f"{value:,.10f}".rstrip("0").rstrip(".").replace("-", MINUS)


def part(name: str) -> str:
    """A part of the model as people write it: `MLP`, `LM head`."""
    return {"mlp": "MLP", "lm_head": "LM head"}.get(name, name)


def kv_cache(kind: str) -> str:
    """How a KV cache is kept: `V in 8 bit` for v8."""
    return {"16": "K and V in 16 bit", "v8": "V in 8 bit", "kv8": "K and V in 8 bit"}[kind]


def count(value: Number) -> str:
    """A whole number, thousands apart: 49,152."""
    return NOTHING if value is None else f"{round(value):,}".replace("-", MINUS)


def many(value: Number) -> str:
    """A large count in words of magnitude: 135 M, 7.62 B."""
    return NOTHING if value is None else _scaled(value, ((1e9, "B"), (1e6, "M"), (1e3, "k")), "")


def size(value: Number) -> str:
    """Bytes in powers of ten: 269 MB, 1.23 GB."""
    if value is None:
        return NOTHING
    return _scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "B")


def said_size(value: float) -> str:
    """`size` for a console or a log: its blank is one as any."""
    return size(value).replace(SPACE, " ")


def _scaled(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for factor, unit in units:
        # 999,700 kB would round to 1,000 kB: from 999.5 of a unit on, the next one is used.
        if abs(value) >= 0.9995 * factor:
            return f"{significant(value / factor)}{SPACE}{unit}"
    return f"{count(value)}{SPACE}{smallest}".rstrip(SPACE)


def seconds(value: Number) -> str:
    """A duration: 340 ms, 12.3 s, 4 min 12 s, 1 h 04 min."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return milliseconds(value * 1000)
    if value < 59.95:
        return f"{significant(value)}{SPACE}s"
    if value < 3599.5:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes}{SPACE}min{SPACE}{rest:02d}{SPACE}s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours}{SPACE}h{SPACE}{minutes:02d}{SPACE}min"


def milliseconds(value: Number) -> str:
    """A latency: 20.3 ms."""
    return NOTHING if value is None else f"{significant(value)}{SPACE}ms"


def rate(value: Number) -> str:
    """Tokens a second: 50.2 tok/s."""
    return NOTHING if value is None else f"{significant(value)}{SPACE}tok/s"


def times(value: Number) -> str:
    """A ratio: 1.31×."""
    return NOTHING if value is None else f"{significant(value)}×"


def percent(value: Number, decimals: int = 1) -> str:
    """A share of one: 0.943 is 94.3%."""
    return NOTHING if value is None else f"{100 * value:.{decimals}f}%".replace("-", MINUS)


def signed(value: Number, decimals: int = 1) -> str:
    """A difference with its sign: +1.2, −3.4, 0.0."""
    if value is None:
        return NOTHING
    text = f"{value:+.{decimals}f}".replace("-", MINUS)
    return text[1:] if not float(f"{value:.{decimals}f}") else text


def points(value: Number, decimals: int = 1) -> str:
    """A difference of scores: as `signed`, or in one significant digit where that says zero."""
    if value is None or round(value, decimals) or abs(value) < 1e-9:
        return signed(value, decimals)
    return ("+" if value > 0 else "") + significant(value, 1)


def paired(difference: float, ends: Sequence[float]) -> tuple[str, str]:
    """A difference of scores, and the ends of its interval: `+0.0006`, `+0.0001 to +0.0012`.

    All have as many decimals as give two digits of how far the ends are apart, and one at least.
    """
    low, high = ends
    apart = next((size for size in (high - low, abs(difference)) if size > 1e-9), 1.0)
    decimals = max(1, 1 - floor(log10(apart)))
    return points(difference, decimals), f"{points(low, decimals)} to {points(high, decimals)}"


def several(number: int, thing: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def busy(latency: Mapping[str, Any]) -> float:
    """How many times the median the slow steps took (P95 of TPOT): 1.25 to 1.45 in runs of
    recipe=smollm2_int8 (two threads) and smollm2_int4 (one) on a Xeon.
    """
    steps = [latency[when]["tpot_ms"] for when in ("before", "after") if latency.get(when)]
    return max((step["p95"] / step["p50"] for step in steps if step["p50"]), default=1.0)


def timed(latency: Mapping[str, Any], what: str | None) -> tuple[float, float] | None:
    """The interval of the ratio of times, where both models were timed by turns
    (compress/runtime/latency.py); what: `ttft`, `tpot`, or None for what is no time. Of a machine
    that was busy nothing is known: what its requests agree on, those of a repeat did not.
    """
    intervals = latency.get("time_ratio")
    if not intervals or what is None:
        return None
    if busy(latency) > BUSY:
        return 0.0, inf
    low, high = intervals[what]
    return low, inf if high is None else high


def comparison(
    before: Number, after: Number, more: str, less: str, interval: Sequence[float] | None = None
) -> str:
    """How `after` stands to `before`: `1.80× faster`, `1.25× slower`, `unchanged within 2%`; where
    an `interval` of the ratio is known and holds 1, `not measurably changed`.

    `more` is the word where after is larger.
    """
    if not before or not after:
        return "not comparable"
    if interval is not None and interval[0] <= 1 <= interval[1]:
        return "not measurably changed"
    ratio = after / before
    if 0.98 < ratio < 1.02:
        return "unchanged within 2%"
    word, factor = (more, ratio) if ratio > 1 else (less, 1 / ratio)
    return f"{significant(factor)}×{SPACE}{word}"


def moment(iso: str | None) -> str:
    """A time as 2026-11-29 14:05 UTC, from ISO 8601."""
    if iso is None:
        return NOTHING
    time = datetime.fromisoformat(iso)
    return f"{time:%Y-%m-%d %H:%M}{SPACE}{time.tzname() or ''}".rstrip(SPACE)


def listed(items: Iterable[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`; where one has a comma, `a, x; b; and c`.

    A comma that parts thousands is none.
    """
    *head, tail = list(items) or [""]
    if any(COMMA.search(item) for item in (*head, tail)):
        return "; ".join([*head, f"{last} {tail}"]) if head else tail
    return f"{', '.join(head)} {last} {tail}" if head else tail


def visible(token: str) -> str:
    """A token as it can be seen: of nothing but blanks, the signs for these."""
    if token.strip():
        return token
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def student(shrink: Mapping[str, Any]) -> str:
    """What the stage shrink put in the original's place: `20 of its 30 blocks`."""
    if shrink["student"]:
        return f"the smaller {shrink['student']}"
    before, after = shrink["size"]["before"], shrink["size"]["after"]
    names = (("blocks", "blocks"), ("kv_heads", "KV heads"), ("mlp", "MLP channels"))
    cut = [
        f"{count(after[key])} of its {count(before[key])} {name}"
        for key, name in names
        if after[key] < before[key]
    ]
    return listed(cut)
