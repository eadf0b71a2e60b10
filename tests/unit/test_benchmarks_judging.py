"""The published sets as a user's own tasks, and the table of what the judging told apart."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from compress.eval.items import items
from compress.eval.own import read

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts that stand beside each other, no package
judging = import_module("judging")


def test_every_set_is_a_task_of_ones_own(shared_data: Path, tmp_path: Path) -> None:
    files = judging.prepare(shared_data, tmp_path, 5)
    assert [file.stem for file in files] == list(judging.SETS)
    asked = {file.stem: items(read(file)) for file in files}
    assert {len(found) for found in asked.values()} == {5}
    assert all(item.prompt == "" and len(item.choices) == 2 for item in asked["blimp"])
    assert len({item.id.rpartition("-")[0] for item in asked["blimp"]}) == 5  # spread evenly
    assert asked["multi30k"][0].prompt.startswith("Translate into English: ")


def row(name: str, metric: str, after: float, ci95: list[float]) -> dict[str, Any]:
    return {
        "name": name,
        "metric": metric,
        "n": 30,
        "before": 50.0,
        "after": after,
        "ci95": ci95,
        "p": 0.01,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    close = {"kl": 0.01, "kl_floor": 0.001}
    mild = [row("a_b", "accuracy", 49.0, [-3.0, 1.0]), row("a_b", "likelihood", 1.0, [-60, -40])]
    return {
        "W8A8": {"fidelity": close, "tasks": mild, "gate": {"broken": []}},
        "W4": {
            "fidelity": close | {"kl": 0.7},
            "tasks": [row("a_b", "accuracy", 20.0, [-45.0, -15.0])],
            "gate": {"broken": ["KL 0.7"]},
        },
    }


def test_what_is_more_than_chance_is_in_bold(results: dict[str, Any]) -> None:
    lines = judging.table(results).splitlines()
    assert lines[0] == "| task | items | original | W8A8 | W4 |"
    assert lines[2] == "| KL on WikiText-2 | | 0.00100 | 0.0100 | 0.700 |"
    assert lines[3] == (
        "| a b, accuracy | 30 | 50.0 | −1.0 (−3.0 to +1.0) | **−30.0 (−45.0 to −15.0)** |"
    )
    assert lines[4] == "| gate | | | passed | KL 0.7 |"
