"""The pages in a real browser: wide and narrow, printed, silent, and with no network."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, WIDTHS, measure, show
from report_run import fixture
from transformers import AutoConfig

from compress import compare
from compress.planning.advice import advice
from compress.planning.devices import GPUS
from compress.planning.page import page as plan_page
from compress.planning.requests import Request
from compress.planning.shape import shape_of
from compress.planning.study import Question, study
from compress.report.figures import figures
from compress.report.pages import page
from tests.unit.test_planning import SMALL

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def report(folder: Path) -> str:
    return page(figures(fixture(folder)))


def plan(folder: Path) -> str:
    shape = shape_of(AutoConfig.for_model(**SMALL), "a model with a name as long as some have")
    requests = [Request(100 + 90 * i, 20 + i, i / 9) for i in range(40)]
    found = study(Question(shape, shape, GPUS["a10g"], 10**9, requests, 2048))
    return plan_page({**found, "advice": advice(found), "command": "python -m compress.plan"})


def comparison(folder: Path) -> str:
    for name in ("w8a8", "a_run_with_a_name_as_long_as_sweeps_give"):
        (folder / name).mkdir()
        found = figures(fixture(folder / name))
        (folder / name / "report.json").write_text(json.dumps(found))
        (folder / name / "report.html").touch()
    return compare.write(sorted(folder.iterdir())).read_text(encoding="utf-8")


@pytest.mark.parametrize("make", [report, plan, comparison])
def test_a_page_fits_its_window_asks_nobody_and_prints(
    make: Callable[[Path], str], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(make(tmp_path), encoding="utf-8")
    found, shown = measure(file, tmp_path)
    assert {width: f["scroll"] for width, f in found.items()} == {w: w for w in WIDTHS}
    assert [f["wide"] for f in found.values()] == [[], []]
    assert found[1280]["cut"] == []
    assert (shown.console, shown.asked) == ([], [])

    printed = tmp_path / "page.pdf"
    shown = show(file, tmp_path, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    assert (shown.console, shown.asked) == ([], [])
    pages = len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))
    assert 2 <= pages <= 40


def test_a_page_that_is_too_wide_loud_and_fetches_is_found_out(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        '<body style="margin: 0"><div class="long" style="width: 500px">x</div>'
        '<div class="scroll" style="width: 90px; overflow: auto">'
        '<p style="width: 91.5px">x</p></div>'
        '<img src="http://127.0.0.1:9/a.png"><script>console.error("no")</script>'
    )
    found, shown = measure(file, tmp_path)
    assert found[390] == {"scroll": 500, "wide": ["DIV.long"], "cut": ["x"]}
    assert found[1280] == {"scroll": 1280, "wide": [], "cut": ["x"]}
    assert any('"no"' in line for line in shown.console)
    assert shown.asked == ["http://127.0.0.1:9/a.png"]
