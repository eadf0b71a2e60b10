"""The numbers that a page shows, and those that its data can be shown as."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from typing import Any

from compress.report import words

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
FORMS: tuple[Callable[[float], str], ...] = (
    *(words.count, words.many, words.size, words.rate, words.signed, words.plain),
    *(words.milliseconds, words.seconds, lambda hours: words.seconds(3600 * hours)),
    *(partial(words.points, decimals=decimals) for decimals in (1, 2, 3, 4)),
    *(partial(words.significant, digits=digits) for digits in (2, 3, 4)),
    *(partial(words.percent, decimals=decimals) for decimals in (0, 1, 2, 3)),
    lambda months: words.seconds(30 * 86400 * months),
)
"""Every way in which a page writes a number."""
VOID = ("meta", "input", "br", "img", "rect", "line", "circle")
SCALES = ("tick", "tick end", "tick mid")
"""Classes of the ticks of a plot: round numbers along it, none of them measured."""


class _Text(HTMLParser):
    """What a page says, plots' titles included, without its style sheet and the ticks of plots."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.hidden: list[bool] = []
        self.said: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.hidden.append(tag == "style" or dict(attrs).get("class") in SCALES)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Has no text."""

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.hidden.pop()

    def handle_data(self, data: str) -> None:
        if not any(self.hidden):
            self.said.append(data)


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        for name, value in data.items():
            yield name
            yield from _leaves(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _leaves(value)
    else:
        yield data


def unfounded(html: str, data: Any, *, said: str = "") -> list[str]:
    """The numbers on a page, each with the text around it, that `data` does not hold.

    A number may stand in `data` as text, or as a number of which one of FORMS makes what is shown,
    or be the length of a list. said: what the page's own fixed sentences have.
    """
    known = set(NUMBER.findall(said))
    for leaf in _leaves(data):
        if isinstance(leaf, str):
            known.update(NUMBER.findall(leaf))
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            known.update(number for form in FORMS for number in NUMBER.findall(form(leaf)))
    return [
        f"{number} in {text.strip()[:80]!r}"
        for text in _Text(html).said
        for number in NUMBER.findall(text)
        if number not in known
    ]
