"""The plots of a load, from the figures of its JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from compress.report import plots, words
from compress.report.plots import Bar, Scales, Series, axis

Rows = Sequence[Mapping[str, float]]


def by_arrival(requests: Rows) -> Markup:
    """Each request at its arrival: time to its first token, and to its last, by logarithm."""
    named = (("first token", "after", "ttft_s"), ("whole answer", "before", "whole_s"))
    series = [
        Series(name, style, [(row["arrival_s"], row[key]) for row in requests], line=False)
        for name, style, key in named
    ]
    return _over_time(series, "seconds to wait, logarithmic", log=True)


def queue(moments: Rows) -> Markup:
    """Requests that run, and that wait for a place."""
    named = (("running", "after", "running"), ("waiting", "before", "waiting"))
    return _over_time([_course(moments, *one) for one in named], "requests")


def kv_cache(moments: Rows, room: int) -> Markup:
    """Tokens in the KV cache, in whole pages."""
    most = max((moment["kv_tokens"] for moment in moments), default=0)
    title = f"tokens (room for {words.count(room)}, most {words.count(most)})"
    return _over_time([_course(moments, "in the cache", "after", "kv_tokens")], title)


def batching(found: Mapping[str, Any]) -> Markup:
    """Tokens a second, static and continuous."""
    return plots.bars(
        [
            Bar(name, found[name]["tokens_per_s"], style, words.rate(found[name]["tokens_per_s"]))
            for name, style in (("static", "before"), ("continuous", "after"))
        ]
    )


def halves(found: Mapping[str, Mapping[str, float]]) -> Markup:
    """Seconds of prefill and decode."""
    return plots.bars(
        [
            Bar(name, half["seconds"], style, words.seconds(half["seconds"]))
            for (name, half), style in zip(found.items(), ("before", "after"), strict=True)
        ]
    )


def _course(moments: Rows, name: str, style: str, key: str) -> Series:
    """Thinned to what a plot can show."""
    kept = moments[:: max(1, len(moments) // 200)]
    return Series(name, style, [(moment["second"], moment[key]) for moment in kept])


def _over_time(series: Sequence[Series], title: str, *, log: bool = False) -> Markup:
    scales = Scales(
        axis([x for one in series for x, _ in one.points]),
        axis([y for one in series for _, y in one.points], log=log),
        "seconds",
        title,
    )
    drawn = plots.xy(series, scales)
    return plots.legend([(s.name, s.style) for s in series]) + drawn if len(series) > 1 else drawn
