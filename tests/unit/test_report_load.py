"""Loads that the bench measured, in the report: named, drawn, and refused where they are none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_run import Tags, fixture
from shown import unfounded

from compress.errors import ConfigError
from compress.report.figures import figures
from compress.report.load import differences
from compress.report.pages import page
from compress.stages.report import Report


def bench(folder: Path, checkpoint: Path, slower: float = 1.0, rate: float = 0.75) -> str:
    """A folder as compress.bench leaves it; returns its name."""

    def tail(middle: float) -> dict[str, float]:
        return {"p50": middle, "p95": 2 * middle, "p99": 3 * middle, "mean": 1.1 * middle}

    waits = [0.21, 0.35, 0.81, 1.43]
    found: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "workload": "chat",
        "lengths": {"requests": 4},
        "batching": {
            "static": {"tokens_per_s": 41.6 / slower},
            "continuous": {"tokens_per_s": 111.9 / slower},
        },
        "open_loop": {
            "rate": rate,
            "ttft_ms": tail(290.6 * slower),
            "tpot_ms": tail(64.4 * slower),
            "whole_ms": tail(6760.4 * slower),
            "requests": [
                {"arrival_s": float(i), "ttft_s": slower * w, "whole_s": 9 * slower * w}
                for i, w in enumerate(waits)
            ],
            "moments": [{"second": 0.0, "running": 1}],
        },
        "limits": {"running": 16},
        "seed": 0,
        "hardware": {"cpu": "Fixture CPU", "gpu": None, "torch_threads": 2},
        "command": f"python -m compress.bench checkpoint={checkpoint}",
    }
    folder.mkdir(parents=True)
    (folder / "load.json").write_text(json.dumps(found))
    return str(folder)


@pytest.fixture
def run(tmp_path: Path) -> SimpleNamespace:
    made = fixture(tmp_path)
    made.artifacts |= {"dense": tmp_path / "dense", "checkpoint": tmp_path / "run" / "checkpoint"}
    return made


def test_loads_of_both_models_are_set_side_by_side(run: SimpleNamespace, tmp_path: Path) -> None:
    folders = [
        bench(tmp_path / "before", tmp_path / "dense", slower=1.3),
        bench(tmp_path / "after", tmp_path / "run" / ".." / "run" / "checkpoint"),
    ]
    found = figures(run, load=folders)
    assert [load["name"] for load in found["loads"]] == ["original", "compressed"]
    assert "moments" not in found["loads"][0]["open_loop"]
    text = page(found)
    assert Tags(text).open == []
    assert unfounded(text, found, said="0 65,504 95 100") == []
    shown = text.replace("\u00a0", " ")
    assert (
        '<tr><td>first token, P50</td><td class="n">378 ms</td><td class="n">291 ms</td></tr>'
        in shown
    )
    assert '<td class="n">86.1 tok/s</td><td class="n">112 tok/s</td>' in shown
    assert "do not compare" not in text
    assert text.count('<a href="#load">') == 1
    # Four requests of two loads in two plots.
    load = text[text.index('id="load"') : text.index('id="outputs"')]
    assert load.count('class="dot ') == 16


def test_a_load_of_another_model_is_called_as_it_was(run: SimpleNamespace, tmp_path: Path) -> None:
    folders = [bench(tmp_path / "a", tmp_path / "dense"), bench(tmp_path / "b", tmp_path / "peer")]
    assert [load["name"] for load in figures(run, load=folders)["loads"]] == [
        "original",
        str(tmp_path / "peer"),
    ]


def test_loads_that_differ_by_more_than_the_model_are_told(
    run: SimpleNamespace, tmp_path: Path
) -> None:
    folders = [
        bench(tmp_path / "before", tmp_path / "dense", rate=0.5),
        bench(tmp_path / "after", tmp_path / "run" / "checkpoint"),
    ]
    found = figures(run, load=folders)
    assert differences(found["loads"]) == ["rate of arrivals"]
    assert "These do not compare, since they differ in rate of arrivals." in page(found)


def test_without_a_load_the_page_says_how_to_measure_one(run: SimpleNamespace) -> None:
    text = page(figures(run))
    assert "report.load=[LOAD] force=[report]" in text
    assert 'id="load"' not in text


def test_what_is_no_load_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text('{"open_loop": {}}')
    with pytest.raises(ConfigError) as error:
        Report(load=[str(tmp_path), str(tmp_path / "nowhere")])
    assert error.value.problems == [
        f"report.load has {tmp_path}: its load.json is not one of this version of compress.bench; "
        "measure it again",
        f"report.load has {tmp_path}/nowhere: no load.json there; wanted the folder (out=) of a "
        "python -m compress.bench",
    ]
