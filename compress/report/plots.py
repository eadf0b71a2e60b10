"""Plots as inline SVG that stretches with the page: x in percent, y in pixels, text never scaled.

Colours come from the page's style sheet through classes, so that light, dark and print each have
their own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, log10

from markupsafe import Markup, escape

from compress.report.words import plain

Format = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """From values to shares of the plot's width or height, linear or by logarithm."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        if self.log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values inside the axis, about `most` of them, at most two more."""
        return _log_ticks(self, most) if self.log else _ticks(self, most)


def axis(values: Iterable[float | None], *, log: bool = False, zero: bool = True) -> Axis:
    """An axis around `values`: from zero unless told otherwise; by logarithm, with whole steps."""
    found = [v for v in values if v is not None and (not log or v > 0)]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if log:
        low, high = (low, high) if found else (1.0, 10.0)
        return Axis(low / 1.4, high * 1.2, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low or abs(high) or 1.0) * 0.06
    ends_at_zero = zero and (low or high)  # an axis of nothing but zeros still has a length
    return Axis(
        low if ends_at_zero and low == 0 else low - room,
        high if ends_at_zero and high == 0 else high + room,
    )


def _ticks(axis: Axis, most: int) -> list[float]:
    rough = (axis.high - axis.low) / (most + 1)
    power = 10 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first, last = ceil(axis.low / step), floor(axis.high / step)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(axis: Axis, most: int) -> list[float]:
    low, high = floor(log10(axis.low)), ceil(log10(axis.high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        inside = [
            m * 10.0**power
            for power in range(low, high + 1)
            for m in steps
            if axis.low <= m * 10.0**power <= axis.high
        ]
        if len(inside) <= most:
            return inside
    return inside[:: ceil(len(inside) / most)]


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one colour. style: a class of the style sheet. A y of None is a gap.

    label: written beside each point.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float | None]]
    line: bool = True
    titles: Sequence[str] = field(default_factory=list)
    label: str = ""


@dataclass(frozen=True)
class Scales:
    """The two axes of a plot and how their ticks read. marks: labelled lines across, (x, label)."""

    x: Axis
    y: Axis
    x_title: str = ""
    y_title: str = ""
    x_format: Format = plain
    y_format: Format = plain
    marks: Sequence[tuple[float, str]] = ()


def legend(series: Iterable[tuple[str, str]]) -> Markup:
    """Names beside their colours, from (name, style)."""
    items = [
        Markup('<span class="key"><svg width="10" height="10" aria-hidden="true">'
               '<circle cx="5" cy="5" r="4.5" class="{}"/></svg>{}</span>').format(style, name)
        for name, style in series
    ]  # fmt: skip
    return Markup('<p class="legend">{}</p>').format(Markup(" ").join(items))


def xy(series: Sequence[Series], scales: Scales, height: int = 200) -> Markup:
    """A plot of lines or dots, with a grid, ticks and titles."""
    parts = [_frame(scales, height)]
    for one in series:
        spots = [
            (100 * scales.x.share(x), height * (1 - scales.y.share(y)), i)
            for i, (x, y) in enumerate(one.points)
            if y is not None and (y > 0 or not scales.y.log) and (x > 0 or not scales.x.log)
        ]
        if one.line:
            for (x1, y1, i), (x2, y2, j) in pairwise(spots):
                if j == i + 1:
                    parts.append(_line(x1, y1, x2, y2, f"line {one.style}"))
        radius = 2.5 if one.line and len(spots) > 12 else 3.5
        for x, y, i in spots:
            title = Markup("<title>{}</title>").format(one.titles[i]) if one.titles else ""
            parts.append(
                Markup('<circle cx="{}%" cy="{}" r="{}" class="dot {}">{}</circle>').format(
                    _short(x), _short(y), radius, one.style, title
                )
            )
            if one.label:
                parts.append(
                    Markup('<text x="{}%" y="{}" dx="7" class="tick">{}</text>').format(
                        _short(x), _short(y + 4), one.label
                    )
                )
    label = f"{scales.y_title} by {scales.x_title}: {', '.join(s.name for s in series)}"
    return Markup(
        '<div class="plot"><p class="axis-title">{}</p>'
        '<svg width="100%" height="{}" role="img" aria-label="{}">{}</svg>'
        '<p class="axis-title x">{}</p></div>'
    ).format(scales.y_title, height, label, Markup("").join(parts), scales.x_title)


def _frame(scales: Scales, height: int) -> Markup:
    parts = []
    for tick in scales.y.ticks(5):
        y = height * (1 - scales.y.share(tick))
        parts.append(_line(0, y, 100, y, "grid"))
        parts.append(
            Markup('<text x="-8" y="{}" class="tick end">{}</text>').format(
                _short(y + 4), scales.y_format(tick)
            )
        )
    for tick in scales.x.ticks(5):
        x = 100 * scales.x.share(tick)
        parts.append(
            Markup('<text x="{}%" y="{}" class="tick mid">{}</text>').format(
                _short(x), height + 18, scales.x_format(tick)
            )
        )
    for value, name in scales.marks:
        x = 100 * scales.x.share(value)
        parts.append(_line(x, 0, x, height, "mark"))
        side = ("end", -5) if x > 60 else ("start", 5)
        parts.append(
            Markup('<text x="{}%" y="11" dx="{}" class="tick {}">{}</text>').format(
                _short(x), side[1], side[0], name
            )
        )
    parts.append(_line(0, height, 100, height, "base"))
    return Markup("").join(parts)


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: what it is, how long, in which colour, and its value in words."""

    label: str
    value: float | None
    style: str
    text: str


def bars(rows: Sequence[Bar], longest: float | None = None) -> Markup:
    """Horizontal bars under each other, all from zero on one scale."""
    most = longest or max((r.value or 0 for r in rows), default=0) or 1
    drawn = [
        Markup(
            '<div class="bar"><span class="name">{}</span><svg width="100%" height="14" '
            'aria-hidden="true"><rect width="{}%" height="14" rx="2" class="{}"/></svg>'
            '<span class="value">{}</span></div>'
        ).format(row.label, _short(100 * (row.value or 0) / most), row.style, row.text)
        for row in rows
    ]
    return Markup('<div class="bars">{}</div>').format(Markup("").join(drawn))


def stacked(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], str]], longest: float
) -> Markup:
    """Bars made of parts, from (label, [(style, value, title), ...], text in words)."""
    drawn = []
    for label, parts, text in rows:
        start, rects = 0.0, []
        for style, value, title in parts:
            rects.append(
                Markup(
                    '<rect x="{}%" width="{}%" height="26" class="{}"><title>{}</title></rect>'
                ).format(_short(start), _short(100 * value / longest), style, title)
            )
            start += 100 * value / longest
        drawn.append(
            Markup(
                '<div class="bar tall"><span class="name">{}</span>'
                '<svg width="100%" height="26" role="img" aria-label="{}">{}</svg>'
                '<span class="value">{}</span></div>'
            ).format(label, f"{label}: {text}", Markup("").join(rects), text)
        )
    return Markup('<div class="bars">{}</div>').format(Markup("").join(drawn))


@dataclass(frozen=True)
class Interval:
    """A difference with its interval: drawn as a dot on a line."""

    label: str
    value: float
    low: float
    high: float
    style: str
    text: str


def intervals(rows: Sequence[Interval], title: str, form: Format) -> Markup:
    """Dots with their intervals, one scale for all, around a line at zero."""
    ends = [v for row in rows for v in (row.low, row.high, row.value)]
    scale = axis([*ends, 1.0, -1.0])
    zero = 100 * scale.share(0)
    drawn = []
    for row in rows:
        low, high, value = (100 * scale.share(v) for v in (row.low, row.high, row.value))
        marks = Markup("").join(
            [
                _line(zero, 0, zero, 26, "zero"),
                _line(low, 13, high, 13, f"span {row.style}"),
                Markup('<circle cx="{}%" cy="13" r="4.5" class="dot {}"/>').format(
                    _short(value), row.style
                ),
            ]
        )
        drawn.append(
            Markup(
                '<div class="bar interval"><span class="name">{}</span>'
                '<svg width="100%" height="26" role="img" aria-label="{}">{}</svg>'
                '<span class="value">{}</span></div>'
            ).format(row.label, f"{row.label}: {row.text}", marks, row.text)
        )
    ticks = Markup("").join(
        Markup('<text x="{}%" y="12" class="tick mid">{}</text>').format(
            _short(100 * scale.share(t)), form(t)
        )
        for t in scale.ticks(5)
    )
    foot = Markup(
        '<div class="bar foot"><span class="name"></span><svg width="100%" height="16" '
        'aria-hidden="true">{}</svg><span class="value"></span></div>'
        '<p class="axis-title x">{}</p>'
    ).format(ticks, title)
    return Markup('<div class="bars">{}{}</div>').format(Markup("").join(drawn), foot)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    ends = [escape(_short(v)) for v in (x1, y1, x2, y2)]
    return Markup('<line x1="{}%" y1="{}" x2="{}%" y2="{}" class="{}"/>').format(*ends, style)


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
