"""Runs side by side: what is compared, what is not, and a page that needs nothing else."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from report_run import Tags, fixture
from shown import unfounded

from compress import compare
from compress.errors import UserError
from compress.report.comparison import comparison
from compress.report.figures import figures
from compress.source import fingerprint


def run(
    folder: Path, kl: float, size: int, decode: float, *left_out: str, token_ms: float | None = None
) -> Path:
    """A finished run's folder with its report.json."""
    folder.mkdir(parents=True)
    made = fixture(folder, *left_out)
    made.config.score.gate.token_ms = token_ms
    if "score" not in left_out:
        made.manifests["score"]["metrics"]["fidelity"]["kl"] = kl
    made.manifests["export"]["metrics"]["bytes"] = size
    if "serve" not in left_out:
        made.manifests["serve"]["metrics"]["after"]["decode_tokens_per_s"] = decode
    (folder / "report.json").write_text(json.dumps(figures(made)))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        run(tmp_path / "sweep" / "w8", 0.012, 180_000_000, 81.0),
        run(tmp_path / "sweep" / "w4", 0.08, 150_000_000, 90.0),
        run(tmp_path / "sweep" / "bad", 0.5, 180_000_000, 70.0),
    ]


def test_rows_hold_what_the_reports_say(runs: list[Path]) -> None:
    found = comparison(runs, Path())
    assert [row["name"] for row in found["rows"]] == ["original", "w8", "w4", "bad"]
    original, w8, *_ = found["rows"]
    assert (original["bytes"], original["kl"], original["ppl"]) == (269030016, 0.0, 29.22)
    assert original["decode_tokens_per_s"] == pytest.approx(1000 / 20.1)
    assert (w8["bytes"], w8["kl"], w8["decode_tokens_per_s"]) == (180_000_000, 0.012, 81.0)
    assert w8["tasks"]["knowledge, accuracy"] == 52.5
    assert original["tasks"]["knowledge, accuracy"] == 62.5
    assert w8["gate_broken"] == []
    assert found["rows"][3]["gate_broken"] == ["KL 0.5000 nats a token, at most 0.05 allowed"]
    assert found["remarks"] == []


def test_a_token_that_takes_too_long_breaks_the_gate(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "quick", 0.012, 180_000_000, 81.0, token_ms=200),
        run(tmp_path / "slow", 0.012, 180_000_000, 81.0, token_ms=10),
    ]
    found = comparison(runs, Path())
    reason = "12.3 ms a token, at most 10 allowed"
    assert [row["gate_broken"] for row in found["rows"]] == [[], [], [reason]]
    assert f"slow breaks its gate: {reason}." in compare.comparison_page(found)


def test_a_run_that_another_beats_in_all_is_named(runs: list[Path]) -> None:
    beaten = {row["name"]: row.get("beaten_by") for row in comparison(runs, Path())["rows"]}
    assert beaten == {"original": None, "w8": None, "w4": None, "bad": "w8"}


def test_what_gives_no_numbers_beats_nothing_and_is_beaten(runs: list[Path]) -> None:
    change(runs[1], {"fidelity.kl": None, "bytes.after": 1_000})
    found = comparison(runs, Path())
    assert {row["name"]: row["beaten_by"] for row in found["rows"][1:]} == {
        "w8": None,
        "w4": None,  # the smaller and faster
        "bad": "w8",
    }
    page = compare.comparison_page(found)
    assert "w4 gives outputs that are not finite numbers: the KL on held-out text." in page
    assert page.count("not a number") == 1
    change(runs[1], {"bytes.after": 190_000_000, "latency.after.decode_tokens_per_s": 60.0})
    found = comparison(runs, Path())
    assert found["rows"][2]["beaten_by"] == "w8"


@pytest.mark.parametrize(
    ("fast", "slow", "beaten"),
    [
        ((0.50, 0.52), (0.70, 0.72), True),  # apart
        ((0.50, 0.71), (0.70, 0.72), False),  # not told apart
        ((0.0, None), (0.70, 0.72), False),  # too few requests
        (None, None, True),  # not by turns: by the medians
    ],
)
def test_a_speed_beats_another_where_their_intervals_lie_apart(
    runs: list[Path], fast: tuple[float, float | None], slow: tuple[float, float], beaten: bool
) -> None:
    for name, interval, decode in (("w8", fast, 90.0), ("bad", slow, 60.0)):
        change(
            runs[0].parent / name,
            {
                "latency.time_ratio": interval and {"tpot": interval, "ttft": [1.0, 1.0]},
                "latency.after.decode_tokens_per_s": decode,
                "fidelity.kl": 0.012,
            },
        )
    assert comparison(runs, Path())["rows"][3]["beaten_by"] == ("w8" if beaten else None)


def test_what_keeps_runs_from_comparing_is_said(runs: list[Path]) -> None:
    file = runs[1] / "report.json"
    report = json.loads(file.read_text())
    report["fidelity"]["windows"] = 2
    report["hardware"]["cpu"] = "Another CPU"
    file.write_text(json.dumps(report))
    assert comparison(runs, Path())["remarks"] == [
        "KL and perplexity are of different text: w4 beside w8.",
        "Speed was measured on different machines: w4 beside w8.",
    ]


def change(run: Path, values: dict[str, Any]) -> None:
    """Set fields of a run's report, by their dotted names."""
    report = json.loads((run / "report.json").read_text())
    for name, value in values.items():
        *parents, last = name.split(".")
        reduce(getitem, parents, report)[last] = value
    (run / "report.json").write_text(json.dumps(report))


def test_a_speed_stands_beside_what_its_run_measured_of_the_original(runs: list[Path]) -> None:
    change(runs[1], {"latency.before.decode_tokens_per_s": 60.0})
    found = comparison(runs, Path())
    original, _, w4, _ = found["rows"]
    assert w4["against"]["decode_tokens_per_s"] == {"original": 60.0, "said": "1.50×\u00a0faster"}
    assert w4["decode_ratio"] == pytest.approx(1.5)
    assert (original["decode_tokens_per_s"], original["decode_ratio"]) == (None, 1.0)
    assert found["remarks"] == [
        "Decoding by the original was measured by its runs at 49.8\u00a0tok/s to 60.0\u00a0tok/s: "
        "compare their ratios, not their speeds."
    ]
    page = compare.comparison_page(found)
    shown = "90.0 tok/s<br><small>from&nbsp;60.0<br>1.50× faster</small>"
    assert shown in page.replace("\u00a0", " ")
    assert unfounded(page, found) == []


def test_speeds_with_prompts_of_different_lengths_rank_nothing(runs: list[Path]) -> None:
    assert comparison(runs, Path())["rows"][3]["beaten_by"] == "w8"
    change(runs[2], {"latency.before.prompt_tokens": 1024})
    found = comparison(runs, Path())
    assert found["remarks"] == [
        "Speed was measured with prompts of different lengths: 128 tokens (w8 and w4) and "
        "1,024 tokens (bad)."
    ]
    assert found["rows"][0]["ttft_ms"] is None
    assert found["rows"][3]["beaten_by"] is None


def test_of_runs_with_commas_in_their_names_it_is_told_which_had_which_prompt(
    tmp_path: Path,
) -> None:
    named = [tmp_path / name for name in ("bits=4,seed=1", "bits=4,seed=2", "w8")]
    folders = [run(folder, 0.012, 180_000_000, 81.0) for folder in named]
    change(folders[2], {"latency.before.prompt_tokens": 1024})
    assert comparison(folders, Path())["remarks"] == [
        "Speed was measured with prompts of different lengths: 128 tokens (bits=4,seed=1; and "
        "bits=4,seed=2); and 1,024 tokens (w8)."
    ]


def test_what_was_measured_on_another_text_or_machine_is_not_beaten(runs: list[Path]) -> None:
    change(runs[1], {"fidelity": None})  # stands with either text
    change(runs[0], {"fidelity.text": "other.txt"})
    found = comparison([runs[1], runs[0], runs[2]], Path())
    assert {row["name"]: row["beaten_by"] for row in found["rows"]}["bad"] == "w4"
    change(runs[1], {"hardware.cpu": "Another CPU"})
    found = comparison([runs[1], runs[0], runs[2]], Path())
    assert {row["name"]: row["beaten_by"] for row in found["rows"]}["bad"] is None


def test_an_original_is_known_by_what_it_holds(tmp_path: Path, runs: list[Path]) -> None:
    contents = []
    for folder, held in (("made", "{}"), ("stages/source", "{}"), ("other", '{"a": 1}')):
        original = tmp_path / folder
        original.mkdir(parents=True)
        (original / "config.json").write_text(held)
        made = fixture(original)
        made.artifacts["dense"] = original
        contents.append(figures(made)["model_content"])
    assert contents[0] == contents[1] == fingerprint(tmp_path / "made") != contents[2]
    for folder, content in zip(runs, contents, strict=True):
        change(folder, {"model_content": content})
    change(runs[1], {"model": str(tmp_path / "stages/source"), "plan": None, "parameters": 7})
    assert comparison(runs, tmp_path)["remarks"] == ["The originals differ: bad beside w8."]
    names = ["original of w8 and w4", "w8", "w4", "original of bad", "bad"]
    assert [row["name"] for row in comparison(runs, tmp_path)["rows"]] == names


def test_a_student_has_the_same_original(runs: list[Path]) -> None:
    change(runs[2], {"parameters": 99_114_048, "plan.parameters": 99_114_048})
    assert comparison(runs, Path())["remarks"] == []


@pytest.mark.parametrize(
    ("values", "models", "remark"),
    [
        (
            {"model": "example/Other-1B", "model_name": "Other-1B"},
            ["Fixture-135M", "Other-1B"],
            "The originals differ: bad beside w8.",
        ),
        (
            {"config.model.revision": "main"},
            ["Fixture-135M"],
            "The originals differ: bad beside w8.",
        ),
        (
            {"fidelity.text": "other.txt"},
            ["Fixture-135M"],
            "KL and perplexity are of different text: bad beside w8.",
        ),
    ],
)
def test_a_run_stands_beside_its_own_original_alone(
    runs: list[Path], values: dict[str, Any], models: list[str], remark: str
) -> None:
    change(runs[2], {**values, "fidelity.ppl.before": 11.5, "bytes.before": 500_000_000})
    found = comparison([runs[2], *runs[:2]][::-1], Path())
    assert found["models"] == models
    assert found["remarks"] == [remark.replace("w8", "w4")]
    names = ["original of w4 and w8", "w4", "w8", "original of bad", "bad"]
    assert [row["name"] for row in found["rows"]] == names
    assert [row["number"] for row in found["rows"]] == [None, 1, 2, None, 3]
    assert [row["ppl"] for row in found["rows"] if not row["folder"]] == [29.22, 11.5]
    assert [row["beaten_by"] for row in found["rows"]] == [None] * 5
    page = compare.comparison_page(found)
    assert " and ".join(models) + ": what size" in page
    assert page.count('r="3.5"') == 4  # the two runs of one original in two plots
    assert "is no worse in" not in page
    assert unfounded(page, found) == []


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", 0.1, 1000, 1.0, "score"),
        run(tmp_path / "b", 0.1, 900, 1.0, "serve", "score"),
    ]
    found = comparison(runs, Path())
    assert found["rows"][2]["decode_tokens_per_s"] is None
    assert found["rows"][1]["kl"] is None
    assert found["rows"][0]["kl"] is None
    assert found["rows"][1]["beaten_by"] is None
    assert "Not measured: weights." in compare.comparison_page(found)


def test_the_original_is_as_the_first_run_that_measured_it(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", 0.1, 1000, 1.0, "score", "serve"), run(tmp_path / "b", 0.1, 900, 1)]
    original = comparison(runs, Path())["rows"][0]
    assert (original["ppl"], original["tasks"]["knowledge, accuracy"]) == (29.22, 62.5)
    assert original["decode_tokens_per_s"] == pytest.approx(1000 / 20.1)


def test_the_page_is_whole_and_shows_the_figures(runs: list[Path], tmp_path: Path) -> None:
    page = compare.write(runs)
    assert page == tmp_path / "sweep" / "comparison.html"
    text = page.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == []
    assert not {tag for tag, _ in tags.seen} & {"script", "link", "iframe", "img", "object"}
    assert not any("href" in attributes or "src" in attributes for _, attributes in tags.seen)
    assert f"<code>{runs[0]}</code>" in text  # which has no report.html
    shown = text.replace("\u00a0", " ")
    for wanted in (
        "269 MB",
        "150 MB",
        "0.0800",
        "90.0 tok/s",
        "bad: w8 is no worse in what of size, speed and KL was measured of both",
        "52.5",
    ):
        assert wanted in shown, wanted
    assert text.count('r="3.5"') == 6  # three runs in two plots
    data = json.loads((tmp_path / "sweep" / "comparison.json").read_text())
    assert data == comparison(runs, Path())
    assert unfounded(text, data) == []
    assert text.count('<td class="n bad">52.5</td>') == 3  # each loses what its answers can show


@pytest.mark.parametrize(
    ("folders", "at", "wanted"),
    [
        (["sweep/a", "sweep/b"], "other", "sweep"),
        (["runs/A/m", "runs/B/m"], ".", "runs"),
        (["runs/A/m", "runs/B/m"], "runs", "runs"),
        (["runs/A/m", "runs/B/m"], "runs/A", "runs/A"),
        (["x/runs/a", "y/runs/b"], "z", "z"),
        (["x/runs/a", "x/runs/a/deeper"], "z", "z"),
    ],
)
def test_the_page_lies_beside_the_runs_or_in_the_current_folder(
    folders: list[str], at: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(tmp_path / name, 0.012, 180_000_000, 81.0) for name in folders]
    (tmp_path / at).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / at)
    assert compare.write(runs) == tmp_path / wanted / "comparison.html"
    assert compare.write(runs, tmp_path / "given") == tmp_path / "given" / "comparison.html"


def test_runs_below_the_root_do_not_make_it_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    assert compare._place([Path("/a"), Path("/b")]) == Path("/usr")
    assert compare._place([Path("/home/a/x"), Path("/tmp/b/x")]) == Path("/usr")


def test_the_page_links_to_the_runs_own_reports(tmp_path: Path) -> None:
    names = ["quantize=w8a8,score.text=50% #1.txt", "w4/m"]
    runs = [run(tmp_path / "sweep" / name, 0.012, 180_000_000, 81.0) for name in names]
    for folder in runs:
        (folder / "report.html").touch()
    page = compare.write(runs, tmp_path / "page")
    links = [a["href"] for _, a in Tags(page.read_text(encoding="utf-8")).seen if "href" in a]
    assert links == [
        "../sweep/quantize%3Dw8a8%2Cscore.text%3D50%25%20%231.txt/report.html",
        "../sweep/w4/m/report.html",
    ]
    assert all((page.parent / unquote(link or "")).is_file() for link in links)
    rows = json.loads((tmp_path / "page" / "comparison.json").read_text())["rows"]
    assert [row["page"] for row in rows] == [None, *(unquote(link or "") for link in links)]


def test_what_is_no_run_is_told(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no report\.json; wanted the folder of a run"):
        comparison([runs[0], tmp_path / "nowhere"], Path())
    with pytest.raises(UserError, match=r"^~no-user/x: no report\.json; wanted the folder"):
        compare.main(["~no-user/x", "~no-user/y"])
    with pytest.raises(UserError, match="the same run is given twice"):
        comparison([runs[0], runs[0]], Path())
    whole = json.loads((runs[1] / "report.json").read_text())
    (runs[1] / "report.json").write_text(json.dumps(whole | {"verdict": {}}))
    with pytest.raises(UserError, match=r"not a report of this version"):
        comparison(runs, Path())
    (runs[1] / "report.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a report of this version"):
        comparison(runs, Path())
    with pytest.raises(UserError, match="wanted two runs or more"):
        compare.main([str(runs[0])])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out=.*file/below: cannot be written"):
        compare.main([*map(str, runs[::2]), f"out={tmp_path / 'file' / 'below'}"])


def test_a_word_that_is_no_option_is_no_run(runs: list[Path], monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"uot: no such option; did you mean out\?"):
        compare.main([*map(str, runs), "uot=x"])
    monkeypatch.chdir(runs[0].parent)
    runs[0].rename("bits=8")
    compare.main(["bits=8", "w4"])  # a sweep's folders have names like this


def test_the_command_names_the_page(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main([*map(str, runs), f"out={tmp_path / 'there'}"])
    assert capsys.readouterr().out == f"{tmp_path / 'there' / 'comparison.html'}\n"
