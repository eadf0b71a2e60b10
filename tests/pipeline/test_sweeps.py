"""Sweeps: every job is checked before the first runs, and those that ran are set side by side."""

import json
import sys
from pathlib import Path

import pytest
from small import composed

from compress import pipeline
from compress.__main__ import main
from compress.config import Config
from compress.errors import UserError


def test_a_sweep_makes_a_run_of_each_and_sets_them_side_by_side(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["recipe=tiny", "--multirun", "quantize=w8a8,w4a16", f"model.path={tiny_model}"]
    monkeypatch.setattr(sys, "argv", ["compress", *words, "stages=[plan,report]"])
    main()
    plans = sorted(tmp_path.glob("runs/tiny/*/*/stages/plan.json"))
    assert [json.loads(p.read_text())["metrics"]["scheme"][:5] for p in plans] == ["W4A16", "W8A8"]
    (file,) = tmp_path.glob("runs/tiny/*/comparison.json")
    rows = json.loads(file.read_text())["rows"]
    names = ["quantize=w8a8", "quantize=w4a16"]
    assert [row["name"] for row in rows] == ["original", *names]
    assert (file.parent / "comparison.html").exists()
    shown = capsys.readouterr()
    jobs = [line for line in shown.err.splitlines() if line.startswith("job ")]
    assert jobs == ["job 1 of 2 (quantize=w8a8)", "job 2 of 2 (quantize=w4a16)"]
    assert shown.out == f"side by side: {file.parent / 'comparison.html'}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["quantize.rate=1,0.5,2"],
            "job 3 of 3 (quantize.rate=2): quantize.rate is 2.0; wanted above 0 and at most 1",
        ),
        (
            ["quantize.rate=1,2", "quantize.rounding=gptq,best"],
            "job 2 of 4 (quantize.rate=1 quantize.rounding=best): quantize.rounding is 'best'",
        ),
        (
            ["data.samples=4,0", "data.length=64,8"],
            "job 2 of 4 (data.samples=4 data.length=8): data.length is 8; wanted at least 16",
        ),
        (
            ["seed=1,2", "data.samples=0,-1", "data.length=8"],
            "job 1 of 4 (seed=1 data.samples=0): data.samples is 0; wanted at least 1; data.length",
        ),
        (["seed=1,many"], "job 2 of 2 (seed=many): seed is 'many'; wanted a whole number"),
        (
            ["quantize=w8a16,w4a16", "quantize.group_size=null,0"],
            "job 2 of 4 (quantize=w8a16 quantize.group_size=0): quantize.group_size is 0; wanted",
        ),
        (
            ["score.text=null,no such.txt", "stages=[calibrate,quantize,export,score]"],
            "job 2 of 2 (score.text=no such.txt): score.text=no such.txt: cannot be read as text",
        ),
        (["shrink.blocks=1,99"], "job 2 of 2 (shrink.blocks=99): "),
        (
            ["stages=[plan],[export]"],
            "job 2 of 2 (stages=[export]): export needs statistics and quantized",
        ),
        (
            ["quantize=w8a8,w4a16", "out=both"],
            "job 2 of 2 (quantize=w4a16): its folder is both, as that of job 1; wanted one for",
        ),
        (
            ["out=a,b,./b/../a"],
            "job 3 of 3 (out=./b/../a): its folder is b/../a, as that of job 1; wanted one for",
        ),
        (
            ["seed=1,1", "out=both"],
            "job 2 of 2 (seed=1): its folder is both, as that of job 1; wanted each once",
        ),
        (
            ["quantize=w8a8,w4a16", "only=quantize,export", "out=both"],
            "job 3 of 4 (quantize=w4a16 only=quantize): its folder is both, as that of job 1;",
        ),
        (
            ["seed=1,2", "~score.gate.tasks.cloze"],
            "Could not delete from config. 'score.gate.tasks.cloze' does not",
        ),
        (["seed=1,2", "data.sample=4"], "data.sample: no such field; data has samples"),
        (["seed=1,2", "data.samples=0"], "data.samples is 0; wanted at least 1"),
        (["seed=1,2", "shrink.blocks=99"], "shrink.blocks"),
    ],
)
def test_a_mistake_in_any_job_of_a_sweep_is_told_before_the_first_runs(
    words: list[str],
    said: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["recipe=tiny", f"model.path={tiny_model}", *words, "--multirun"]
    monkeypatch.setattr(sys, "argv", ["compress", *given])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"compress: {said}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "word", "limits"),
    [
        ("tiny", "+score.gate.tasks.cloze=9", {"cloze": 9}),
        ("smollm2_int8", "+score.gate.tasks.cloze=9", {"knowledge": 10, "cloze": 9}),
        ("smollm2_int8", "~score.gate.tasks.knowledge", {}),
        ("smollm2_int8", "~score.gate.tasks.knowledge=10", {}),
    ],
)
def test_the_jobs_of_a_sweep_are_checked_in_the_folders_that_they_run_in(
    recipe: str,
    word: str,
    limits: dict[str, float],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[Config] = []
    ran: list[Config] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "check", checked.append)
    monkeypatch.setattr(pipeline, "run", lambda config: ran.append(config) or Path("ran"))
    swept = ["score.text=a b,c/d,null", "quantize.keep=*.layers.0.*,x", word]
    given = [f"model.path={tiny_model}", *swept, "stages=[plan,  score]", "data.seed=1,2"]
    monkeypatch.setattr(sys, "argv", ["compress", f"recipe={recipe}", *given, "--multirun"])
    main()
    assert len(checked) == 12
    assert checked == ran
    assert len({config.out for config in checked}) == 12
    assert [config.score.gate.tasks for config in checked] == [limits] * 12


@pytest.mark.parametrize(
    "words", [["only=quantize,export"], ["only=serve,score", "score.gate.token_ms=9"]]
)
def test_jobs_of_one_stage_each_may_share_a_folder(
    words: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Config] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "run", lambda config: ran.append(config) or Path("ran"))
    given = ["recipe=tiny", f"model.path={tiny_model}", *words, "out=one", "--multirun"]
    monkeypatch.setattr(sys, "argv", ["compress", *given])
    main()
    asked = words[0].removeprefix("only=").split(",")
    assert [(config.only, config.out) for config in ran] == [(name, "one") for name in asked]


def test_a_folder_that_jobs_share_is_not_set_beside_itself(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["recipe=tiny", f"model.path={tiny_model}", "stages=[plan,report]", "out=one"]
    monkeypatch.setattr(sys, "argv", ["compress", *words, "only=plan,report", "--multirun"])
    main()
    assert "plan" in json.loads((tmp_path / "one/report.json").read_text())
    assert not list(tmp_path.rglob("comparison.json"))
    assert "side by side" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["model.path=no/such", "stages=[export]"],
            r"^export needs statistics and quantized, made by calibrate or .*, which "
            r"stages=\[export\] leaves out before it; add it$",
        ),
        (["data.path=no/such", "shrink.blocks=99"], r"^shrink\.blocks"),
        (["data.path=no/such", "score.text=no.txt"], r"^score\.text=no\.txt: cannot be read as"),
    ],
)
def test_of_a_sweep_over_the_hub_all_is_checked_that_needs_nothing_from_there(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline.check(composed("recipe=tiny", "model.path=no/such"))
    pipeline.check(composed("recipe=tiny", "data.path=no/such"))
    with pytest.raises(UserError, match=said):
        pipeline.check(composed("recipe=tiny", *words))
    assert not list(tmp_path.iterdir())
