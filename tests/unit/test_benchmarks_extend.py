"""The comparison of ways to a longer context: what it trains and judges on, and its table."""

import json
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts that stand beside each other, no package
bench = import_module("extend")


def grid(*columns: float | None) -> dict[str, Any]:
    return {"exact": [list(columns), list(columns)], "chance": [[], []], "mean": 0.5}


def judged(long: float, short: float) -> dict[str, Any]:
    retrieval = {"lengths": [512, 2048], "depths": [0.0, 1.0], "keys": 1}
    retrieval |= {"passkey": grid(1.0, 0.5), "needles": grid(None, 0.0)}
    return {
        "ppl": {"long": long, "by_position": [long, long + 1], "short": short},
        "retrieval": retrieval,
    }


REPORT = {
    "model": "a-model",
    "text": "a.txt",
    "window": 512,
    "windows": 2,
    "steps": 10,
    "batch": 1,
    "length": 128,
    "rate": 1e-3,
    "passkey": 0.1,
    "keys": 1,
    "depths": 2,
    "hardware": {"cpu": "A CPU"},
    "date": "2026-11-30",
    "results": {
        "4": {
            "ntk": {"scaled": judged(7, 6), "tuned": judged(5, 5.5)},
            "unscaled": {"scaled": judged(9, 5)},
        }
    },
}


def test_the_table_begins_with_the_unscaled_model_and_parts_before_from_after() -> None:
    about, _, _, _, *rows = bench.table(REPORT).split("\n")
    assert about.startswith(
        "a-model, trained window 512; `a.txt`, 2 windows; fine-tune of 10 steps"
    )
    assert "10 steps of 1 × 128 tokens at 0.001, a number hidden in 10% of the windows" in about
    assert rows == [
        "| 2048 | unscaled |  | 9.00 | 10.00 | 5.00 | 100% | 50% |  | 0% |",
        "| 2048 | NTK-aware |  | 7.00 | 8.00 | 6.00 | 100% | 50% |  | 0% |",
        "| 2048 | NTK-aware | yes | 5.00 | 6.00 | 5.50 | 100% | 50% |  | 0% |",
    ]


def test_the_table_says_what_was_learned() -> None:
    report = REPORT | {"train": "b.txt", "labels": True, "near": 0.5}
    about = bench.table(report).split("\n")[0]
    assert "128 tokens of `b.txt` by soft labels (50% at the first positions) at 0.001" in about


def test_what_is_judged_on_is_not_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("|".join(f"story {i}" for i in range(8)))
    docs, held = bench.documents(Namespace(text=file, split="|", train=None))
    assert docs == [f"story {i}" for i in range(6)]
    assert held == "story 6\n\nstory 7"
    (whole,), held = bench.documents(Namespace(text=file, split=None, train=None))
    assert whole + held == file.read_text()
    assert len(whole) == len(file.read_text()) * 3 // 4
    other = tmp_path / "other.txt"
    other.write_text("a tale|another")
    docs, held = bench.documents(Namespace(text=file, split="|", train=other))
    assert docs == ["a tale", "another"]
    assert held == file.read_text()


def test_one_command_judges_trains_and_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, page = tmp_path / "text.txt", tmp_path / "page.md"
    file.write_text(
        " ".join(f"Line {i} of a long text says that {i} is a number." for i in range(900))
    )
    page.write_text("# Page\n\n<!-- extend: begin -->\n<!-- extend: end -->\n")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "PAGE", page)
    words = f"bench --model {tiny_model} --text {file} --name t --factors 2 --methods ntk"
    words += f" --steps 2 --length 64 --passkey 0 --windows 1 --keys 0 --work {tmp_path / 'work'}"
    monkeypatch.setattr(sys, "argv", words.split())
    assert bench.main() == 0
    first = (tmp_path / "extend-t.json").read_text()
    (done,) = json.loads(first)["results"].values()
    assert set(done) == {"unscaled", "ntk"}
    assert done["ntk"]["training"]["tokens"] == 2 * 64
    assert done["unscaled"]["scaled"]["ppl"] != done["ntk"]["scaled"]["ppl"]
    assert "| 512 | NTK-aware |" in page.read_text()
    assert bench.main() == 0
    assert (tmp_path / "extend-t.json").read_text() == first
    monkeypatch.setattr(sys, "argv", [*words.split(), "--rate", "1"])
    with pytest.raises(SystemExit, match=r"rate was 2e-05, is now 1\.0"):
        bench.main()


def test_labels_are_made_once_for_all_methods_and_kept_by_name(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, train, page = (tmp_path / name for name in ("text.txt", "train.txt", "page.md"))
    text.write_text(" ".join(f"Line {i} says that {i} is a number." for i in range(900)))
    train.write_text(" ".join(f"Chapter {i} is of another story." for i in range(900)))
    page.write_text("# Page\n\n<!-- extend: begin -->\n<!-- extend: end -->\n")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "PAGE", page)
    words = f"bench --model {tiny_model} --text {text} --name t --factors 2 --methods ntk yarn"
    words += f" --steps 2 --length 999 --passkey 0 --windows 1 --keys 0 --work {tmp_path / 'work'}"
    words += f" --train {train} --labels --near 0.5"
    monkeypatch.setattr(sys, "argv", words.split())
    assert bench.main() == 0
    done = json.loads((tmp_path / "extend-t.json").read_text())["results"]["2"]
    window = 256  # of the tiny model: what its original can label
    assert [done[m]["training"]["tokens"] for m in ("ntk", "yarn")] == [2 * window] * 2
    told = json.loads((tmp_path / "work/t-labels/labels.json").read_text())
    assert told["figures"]["tokens"] == 2 * window
    for more, why in (
        (f"--train {text}", "that is judged on"),
        (f"--teacher {tmp_path}", f"{tmp_path}/config.json: no such file"),
    ):
        monkeypatch.setattr(sys, "argv", [*words.split(), *more.split()])
        with pytest.raises(SystemExit):
            bench.main()
        assert why in capsys.readouterr().err
