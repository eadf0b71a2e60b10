"""The words of a command line: paths as typed, options anywhere, mistakes in one line."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from small import SMALL, composed

from compress import arguments, pipeline
from compress import config as schema
from compress.__main__ import main, recipes
from compress.config import Config
from compress.errors import UserError
from compress.quoting import quoted, typed

Small = Callable[..., Config]
ODD = (
    "ö",
    "文",
    "a=b",
    "a (1)",
    "it's",
    'say "x"',
    "a, b",
    "[x]",
    "{y}",
    "1e3",
    "tail\\",
    "~x",
    "#",
)
OUT = "; to leave the stage out, name those that run: stages=[plan,calibrate,…]"


@given(st.text(min_size=1) | st.text("'\"\\ ö=(),{}[]:~a/", min_size=1))
@example("\\'")
@example("ends in \\")
def test_any_text_comes_through_hydras_grammar(text: str) -> None:
    parsed = OverridesParser.create().parse_override(f"out={quoted(text)}")
    assert not parsed.is_sweep_override()
    assert parsed.value() == text


@pytest.mark.parametrize("name", ODD)
def test_paths_are_taken_as_typed(name: str) -> None:
    schema.register()
    words = ["recipe=tiny", *(f"{f}={name}" for f in ("out", "model.path", "data.path"))]
    words += [f"score.text={name}", f"report.currency={name}", "data.heldout=null"]
    words = arguments.prepared(words)
    arguments.check(words)
    config = composed(*words)
    assert (config.out, config.model.path, config.data.path) == (name, name, name)
    assert (config.score.text, config.report.currency, config.data.heldout) == (name, name, None)


@given(st.text("'\"\\ ö=(),{}[]:~a/", min_size=1))
@example("null")
@example("'null'")
@example("/models/a b")
def test_a_prepared_word_is_shown_as_it_was_typed(text: str) -> None:
    (word,) = arguments.prepared([f"out={text}"])
    assert arguments.prepared([typed(word)]) == [word]
    if text.isalnum() or text.startswith("/models"):
        assert typed(word) == f"out={text}"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("stages=plan,report", ["stages=plan", "stages=report"]),
        ("stages=[plan],[plan,export]", ["stages=[plan]", "stages=[plan,export]"]),
        ("quantize.keep=*.q_proj,null", ["quantize.keep=*.q_proj", "quantize.keep=['null']"]),
    ],
)
def test_a_job_names_its_lists_as_they_were_typed(given: str, shown: list[str]) -> None:
    words = arguments.prepared(["recipe=tiny", "seed=1", given, "--multirun"])
    assert [job.swept for job, _ in arguments.check(words)] == [[word] for word in shown]


def test_a_run_s_folder_may_be_in_one_s_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    words = arguments.prepared(["recipe=tiny", "out=~/x"])
    assert composed(*words).out == "/home/someone/x"


def test_what_is_quoted_already_stays() -> None:
    assert arguments.prepared(["out='a b'"]) == ["out='a b'"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["a=1", "--multirun", "b=1,2"], ["a=1", "b=1,2", "--multirun"]),
        (["--cfg", "job", "a=1"], ["a=1", "--cfg", "job"]),
        (["-m", "model.path=a b,c"], ["model.path='a b','c'", "-m"]),
        (["force=quantize"], ["force=['quantize']"]),
        (["stages=plan,quantize"], ["stages=['plan','quantize']"]),
        (
            ["-m", "score.tasks=knowledge,summaries"],
            ["score.tasks=['knowledge'],['summaries']", "-m"],
        ),
        (["quantize.keep=*.layers.0.*"], ["quantize.keep=['*.layers.0.*']"]),
        (["quantize.keep=[]"], ["quantize.keep=[]"]),
        (["--multirun", "quantize=w8a8,w4a16"], ["quantize=w8a8,w4a16", "--multirun"]),
    ],
)
def test_options_anywhere_and_bare_words_for_lists(given: list[str], wanted: list[str]) -> None:
    assert arguments.prepared(given) == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["foo"], "foo: neither an option nor field=value"),
        (["--foo"], "--foo: no such option"),
        (["quantize.rounding=best"], "quantize.rounding is 'best'"),
        (["quantize.rate=0"], "quantize.rate is 0.0; wanted above 0 and at most 1"),
        (["quantize.rate=15"], "quantize.rate is 15.0; wanted above 0 and at most 1"),
        (["model.path=/a", "b/c.gguf"], "'model.path=/a b/c.gguf'"),
        (
            ["quantize=w3"],
            "quantize=w3: no such choice; there are w4a16, w4a16_channel, w4a16_learned, w8a16, "
            "w8a8",
        ),
        *(
            ([f"distill={name}"], f"distill={name}: no such choice; there are short, standard{OUT}")
            for name in ("null", "off", "none")
        ),
        (["extend=null"], f"extend=null: no such choice; there are ntk_2x, off, yarn_4x{OUT}"),
        (["-m", "quantize=w8a8,null"], "quantize=null: no such choice; there are w4a16, "),
        (
            ["-m", "seed=1,2", "--cfg", "job"],
            "-m and --cfg: wanted one of them; --cfg job shows a single run",
        ),
        (["--resolve"], "--resolve: wanted with --cfg job, whose ${…} it fills in"),
        (["model.path=~nobody/x y"], "model.path=~nobody/x y: no such model"),
        (["checkpoint=no'where"], "checkpoint=no'where: no config.json there; wanted a model's"),
        (["data=null"], "data=null: no such choice; there are file, python_docs"),
        (["~distill"], f"~distill: cannot be taken off; there are short, standard{OUT}"),
        (["~extend=off"], f"~extend=off: cannot be taken off; there are ntk_2x, off, yarn_4x{OUT}"),
        (["quantize=w8a8,w4a16"], "add --multirun"),
        (["quantize.bits=4,8"], "--multirun"),
        (["-m", "quantize.bits=4,8", "quantize.clip=(1"], "quantize.clip"),
        (["-m", "quantize.bits=4,many"], "many"),
        (["force=[quantize]", "only=score"], "wanted force=[score]"),
        (
            ["score.gate.tasks.cloze=3"],
            "not in struct; the recipe has none yet: +score.gate.tasks.cloze=3 adds it",
        ),
        (["+score.gate.kl=3"], "+score.gate.kl=3: the recipe has one: score.gate.kl=3 changes it"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compress", "recipe=tiny", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compress: ")
    assert said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["recipe=nope"], ["recipe=tiny", "model.path=/no/such"]])
def test_what_the_schema_does_not_say_is_told_before_it_is_imported(words: list[str]) -> None:
    code = "import sys; from compress.__main__ import main\n"
    code += "try: main()\nfinally: print({'torch', 'transformers'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no such" in ended.stderr
    assert ended.stdout == "set()\n"


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("plan", "beam=8", "beam: no such option; did you mean beams?"),
        ("plan", "engine=vlm", "engine is 'vlm'; wanted one of any, vllm, sglang, transformers"),
        ("serve", "overlng=end", "overlng: no such option; did you mean overlong?"),
        ("bench", "rounds=many", "rounds=many: wanted a whole number"),
        ("summarize", "windows=9", "windows: no such option; did you mean window?"),
        ("plan", "rate=1 rate=2", "rate is given twice, as 1 and 2; wanted one"),
        ("serve", "port=0 port=0", "port is given twice, as 0 and 0; wanted one"),
        ("bench", "rounds=1 rounds=2", "rounds is given twice, as 1 and 2; wanted one"),
        ("compare", "out=a out=b", "out is given twice, as a and b; wanted one"),
        ("harness", "shot=5", "shot: no such option; did you mean shots"),
        ("compare", "outs=x", "outs: no such option; did you mean out?"),
    ],
)
def test_small_commands_tell_a_wrong_option_before_what_takes_seconds_is_imported(
    command: str, word: str, said: str
) -> None:
    given = ["model=x"] if "engine" in word else []
    code = f"import sys; from compress import options; from compress.{command} import main\n"
    code += "try: options.run(main, '')\n"
    code += "finally: print({'torch', 'transformers', 'datasets', 'pandas'} & sys.modules.keys())"
    words = [sys.executable, "-c", code, *word.split(), *given]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"compress: {said}")
    assert ended.stdout == "set()\n"


def test_the_schema_is_had_without_what_reads_data_sets() -> None:
    code = "import sys, compress.pipeline; print({'datasets', 'pandas'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_options_of_hydra_s_own_are_left_to_it() -> None:
    schema.register()
    arguments.check(["recipe=tiny", "hydra/job_logging=none", "hydra.job.name=x"])


def test_recipes_are_listed_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compress", "recipe=?"])
    main()
    assert len(capsys.readouterr().out.splitlines()) == len(recipes())


def test_a_wrong_model_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with pytest.raises(UserError, match="no such model"):
        pipeline.run(composed("recipe=tiny", "model.path=/no/such", f"out={out}"))
    assert not list(tmp_path.iterdir())


UNTIL = "stages=[plan,calibrate,quantize,export,report]"


def test_only_reads_what_was_made_from_what_is_on_disk(small: Small) -> None:
    out = pipeline.run(small(UNTIL))
    before = (out / "report.json").read_bytes()
    with pytest.raises(UserError, match=r"quantize\.clip was true, is now false"):
        pipeline.run(small(UNTIL, "quantize.clip=false", "only=export"))

    other = (UNTIL, "quantize=w4a16")
    pipeline.run(small(*other, "only=quantize", "force=[quantize]"))
    with pytest.raises(UserError, match=r"quantize\.bits was 4, is now 8.*without only="):
        pipeline.run(small(UNTIL, "only=export"))
    with pytest.raises(UserError, match=r"plan: stale.*W8A8.*only=plan"):
        pipeline.run(small(*other, "only=report"))
    pipeline.run(small(*other, "only=plan"))
    stale = r"checkpoint: stale, and only=report reads it: the quantized that it was made from"
    with pytest.raises(UserError, match=stale):
        pipeline.run(small(*other, "only=report"))
    assert (out / "report.json").read_bytes() == before

    pipeline.run(small(*other, "only=export"))
    pipeline.run(small(*other, "only=report"))
    report = json.loads((out / "report.json").read_text())
    assert report["scheme"].startswith("W4A16")
    size = sum(f.stat().st_size for f in (out / "checkpoint").glob("*.safetensors"))
    assert report["bytes"]["after"] == size


def test_a_checkpoint_is_as_readable_as_other_files(small: Small) -> None:
    out = pipeline.run(small("stages=[calibrate,quantize,export]"))
    plain = out / "plain"
    plain.touch()
    modes = {stat.filemode(f.stat().st_mode) for f in (*out.glob("checkpoint/*"), plain)}
    assert len(modes) == 1


def test_a_broken_gate_writes_everything_and_ends_with_status_3(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["recipe=tiny", f"model.path={tiny_model}", f"out={tmp_path}", *SMALL]
    words += ["stages=[plan,calibrate,quantize,export,score,report]"]
    words += ["+score.gate.tasks.knowledge=99"]
    monkeypatch.setattr(sys, "argv", ["compress", *words, "score.gate.kl=0"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"compress: {tmp_path}: score.gate is broken: KL 0.0")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gate"]["tasks"] == {"knowledge": 99.0}
    assert report["verdict"]["findings"][0]["about"] == "It fails the recipe's gate"
    scored = (tmp_path / "stages" / "score.json").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["compress", *words, "score.gate.kl=0.5"])
    main()
    assert json.loads((tmp_path / "report.json").read_text())["gate"]["broken"] == []
    assert (tmp_path / "stages" / "score.json").stat().st_mtime_ns == scored


def test_a_token_that_takes_too_long_ends_with_status_3(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = tmp_path / "stages"

    def ended(*words: str) -> tuple[int, str]:
        """The status and the last line of the console."""
        given = ["recipe=tiny", f"model.path={tiny_model}", f"out={tmp_path}", *SMALL, *words]
        monkeypatch.setattr(sys, "argv", ["compress", *given])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err.splitlines()[-1]
        return 0, ""

    judged = "stages=[plan,calibrate,quantize,export,serve,score,report]"
    limit = "score.gate.token_ms=0.001"
    status, last = ended(judged.replace("serve,", ""), limit)
    assert status == 2
    assert last == (
        "compress: score.gate.token_ms limits what serve measures, which "
        "stages=[plan,calibrate,quantize,export,score,report] leaves out; add it, or drop the "
        "limit: score.gate.token_ms=null"
    )
    assert not stages.exists()

    # One stage at a time: scores are not judged where no token was timed.
    assert ended("stages=[plan,calibrate,quantize,export]")[0] == 0
    status, last = ended(judged, limit, "only=score")
    assert status == 2
    assert last.startswith(
        f"compress: score.gate.token_ms limits what serve measures, which is not in {stages}; run "
        "it first with only=serve"
    )
    assert not (stages / "score.json").exists()
    assert ended(judged, limit, "only=serve")[0] == 3

    status, last = ended(judged, limit)
    median = json.loads((stages / "serve.json").read_text())["metrics"]["after"]["tpot_ms"]["p50"]
    assert status == 3
    said = last.removeprefix(f"compress: {tmp_path}: score.gate is broken: ")
    took = float(said.split(" ms a token, at most 0.001 allowed")[0])
    assert took == pytest.approx(median, abs=0.05)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gate"] == {
        "kl": 0.2,
        "tasks": {},
        "token_ms": 0.001,
        "faults": None,
        "broken": [said],
    }
    assert report["verdict"]["findings"][0]["text"] == f"{said}."
    assert all(said in (tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))

    made = {name: (stages / f"{name}.json").stat().st_mtime_ns for name in ("serve", "score")}
    assert ended(judged, limit, "only=score")[0] == 3
    status, last = ended(judged, limit, "only=score", "serve.backend=reference")
    assert status == 2
    assert "serve.backend was null, is now" in last
    assert ended(judged, "score.gate.token_ms=60000") == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gate"]["broken"] == []
    assert " a token, at most 60000 ms allowed." in report["verdict"]["findings"][0]["text"]
    assert made == {name: (stages / f"{name}.json").stat().st_mtime_ns for name in made}
    (stages / "serve.json").unlink()
    status, last = ended(judged, "score.gate.token_ms=60000", "only=report")
    assert status == 2
    assert "run it first with only=serve" in last
