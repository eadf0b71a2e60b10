"""A plan as a page that needs nothing else, drawn from what plan.json holds alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from compress.planning import tables
from compress.report import pages, plots, words
from compress.report.plots import Bar, Scales, Series, axis

LINES = ("before", "after", "aside")
BARS = ("before", "after", "part-embeddings", "part-norms")
MEMORY = {
    "weights": ("weights", "part-mlp"),
    "kv_cache": ("KV cache", "part-embeddings"),
    "activations": ("activations", "part-norms"),
    "overhead": ("driver and engine", "part-other"),
}


def page(plan: Mapping[str, Any]) -> str:
    """plan.html: one file, no network, no scripts."""
    template = pages.environment(Path(__file__).parent).get_template("page.html.jinja")
    return template.render(
        p=plan,
        style=pages.style(),
        words=words,
        tables=tables,
        memory=memory(plan),
        frontier=frontier(plan),
        served=served(plan),
        waits=waits(plan),
    )


def memory(plan: Mapping[str, Any]) -> Markup:
    """One request of the longest, a bar a scheme, with the device's memory in words."""
    rows = []
    longest = float(plan["memory"])
    for row in plan["schemes"]:
        parts = {**row["one_request"], "overhead": plan["overhead"]}
        total = sum(parts.values())
        longest = max(longest, total)
        drawn = [
            (MEMORY[part][1], size, f"{MEMORY[part][0]}: {words.size(size)}")
            for part, size in parts.items()
        ]
        rows.append((row["scheme"], drawn, words.size(total)))
    return plots.legend(MEMORY.values()) + plots.stacked(rows, longest)


def frontier(plan: Mapping[str, Any]) -> Markup:
    """Largest batch by the tokens of each request, both by logarithm: 16, 8 and 4 bit, a line
    each, since the lines of the schemes of so many bits lie on each other.
    """
    kept = {row["scheme"].partition("A")[0]: row for row in reversed(plan["schemes"])}
    series = [
        Series(
            row["scheme"],
            style,
            [(point["tokens"], point["batch"] or None) for point in row["frontier"]],
            titles=[
                f"{row['scheme']}: {words.count(point['batch'])} x {words.count(point['tokens'])}"
                for point in row["frontier"]
            ],
        )
        for row, style in zip(reversed(kept.values()), LINES, strict=False)
    ]
    points = [(x, y) for one in series for x, y in one.points]
    scales = Scales(
        axis([x for x, _ in points], log=True),
        axis([y for _, y in points], log=True),
        "tokens of each request",
        "requests at once",
        words.count,
        words.count,
    )
    return plots.legend([(one.name, one.style) for one in series]) + plots.xy(series, scales)


def served(plan: Mapping[str, Any]) -> Markup:
    """New tokens a second of static and continuous batching, and of two machines."""
    return plots.bars(
        [
            Bar(name, found["tokens_per_s"], style, words.rate(found["tokens_per_s"]))
            for (way, name), style in zip(tables.WAYS.items(), BARS, strict=True)
            for found in [plan["batching"][way]]
        ]
    )


def waits(plan: Mapping[str, Any]) -> Markup:
    """Seconds until a request is answered whole, median and p95."""
    return plots.bars(
        [
            Bar(f"{name}, {p}", found["latency_s"][p], style, words.seconds(found["latency_s"][p]))
            for (way, name), style in zip(tables.WAYS.items(), BARS, strict=True)
            for found in [plan["batching"][way]]
            for p in ("p50", "p95")
        ]
    )
