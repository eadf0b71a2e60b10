"""The figures as a page and as Markdown, drawn from what report.json holds alone."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compress.report import charts, length, load, words
from compress.report.diff import word_diff
from compress.report.tasks import could_show, label, unasked

TEMPLATES = Path(__file__).with_name("templates")

SHEET = (
    *("task", "id", "why", "prompt", "references", "before", "after"),
    *("metric", "score_before", "score_after", "kl", "broken_before", "broken_after"),
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")

BROKEN = {
    "contains": "lacks what was asked for",
    "not_empty": "is empty",
    "no_garbage": "holds broken characters",
    "no_loop": "repeats itself",
    "json": "is not the JSON that was asked for",
    "python": "is not Python that parses",
    "csv": "is not the table that was asked for",
    "runs": "does not pass its tests",
    "matches": "has not the form that was asked for",
    "lines": "has not as many lines as were asked for",
    "most_words": "is longer than was asked for",
}
"""Rules of boundary cases (eval/rules.py), in words for an answer that breaks them."""


def page(figures: Mapping[str, Any]) -> str:
    """report.html: one file that needs nothing else, neither network nor scripts."""
    return _environment(True).get_template("page.html.jinja").render(f=figures, style=style())


def comparison_page(comparison: Mapping[str, Any]) -> str:
    """comparison.html, from what comparison.json holds alone; it needs nothing else either."""
    template = _environment(True).get_template("comparison.html.jinja")
    return template.render(c=comparison, style=style())


def sheet(outputs: Sequence[Mapping[str, Any]]) -> str:
    """report.outputs.csv: the outputs side by side, with a column for a person's mark.

    A cell that a spreadsheet would take for a formula starts with an apostrophe, since models and
    prompts may write anything. The mark at the start (a BOM) says UTF-8 to Excel, which takes text
    without one for that of its country.
    """
    table = io.StringIO()
    table.write("\ufeff")
    writer = csv.writer(table)
    writer.writerow([*SHEET, "mark"])
    for output in outputs:
        cells = [output.get(name) for name in SHEET]
        texts = [
            " | ".join(c) if isinstance(c, list) else "" if c is None else str(c) for c in cells
        ]
        writer.writerow([*(f"'{t}" if t[:1] in FORMULA else t for t in texts), ""])
    return table.getvalue()


def short(figures: Mapping[str, Any]) -> str:
    """report.md: verdict and tables."""
    return _environment(False).get_template("page.md.jinja").render(f=figures)


def environment(folder: Path, *, escape: bool = True) -> Environment:
    """Templates of `folder`, with the words by which figures are written as filters."""
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=escape,  # on for HTML; the Markdown shows no text of a model
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        size=words.size,
        count=words.count,
        many=words.many,
        significant=words.significant,
        percent=words.percent,
        paired=words.paired,
        seconds=words.seconds,
        ms=words.milliseconds,
        rate=words.rate,
        cell=cell,
        visible=words.visible,
        student=words.student,
    )
    return made


def style() -> Markup:
    """The style sheet that all pages share."""
    return Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))


def _environment(escape: bool) -> Environment:
    made = environment(TEMPLATES, escape=escape)
    made.globals.update(
        charts=charts,
        length=length,
        load=load,
        words=words,
        could_show=could_show,
        label=label,
        unasked=unasked,
        word_diff=word_diff,
        fields=fields,
        kinds=kinds,
        broken=BROKEN,
    )
    return made


def cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def kinds(kept: Mapping[str, str]) -> list[tuple[tuple[str, str], int]]:
    """Layers by the last part of their name and the reason, counted."""
    counts = Counter((name.rsplit(".", 1)[-1], why) for name, why in kept.items())
    return list(counts.items())


def fields(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field of a configuration by its dotted name, with its value as JSON."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)
