"""Results that benchmarks add to, and the tables that they put into docs."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts, no package
kept = import_module("kept")


def asked(model: Path, **changed: object) -> dict[str, object]:
    given = {"model": model, "samples": 4, "uniform": ["W8A16"], "work": model, **changed}
    return kept.settings(argparse.Namespace(**given), "work", "uniform")


def test_results_of_other_settings_are_not_added_to(tmp_path: Path) -> None:
    file, given = tmp_path / "budget-x.json", asked(tmp_path)
    assert given == {"model": tmp_path.name, "samples": 4}
    assert kept.results_before(file, given) == {}
    file.write_text(json.dumps(given | {"results": {"W8A16": {}}}))
    more = asked(tmp_path, uniform=["W8A16", "W4A16 g32"])
    assert kept.results_before(file, more) == {"W8A16": {}}
    with pytest.raises(SystemExit, match=r"other settings: samples was 4, is now 8\. Give another"):
        kept.results_before(file, asked(tmp_path, samples=8))


def test_what_older_results_do_not_name_was_not_done(tmp_path: Path) -> None:
    file, later = tmp_path / "budget-x.json", {"labels": False}
    given, taught = asked(tmp_path, labels=False), asked(tmp_path, labels=True)
    file.write_text(json.dumps(asked(tmp_path) | {"results": {"a": {}}}))
    assert kept.results_before(file, given, later) == {"a": {}}
    with pytest.raises(SystemExit, match="labels was false, is now true"):
        kept.results_before(file, taught, later)
    file.write_text(json.dumps(taught | {"results": {"a": {}}}))
    assert kept.results_before(file, taught, later) == {"a": {}}
    with pytest.raises(SystemExit, match="labels was true, is now false"):
        kept.results_before(file, given, later)


def test_a_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- t: begin -->\nold\n<!-- t: end -->\nafter\n")
    kept.write_between(page, "t", "| a \\1 |")
    wanted = "before\n<!-- t: begin -->\n\n| a \\1 |\n\n<!-- t: end -->\nafter\n"
    assert page.read_text() == wanted
    with pytest.raises(SystemExit, match="wanted <!-- u: begin --> and <!-- u: end -->"):
        kept.write_between(page, "u", "text")
    assert page.read_text() == wanted
