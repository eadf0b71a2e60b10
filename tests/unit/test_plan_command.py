"""The planning command: what it prints and writes, and how it refuses."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compress import options, plan
from compress.errors import UserError
from compress.plan import main
from compress.planning import study
from compress.planning.shape import read_model, shape_of

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL))
    return file


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.jsonl"
    lines = [{"prompt": 20 + i * i, "new": 5 + i % 7, "at": i / 50} for i in range(24)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_a_plan_is_printed_and_written(
    config: Path, requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model={config}", "memory=24GB", f"requests={requests}", f"out={tmp_path / 'out'}"]
    main(words)
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "out/plan.json").read_text())
    assert found["device"]["name"] == "a10g"
    assert found["requests"]["count"] == 24
    assert found["long_context"]["over"] == 1  # of 20 + 23² tokens, where the window has 512
    assert [row["scheme"] for row in found["schemes"]][:3] == ["16 bit", "W8A16", "W8A8"]
    about = [one["about"] for one in found["advice"]]
    assert about[0] == "batching"
    assert about[-2:] == ["quantization", "distillation"]
    for one in found["advice"]:
        assert re.search(r"\d", one["text"]), one
        assert one["text"].replace("\u00a0", " ") in said
    before, after = (found["batching"][way]["seconds"] for way in ("static", "continuous"))
    assert after <= before * 1.001


def test_the_page_stands_alone(config: Path, requests: Path, tmp_path: Path) -> None:
    main([f"model={config}", f"requests={requests}", "device=l4", f"out={tmp_path / 'out'}"])
    page = (tmp_path / "out/plan.html").read_text()
    found = json.loads((tmp_path / "out/plan.json").read_text())
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "http" not in page
    assert page.count("<svg") > 10
    assert all(row["scheme"] in page for row in found["schemes"])


def test_a_yarn_has_its_longer_window(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    file = tmp_path / "yarn.json"
    file.write_text(json.dumps(SMALL | {"rope_scaling": yarn}))
    assert shape_of(read_model(str(file)), "yarn").positions == 2048


def test_schemes_that_cannot_be_are_told_once_for_each_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(SMALL | {"hidden_size": 192, "intermediate_size": 320}))
    main([f"model={file}", f"out={tmp_path / 'out'}"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Left out")]
    assert "W4A16 g128: its groups do not divide this model; see W4A16 g64" in said[0]


def test_what_does_not_fit_is_refused_with_what_would(config: Path, tmp_path: Path) -> None:
    words = [f"model={config}", "requests=100x28", f"out={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=r"takes \d\.\dMB with W4A16") as raised:
        main([*words, "memory=1MB"])
    wanted = re.search(r"wanted memory=(\d\.\dMB)", str(raised.value))
    assert wanted is not None
    main([*words, f"memory={wanted[1]}"])
    assert (tmp_path / "out/plan.json").exists()


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("W3A16", "^scheme=W3A16: no such scheme; wanted one of W8A16"),
        ("16 bit", r"^memory=5MB: .* 6.9MB with 16 bit; wanted memory=6.9MB or more, or one of W8"),
    ],
)
def test_a_scheme_that_is_none_and_one_that_does_not_fit_are_told_apart(
    config: Path, tmp_path: Path, scheme: str, said: str
) -> None:
    words = [f"model={config}", "requests=100x28", f"out={tmp_path / 'out'}", "memory=5MB"]
    with pytest.raises(UserError, match=said):
        main([*words, f"scheme={scheme}"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory=24GB"], "model is not given"),
        (["model=x", "memory=24"], "memory is '24'"),
        (["model="], "model is empty; wanted a model's folder or its config.json"),
        (
            ["model=x", "device=a10g", "memory=80GB"],
            "memory is 80GB; a10g has 24GB: wanted no more, or another device",
        ),
        (
            ["model=x", "memory=900GB"],
            "memory is 900GB; h200 has 141GB, the most of the devices that are planned for",
        ),
        (["model=x", "device=a100", "memory=80GiB"], "model=x: no such file"),
        (["model=x", "device=cpu", "memory=900GB"], "model=x: no such file"),
        (["model=x", "device=tpu"], "device is 'tpu'; wanted one of a10g, l4,"),
        (["model=x", "beams=1"], "beams is 1"),
        (["model=x", "rate=no"], "rate=no"),
        (["model=x", "speed=1"], "speed: no such option"),
        (["model=x"], "model=x: no such file"),
        (["model=~no-user/x"], "model=~no-user/x: no such file"),
    ],
)
def test_a_mistake_ends_with_one_line_and_status_2(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    with pytest.raises(SystemExit) as ended:
        options.run(main, "")
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (SMALL | {"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 256}, "no model_type"),
        ([], "no model_type"),
        (
            SMALL | {"model_type": "abacus"},
            r"\(model_type is 'abacus'; wanted one such as llama or qwen2\)$",
        ),
        (SMALL | {"model_type": ["llama"]}, r"\(model_type is \['llama'\]; wanted one such as"),
        (SMALL | {"num_hidden_layers": 0}, "json: num_hidden_layers is 0; wanted 1 to 1,000$"),
        (
            SMALL | {"vocab_size": 10**12, "hidden_size": 0},
            "json: hidden_size is 0; wanted 1 to 100,000; vocab_size is 1000000000000; wanted 1 to "
            "10,000,000$",
        ),
        (
            {"model_type": "llama"},
            "json: model_type is llama, no sizes are given; wanted the config.json of a model, "
            "with num_hidden_layers, hidden_size and the like$",
        ),
        ({"model_type": "gpt2"}, "with n_layer, n_embd and the like$"),
        (
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64},
            "the blocks of a gpt2 hold no nn.Linear",
        ),
        ({"model_type": "gpt2", "n_layer": 0}, "json: n_layer is 0; wanted 1 to 1,000$"),
        (SMALL | {"num_attention_heads": 0}, "not a config.json that transformers knows"),
        (SMALL | {"head_dim": 0}, "json: head_dim is 0; wanted 1 to 10,000$"),
        (
            SMALL | {"rope_scaling": {"rope_type": "x"}},
            r"^config.json: transformers can make no llama of it \('x': no such name\)$",
        ),
        (
            SMALL | {"rope_scaling": {"rope_type": "yarn"}},
            "not a config.json that transformers knows .*Missing required keys",
        ),
        (SMALL | {"dtype": "x"}, "not a config.json that transformers knows .*no attribute 'x'"),
        (SMALL | {"pad_token_id": 1000}, r"can make no llama of it \(Padding_idx must be within"),
    ],
)
def test_a_config_that_is_none_is_told_by_what_is_wrong(
    fields: object, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=said) as refused:
        main([f"model={file}", f"out={tmp_path / 'out'}"])
    assert "\n" not in str(refused.value)


def test_weights_are_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x08\xbb\xff")
    with pytest.raises(UserError, match="no text file; wanted a model's folder or its config"):
        main([f"model={file}", f"out={tmp_path / 'out'}"])


def test_a_folder_that_cannot_be_written_is_refused_before_planning(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "study", lambda _: pytest.fail("planned all the same"))
    with pytest.raises(UserError, match=f"out={config}/x: cannot be written"):
        main([f"model={config}", f"out={config}/x"])


def test_caches_are_planned_beside_the_scheme_that_is_asked_for(
    config: Path, tmp_path: Path
) -> None:
    words = [f"model={config}", "memory=1GB", f"out={tmp_path / 'out'}"]
    at_once = {}
    for asked, scheme in (("16 bit", "16 bit"), ("w8a8", "W8A8")):
        main([*words, f"scheme={asked}"])
        found = json.loads((tmp_path / "out/plan.json").read_text())
        assert found["base"] == scheme
        at_once[scheme] = {row["rule"]: row["requests"] for row in found["reservations"]}
    assert at_once["W8A8"]["paged"] > at_once["16 bit"]["paged"]


def test_the_usage_names_every_option() -> None:
    assert plan.__doc__ is not None
    for field in dataclasses.fields(plan.Options):
        assert re.search(rf"^    {field.name} ", plan.__doc__, re.MULTILINE), field.name


def test_a_plan_is_called_by_the_model_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Small-1.5B"
    source = folder / "stages/source"  # where a run leaves the model that it converted
    monkeypatch.chdir(tmp_path)
    for model in (folder, source, folder / "config.json", source / "config.json"):
        model.parent.mkdir(parents=True, exist_ok=True)
        if model.name != "config.json":
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text(json.dumps(SMALL))
        main([f"model={model}", "requests=100x28", "device=l4"])
    assert [place.name for place in (tmp_path / "runs/plan").iterdir()] == ["Small-1.5B"]


@pytest.mark.parametrize(
    "words", [["compress.plan", "model=x"], ["compress.serve", "checkpoint=x"]]
)
def test_ctrl_c_while_libraries_are_imported_is_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,  # from where torch is imported
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130
    assert done.stderr == "compress: stopped\n"
