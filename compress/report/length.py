"""How a longer window is read: its perplexity, and retrieval as heat maps by depth and length."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from compress.report import words

CELL = 34  # pixels high
KINDS = {"passkey": "one number in the text", "needles": "one of several in the same text"}
STATES = {"before": "unscaled", "after": "as shipped"}


def judged(extend: Mapping[str, Any]) -> Markup:
    """What the stage extend measured of the window, as far as it did."""
    return _perplexities(extend) + _maps(extend)


def _perplexities(extend: Mapping[str, Any]) -> Markup:
    if not extend.get("short_ppl"):
        return Markup("")
    long, short = ([extend[key][when] for when in STATES] for key in ("ppl", "short_ppl"))
    return Markup(
        "<p>Perplexity of the same held-out text: read in whole new windows {} unscaled and {} as "
        "shipped, in windows of the old length {} and {}.</p>"
    ).format(*(words.significant(x, 4) for x in (*long, *short)))


def _maps(extend: Mapping[str, Any]) -> Markup:
    """Retrieval before and after, of one needle and of several."""
    found = extend.get("retrieval")
    if not found:
        return Markup("")
    maps = [
        _map(f"{title}, {name}", found[state], kind, extend["window"]["before"])
        for kind, title in KINDS.items()
        for state, name in STATES.items()
    ]
    return Markup('<div class="panels">{}</div>').format(Markup("").join(maps))


def _map(title: str, found: Mapping[str, Any], kind: str, window: int) -> Markup:
    """One heat map: the share of numbers found in each cell, fuller for more."""
    lengths: Sequence[int] = found["lengths"]
    depths: Sequence[float] = found["depths"]
    wide, height = 100 / len(lengths), CELL * len(depths)
    parts = []
    for row, depth in enumerate(depths):
        middle = CELL * row + CELL / 2 + 4
        parts.append(
            Markup('<text x="-8" y="{}" class="tick end">{}</text>').format(
                middle, words.percent(depth, 0)
            )
        )
        for column, length in enumerate(lengths):
            exact = found[kind]["exact"][row][column]
            chance = found[kind]["chance"][row][column]
            parts.append(_cell(exact, chance, (wide * column, wide), CELL * row, depth, length))
    for column, length in enumerate(lengths):
        parts.append(
            Markup('<text x="{}%" y="{}" class="tick mid">{}{}</text>').format(
                wide * (column + 0.5),
                height + 18,
                words.count(length),
                " (old window)" if length == window else "",
            )
        )
    return Markup(
        '<div class="plot"><p class="axis-title">{}</p>'
        '<svg width="100%" height="{}" role="img" aria-label="{}">{}</svg>'
        '<p class="axis-title x">tokens of the text; down: depth in it</p></div>'
    ).format(title, height, f"{title}: numbers found by depth and length", Markup("").join(parts))


def _cell(
    exact: float | None,
    chance: float | None,
    across: tuple[float, float],
    top: int,
    depth: float,
    length: int,
) -> Markup:
    left, wide = across
    if exact is None:
        said, title = "", "no room for the needles"
    else:
        said = words.percent(exact, 0)
        title = f"{said} found; a token of a key had a chance of {words.percent(chance, 2)}"
    where = f"{words.count(length)} tokens, depth {words.percent(depth, 0)}: {title}"
    # Never so full that the ink over it could not be read, light or dark.
    fill = 0.0 if exact is None else 0.05 + 0.55 * exact
    return Markup(
        '<g><title>{}</title><rect x="{}%" y="{}" width="{}%" height="{}" rx="2" class="after" '
        'fill-opacity="{:.2f}"/><text x="{}%" y="{}" class="tick mid" style="fill:var(--ink)">{}'
        "</text></g>"
    ).format(
        *(where, left + 0.3, top + 1, wide - 0.6, CELL - 2, fill),
        *(left + wide / 2, top + CELL / 2 + 4, said),
    )
