"""The page's plots, each from the figures of report.json."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from compress.report import plots, words
from compress.report.plots import Bar, Interval, Scales, Series, axis
from compress.report.tasks import change, label

Figures = Mapping[str, Any]
Layer = Mapping[str, Any]

FORMATS = ("aside", "before", "after", "fourth", "fifth")
"""Styles of the formats that a layer can have, in their order."""

PERCENTILES = ("p50", "p95", "p99")


def sizes(by_part: Mapping[str, Mapping[str, float]]) -> Markup:
    """Bytes of the weights by part, before and after, on one scale."""
    rows = []
    for name, when in (("original", "before"), ("compressed", "after")):
        parts = [
            (f"part-{part}", value, f"{words.part(part)}: {words.size(value)}")
            for part, value in by_part[when].items()
            if part != "total" and value
        ]
        rows.append((name, parts, words.size(by_part[when]["total"])))
    longest = max(by_part[when]["total"] for when in ("before", "after"))
    present = [
        (words.part(part), f"part-{part}")
        for part, value in by_part["before"].items()
        if part != "total" and value
    ]
    return plots.legend(present) + plots.stacked(rows, longest)


def worst_first(layers: Sequence[Layer]) -> list[Layer]:
    """Layers by their error, largest first, those whose error is not finite before all."""
    return sorted(layers, key=lambda row: (row["error"] is not None, -(row["error"] or 0)))


def layer_errors(layers: Sequence[Layer]) -> Markup:
    """Relative output error of each linear, by rounding alone and as shipped; a plot a kind."""
    scale = axis([x for row in layers for x in (row["error"], row["error_rtn"])])

    def draw(kind: str, rows: list[tuple[int, Layer]]) -> Markup:
        series = [
            Series(
                name,
                style,
                [(block, row[key]) for block, row in rows],
                titles=[f"{row['name']}: {words.percent(row[key], 2)}" for _, row in rows],
            )
            for name, style, key in (
                ("rounded to nearest", "before", "error_rtn"),
                ("as shipped", "after", "error"),
            )
        ]
        scales = Scales(
            _block_axis(rows), scale, "block", kind, words.count, lambda v: words.percent(v, 1)
        )
        return plots.xy(series, scales, 130)

    key = plots.legend([("rounded to nearest", "before"), ("as shipped", "after")])
    return key + _panels(layers, draw, same=("error", "error_rtn"))


def blocks(found: Mapping[str, Any]) -> Markup:
    """Error of each block on the original's inputs, and of the original itself as it is served."""
    series = [
        Series(
            name,
            style,
            list(enumerate(found[key])),
            titles=[f"block {i}: {words.percent(e, 2)}" for i, e in enumerate(found[key])],
        )
        for name, style, key in (
            ("original as served", "before", "error_floor"),
            ("compressed", "after", "error"),
        )
    ]
    scale = axis([*found["error"], *found["error_floor"]])
    across = plots.Axis(-0.5, len(found["error"]) - 0.5)
    scales = Scales(across, scale, "block", "", words.count, lambda v: words.percent(v, 1))
    return plots.legend([(s.name, s.style) for s in series]) + plots.xy(series, scales, 150)


def outliers(layers: Sequence[Layer]) -> Markup:
    """Largest and mean absolute input of each linear, by logarithm; a plot a kind of input."""
    scale = axis([x for row in layers for x in (row["absmax"], row["mean_abs"])], log=True)

    def draw(kind: str, rows: list[tuple[int, Layer]]) -> Markup:
        series = [
            Series(
                name,
                style,
                [(block, row[key]) for block, row in rows],
                titles=[
                    f"{row['name']}: {words.significant(row[key])}, outliers "
                    f"{words.percent(row['outlier_share'], 3)}"
                    for _, row in rows
                ],
            )
            for name, style, key in (("mean", "before", "mean_abs"), ("largest", "after", "absmax"))
        ]
        scales = Scales(_block_axis(rows), scale, "block", kind, words.count)
        return plots.xy(series, scales, 130)

    key = plots.legend([("mean absolute value", "before"), ("largest absolute value", "after")])
    return key + _panels(layers, draw, same=("absmax", "mean_abs"))


def formats(layers: Sequence[Layer]) -> list[str]:
    """The formats that any of the layers could have beside 16 bit."""
    return list(dict.fromkeys(scheme for row in layers for scheme in row["kl"]))


def sensitivities(layers: Sequence[Layer]) -> Markup:
    """KL of the whole model where one group of linears alone is in a format, by logarithm: a plot
    a kind, a line a format, a ring around what was taken.

    16 bit, whose KL is 0, has its rings on the lowest line.
    """
    schemes = formats(layers)
    styles = {scheme: FORMATS[i % len(FORMATS)] for i, scheme in enumerate(schemes)}
    known = [kl for row in layers for kl in row["kl"].values() if kl and kl > 0]
    foot = min(known, default=1.0) / 2
    scale = axis([*known, foot], log=True)

    def draw(kind: str, rows: list[tuple[int, Layer]]) -> Markup:
        series = [
            Series(
                scheme,
                styles[scheme],
                [(block, row["kl"].get(scheme)) for block, row in rows],
                titles=[
                    f"{row['name']} in {scheme}: {words.significant(row['kl'].get(scheme))}"
                    for _, row in rows
                ],
            )
            for scheme in schemes
        ]
        taken = [(block, max(row["kl"].get(row["taken"]) or 0, foot)) for block, row in rows]
        series.append(Series("taken", "taken", taken, line=False))
        scales = Scales(_block_axis(rows), scale, "block", kind, words.count)
        return plots.xy(series, scales, 130)

    key = plots.legend([*styles.items(), ("taken", "taken")])
    return key + _panels(layers, draw, same=("name",))


def _block_axis(rows: list[tuple[int, Layer]]) -> plots.Axis:
    blocks = [block for block, _ in rows]
    return plots.Axis(min(blocks) - 0.5, max(blocks) + 0.5)


def _panels(
    layers: Sequence[Layer],
    draw: Callable[[str, list[tuple[int, Layer]]], Markup],
    same: tuple[str, ...],
) -> Markup:
    """One plot for each kind of linear; kinds that say the same of every block share one."""
    kinds: dict[str, list[tuple[int, Layer]]] = {}
    for position, row in enumerate(layers):
        number = re.search(r"\.(\d+)\.", row["name"])
        kind = row["name"].rsplit(".", 1)[-1]
        kinds.setdefault(kind, []).append((int(number[1]) if number else position, row))
    merged: dict[tuple[Any, ...], list[str]] = {}
    for kind, rows in kinds.items():
        said = tuple((block, *(row[key] for key in same)) for block, row in rows)
        merged.setdefault(said, []).append(kind)
    drawn = [draw(", ".join(names), kinds[names[0]]) for names in merged.values()]
    return Markup('<div class="panels">{}</div>').format(Markup("").join(drawn))


def curve(distill: Mapping[str, Any]) -> Markup:
    """Held-out KL along the distillation, with the step that was kept."""
    points = distill["curve"]
    series = Series(
        "held-out KL",
        "after",
        [(p["step"], p["kl"]) for p in points],
        titles=[f"step {p['step']}: {words.significant(p['kl'])}" for p in points],
    )
    known = [p["kl"] for p in points if p["kl"] is not None]
    scales = Scales(
        axis([p["step"] for p in points]),
        axis(known),
        "step",
        "KL to the original, nats a token",
        words.count,
        marks=[(distill["best_step"], f"best, step {words.count(distill['best_step'])}")]
        if distill["kept"]
        else [],
    )
    return plots.xy([series], scales)


def positions(extend: Mapping[str, Any]) -> Markup:
    """Perplexity by position in the window: the original, scaled only, and as shipped."""
    found = extend["ppl_by_position"]
    names = (("original", "before"), ("scaled, not tuned", "aside"), ("as shipped", "after"))
    keys = ("before", "scaled", "after")
    series = [
        Series(name, style, list(zip(found["positions"], found[key], strict=True)))
        for (name, style), key in zip(names, keys, strict=True)
        if found.get(key)
    ]
    known = [y for one in series for _, y in one.points if y is not None]
    wide = bool(known) and min(known) > 0 and max(known) > 20 * min(known)
    window = extend["window"]
    scales = Scales(
        axis(found["positions"]),
        axis(known, log=wide),
        "position in the window, tokens",
        "perplexity" + (", logarithmic" if wide else ""),
        words.count,
        marks=[(window["before"], "old window")]
        if window["before"] < max(found["positions"], default=0)
        else [],
    )
    return plots.legend([(s.name, s.style) for s in series]) + plots.xy(series, scales)


def trade_off(
    rows: Sequence[Mapping[str, Any]], key: str, title: str, form: Callable[[float], str]
) -> Markup:
    """KL of each run, by logarithm, over its size or speed; rows[0] is the original, at no KL."""
    known = [row for row in rows[1:] if row["kl"] and row[key]]
    if not known:
        return Markup('<p class="missing">Not measured: {}.</p>').format(title)
    series = [
        Series(
            row["name"],
            ("good", "bad")[bool(row["gate_broken"])],
            [(row[key], row["kl"])],
            titles=[f"{row['name']}: {form(row[key])}, KL {words.significant(row['kl'])}"],
            label=str(row["number"]),
        )
        for row in known
    ]
    marks = [(rows[0][key], "original")] if rows[0][key] else []
    across = axis([*(row[key] for row in known), *(value for value, _ in marks)])
    up = axis([row["kl"] for row in known], log=True)
    return plots.xy(series, Scales(across, up, title, "KL", form, words.significant, marks), 240)


def tasks(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Difference of every score with its paired 95% interval."""
    styles = {"worse": "bad", "perhaps worse": "bad", "better": "good"}
    drawn = [
        Interval(
            label(row),
            row["after"] - row["before"],
            row["ci95"][0],
            row["ci95"][1],
            styles.get(change(row), "after"),
            "{} ({})".format(*words.paired(row["after"] - row["before"], row["ci95"])),
        )
        for row in rows
    ]
    title = "points gained or lost by the compressed model, with 95% intervals"
    return plots.intervals(drawn, title, lambda v: f"{'+' if v > 0 else ''}{words.plain(v)}")


def latency(found: Mapping[str, Any], key: str) -> Markup:
    """TTFT or TPOT: median and the slow tail, of both models on one scale."""
    rows = [
        Bar(
            f"{percentile.upper()} {name}",
            found[when][key][percentile],
            when,
            words.milliseconds(found[when][key][percentile]),
        )
        for percentile in PERCENTILES
        for when, name in (("before", "original"), ("after", "compressed"))
    ]
    return plots.bars(rows)


def throughput(found: Mapping[str, Any], key: str) -> Markup:
    """Tokens a second of both models."""
    return plots.bars(
        [
            Bar(name, found[when][key], when, words.rate(found[when][key]))
            for when, name in (("before", "original"), ("after", "compressed"))
        ]
    )


def stages(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Time of every stage."""
    return plots.bars(
        [Bar(r["name"], r["seconds"], "after", words.seconds(r["seconds"])) for r in rows]
    )
