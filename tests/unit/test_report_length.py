"""Retrieval from a long window, drawn."""

import re
from pathlib import Path

from report_run import Tags, extend, fixture

from compress.report import length
from compress.report.figures import figures
from compress.report.pages import page


def test_each_cell_is_as_full_as_numbers_were_found() -> None:
    drawn = str(length.judged(extend()))
    assert drawn.count("<svg") == 4  # one number and one of several, before and after
    assert drawn.count("<rect") == 4 * 2 * 3
    titles = re.findall(r"<g><title>(.*?)</title><rect [^>]*fill-opacity=\"(.*?)\"", drawn)
    said = dict(titles[:6])
    assert said == {
        "4,096 tokens, depth 0%: 100% found; a token of a key had a chance of 51.00%": "0.60",
        "8,192 tokens, depth 0%: 50% found; a token of a key had a chance of 26.00%": "0.33",
        "16,384 tokens, depth 0%: 0% found; a token of a key had a chance of 1.00%": "0.05",
        "4,096 tokens, depth 100%: 100% found; a token of a key had a chance of 51.00%": "0.60",
        "8,192 tokens, depth 100%: 100% found; a token of a key had a chance of 51.00%": "0.60",
        "16,384 tokens, depth 100%: 0% found; a token of a key had a chance of 1.00%": "0.05",
    }
    assert titles[12] == ("4,096 tokens, depth 0%: no room for the needles", "0.00")


def test_the_page_shows_the_maps_and_what_the_old_window_pays(tmp_path: Path) -> None:
    text = page(figures(fixture(tmp_path)))
    tags = Tags(text)
    assert tags.open == []
    shown = " ".join("".join(tags.words).split())
    assert "whole new windows 96.20 unscaled and 18.10 as shipped" in shown
    assert "in windows of the old length 18.70 and 18.80." in shown
    assert "8,192 (old window)" in shown
    assert "one of several in the same text, as shipped" in shown


def test_nothing_is_drawn_of_what_was_not_measured() -> None:
    found = extend()
    assert length.judged({**found, "retrieval": None, "short_ppl": None}) == ""
