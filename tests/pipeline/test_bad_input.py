"""Whatever is wrong with the input: one clear line, status 2, nothing half-written."""

import errno
import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from answering import server
from safetensors.torch import load_file, save_file
from small import SMALL
from transformers import MixtralConfig, T5Config

from compress import artifact, tiny
from compress.__main__ import main
from compress.training import endpoint

Cli = Callable[..., str]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run `python -m compress` with these arguments; the message with which it ended."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["compress", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == status
        stderr = capsys.readouterr().err
        assert "Traceback" not in stderr
        lines = [line for line in stderr.splitlines() if line.startswith("compress: ")]
        assert len(lines) == 1, stderr
        return stderr[stderr.index("compress: ") :]

    return run


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def nothing_written(out: Path) -> bool:
    return not list(out.glob("checkpoint")) and not list(out.glob("stages/*.json"))


def test_no_recipe_and_a_wrong_one_list_the_recipes(cli: Cli) -> None:
    for arguments in ([], ["recipe=int8_70b"]):
        message = cli(*arguments)
        assert "smollm2_int8" in message
        assert "tiny Llama" in message


def test_no_model_is_told_by_the_name_of_its_field(cli: Cli) -> None:
    wanted = "compress: model.path is not given; wanted model.path=PATH_OR_HUB_ID\n"
    assert cli("recipe=judge") == wanted


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("quantize.bit=4", "quantize.bit: no such field; quantize has bits"),
        ("quantise.bits=4", "quantise.bits: no such field; the configuration has quantize"),
        ("quantize.bits=5", "quantize.bits is 5; wanted 8 or 4"),
        ("quantize.bits=many", "quantize.bits is 'many'; wanted a whole number"),
        ("report.requests=lengths.jsonl", "is 'lengths.jsonl'; wanted a whole number, or null"),
        ("serve.requests=null", "serve.requests is null; wanted a whole number"),
        ("data.samples=1.5", "data.samples is 1.5; wanted a whole number"),
        ("quantize.clip=maybe", "quantize.clip is 'maybe'; wanted true or false"),
        ("score.gate=3", "score.gate is 3; wanted its fields"),
        ("+score.gate.tasks.knowledge=x", "score.gate.tasks.knowledge is 'x'; wanted a number"),
        ("score.gate.token_ms=fast", "score.gate.token_ms is 'fast'; wanted a number, or null"),
        ("score.gate.token_ms=0", "score.gate.token_ms is 0.0; wanted a finite number above 0"),
        ("score.gate.token_ms=nan", "score.gate.token_ms is nan; wanted a finite number above 0"),
        ("serve.requests=[1", "serve.requests=[1: cannot be read (no viable alternative"),
        ("recipe=judge", "recipe is given twice, as tiny and judge; wanted one"),
        ("engine=tgi", "engine is 'tgi'; wanted one of any, vllm"),
        ("only=quantise", "only is 'quantise'; wanted one of plan, shrink, calibrate"),
        ("model.dtype=int8", "model.dtype is 'int8'; wanted one of auto"),
        ("plan.memory=lots", "plan.memory is 'lots'; wanted a size such as 24GB"),
        ("extend.method=stretch", "extend.method is 'stretch'; wanted one of ntk, yarn, linear"),
        ("extend.near=2", "extend.near is 2.0; wanted a share, 0 to 1"),
        ("extend.top_k=0", "extend.top_k is 0; wanted at least 1"),
        ("data.length=2", "data.length is 2; wanted at least 16"),
        ("distill.tasks=[mmlu]", "distill.tasks: no suite called mmlu; there are knowledge"),
        ("distill.tasks=[summaries]", "summaries is of kind generation, which takes too long"),
        (
            "model.path=/no/such/folder",
            "model.path=/no/such/folder: no such model; wanted a folder",
        ),
        ("model.path=package:no_such.part/x.gguf", "the package no_such.part is not installed"),
        ("data.path=nowhere.txt", "nowhere.txt: no such file; wanted a .txt, .jsonl or .parquet"),
        ("stages=[quantize]", "quantize needs"),
    ],
)
def test_a_field_that_cannot_be(cli: Cli, tiny_model: Path, argument: str, said: str) -> None:
    model = [] if argument.startswith("model.path=") else [f"model.path={tiny_model}"]
    assert said in cli("recipe=tiny", *model, "out=run", argument)
    assert nothing_written(Path("run"))


def test_all_that_is_wrong_is_said_at_once(cli: Cli) -> None:
    message = cli(
        "recipe=tiny", "quantize.bits=5", "quantize.activation_bits=null", "data.samples=0"
    )
    assert "quantize.bits is 5" in message
    assert "data.samples is 0" in message


def test_a_hub_id_with_no_hub_says_to_give_a_folder(cli: Cli) -> None:
    message = cli("recipe=int8_7b", "out=run", "data.path=null")
    assert "Qwen/Qwen2.5-7B-Instruct: cannot be fetched from the hub" in message
    assert "give a local folder by model.path=FOLDER" in message


def test_models_that_are_not_for_this(cli: Cli, model: Path) -> None:
    run = ("recipe=tiny", f"model.path={model}", "out=run", *SMALL)
    config = model / "config.json"
    config.write_text(json.dumps(MixtralConfig().to_dict()))
    assert "not supported yet" in cli(*run)
    config.write_text(json.dumps(T5Config().to_dict()))
    assert "decoder-only" in cli(*run)
    config.write_text("{")
    assert "config.json" in cli(*run)
    config.unlink()
    assert "no config.json" in cli(*run)
    assert nothing_written(Path("run"))


def test_weights_that_are_broken(cli: Cli, model: Path) -> None:
    run = ("recipe=tiny", f"model.path={model}", "out=run", *SMALL)
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "damaged or cut short" in cli(*run)
    file.write_bytes(whole)
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(tensors, file)
    assert "model.layers.1.mlp.down_proj.weight holds NaN or Inf" in cli(*run)
    assert not Path("run/checkpoint").exists()


@pytest.mark.parametrize(
    ("name", "content", "more", "said"),
    [
        ("empty.txt", "", [], "no text in it"),
        ("short.txt", "Too short.", [], "wanted at least one window"),
        ("bare.jsonl", '{"body": "x"}\n', [], "record 1 has no field 'text', only 'body'"),
        ("number.jsonl", '{"text": 7}\n', [], "'text' holds int, wanted text"),
        ("chat.jsonl", '{"messages": "hi"}\n', ["data.messages=messages"], "wanted a list of"),
        ("broken.jsonl", '{"text": ', [], "cannot be read"),
        ("words.csv", "a,b", [], "ends in '.csv'; wanted .txt, .jsonl or .parquet"),
    ],
)
def test_data_that_is_wrong(
    cli: Cli, tiny_model: Path, name: str, content: str, more: list[str], said: str
) -> None:
    Path(name).write_text(content)
    run = ("recipe=tiny", f"model.path={tiny_model}", "out=run", *SMALL)
    assert said in cli(*run, f"data.path={name}", *more)
    assert not list(Path("run").glob("stages/calibrate.json"))


def test_patterns_and_groups_that_fit_nothing(cli: Cli, tiny_model: Path) -> None:
    run = ("recipe=tiny", f"model.path={tiny_model}", "out=run", *SMALL)
    assert "lm_haed" in cli(*run, "quantize.keep=[lm_haed]")
    message = cli(*run, "quantize=w4a16", "quantize.group_size=100")
    assert "100" in message
    assert "32" in message
    assert nothing_written(Path("run"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["distill.endpoint=http://127.0.0.1:9/v1"],
            "distill.endpoint: http://127.0.0.1:9/v1/models: [Errno 111] Connection refused",
        ),
        (["shrink.blocks=9", "stages=[shrink,calibrate]"], "shrink.blocks is 9; the model has 4"),
        (["quantize=w4a16", "quantize.group_size=100"], "group size 100 cannot be"),
        (["quantize.keep=lm_haed"], "keep: 'lm_haed' matches no linear"),
        (["score.text=nowhere.txt"], "score.text=nowhere.txt: cannot be read as text"),
        (["score.text=~no-user/x"], "score.text=~no-user/x: cannot be read as text"),
        (["serve.backend=triton"], "backend triton needs a cuda or xpu device"),
    ],
)
def test_what_a_late_stage_cannot_do_is_told_before_the_tiny_model_is_trained(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(tiny, "make_tiny", lambda _: pytest.fail("it was trained first"))
    monkeypatch.setattr(endpoint, "PAUSE", 0.0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert said in cli("recipe=tiny", *arguments)
    assert not Path("runs").exists()


def test_what_a_late_stage_cannot_do_with_a_given_model_is_told_first(
    cli: Cli, model: Path, stories260k: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("recipe=tiny", f"model.path={model}", "out=run", *SMALL)
    assert "another vocabulary" in cli(*run, f"distill.teacher={stories260k}")

    def says_nothing(path: str, body: dict[str, object]) -> tuple[int, object]:
        if path == "/tokenize":
            return 404, {}
        return 200, {"data": [{"id": "it"}], "choices": [{"text": "x"}]}

    with server(says_nothing) as url:
        assert "holds no prompt_logprobs" in cli(*run, f"distill.endpoint={url}")
    config = model / "config.json"
    described = json.loads(config.read_text())
    described["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    config.write_text(json.dumps(described))
    assert "it was stretched by linear" in cli(*run)
    assert not Path("run").exists()


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers(cli: Cli, tiny_model: Path) -> None:
    message = cli("recipe=tiny", f"model.path={tiny_model}", "out=run", "plan.memory=1MB", *SMALL)
    assert "MB needed (weights" in message
    assert "1.00 MB given" in message
    assert nothing_written(Path("run"))


def test_an_output_folder_that_cannot_be(cli: Cli, tiny_model: Path) -> None:
    Path("file").write_text("")
    message = cli("recipe=tiny", f"model.path={tiny_model}", "out=file/run", *SMALL)
    assert "out=file/run: cannot be written" in message


def test_a_disk_that_fills_up(cli: Cli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, text: str) -> None:
        if file.name == "config.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        original(file, text)

    original = artifact.write_text
    monkeypatch.setattr(artifact, "write_text", full)
    run = ("recipe=tiny", f"model.path={tiny_model}", "out=run", *SMALL)
    assert "No space left on device; what is done stays on disk" in cli(*run)
    assert Path("run/stages/calibrate.json").exists()
    assert not Path("run/stages/quantize").exists()


def test_a_disk_that_fills_up_while_it_trains(
    cli: Cli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the system's own, so what torch makes of it is what it is."""

    def full(state: object, file: BinaryIO) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            save(state, file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    save = torch.save
    run = ("recipe=tiny", f"model.path={tiny_model}", "out=run", *SMALL)
    run = (*run, "stages=[plan,calibrate,quantize,distill]")
    monkeypatch.setattr(torch, "save", full)
    message = cli(*run)
    assert "distill.state: File too large; what is done stays on disk" in message
    made = Path("run/stages/labels")
    assert sorted(f.name for f in made.iterdir()) == ["000000.arrow", "000016.arrow"]
    assert list(Path("run/stages/distill.partial/work").iterdir()) == []
    assert Path("run/stages/quantize.json").exists()
    assert not Path("run/stages/distill").exists()


def test_help_needs_no_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compress", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0)
    shown = capsys.readouterr().out
    assert "python -m compress recipe=NAME" in shown
    assert "smollm2_int8" in shown
