"""The whole way on the tiny model: what it leaves, what it skips, what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress import pipeline, steps
from compress.config import Config
from compress.errors import UserError
from compress.given import STAGES
from compress.report.words import significant
from compress.runtime.loader import load

Small = Callable[..., Config]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    from small import SMALL, composed

    out = tmp_path_factory.mktemp("finished") / "run"
    pipeline.run(composed("recipe=tiny", f"model.path={tiny_model}", f"out={out}", *SMALL))
    return out


def test_report_holds_what_it_promises(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert report["recipe"] == "tiny"
    assert 0 < report["bytes"]["after"] < report["bytes"]["before"]
    assert 8 < report["bits_per_weight"] < 16
    assert 0 < report["fidelity"]["kl"] < 0.2
    assert report["fidelity"]["top1"] > 0.7
    assert report["fidelity"]["ppl"]["before"] > 1
    assert {t["name"] for t in report["tasks"]} == {"knowledge"}
    assert report["faults"] == []
    assert report["gate"] == {
        "kl": 0.2,
        "tasks": {},
        "token_ms": None,
        "faults": None,
        "broken": [],
    }
    for side in ("before", "after"):
        assert (
            report["latency"][side]["ttft_ms"]["p95"] >= report["latency"][side]["ttft_ms"]["p50"]
        )
        assert report["latency"][side]["decode_tokens_per_s"] > 0
    left_out = ("allocate", "shrink", "report")
    assert [s["name"] for s in report["stages"]] == [s for s in STAGES if s not in left_out]
    assert all(s["peak_rss_bytes"] > 10**8 and s["skipped"] is False for s in report["stages"])
    assert report["seed"] == 0
    assert report["versions"]["torch"] == torch.__version__
    assert (finished / "report.html").read_text().lstrip().startswith("<!")
    card = (finished / "checkpoint" / "README.md").read_text()
    assert f"KL {significant(report['fidelity']['kl'])} nats a token" in card
    assert "| knowledge | " in card


def test_checkpoint_is_int8_outside_qkv_and_head(finished: Path) -> None:
    tensors = load_file(finished / "checkpoint" / "model.safetensors")
    integers = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    wanted = ("o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    assert integers == {n for n in tensors if n.endswith(wanted)}
    assert integers
    for name in integers:
        scale = tensors[f"{name}_scale"]
        assert scale.shape == (tensors[name].shape[0], 1)
        assert scale.dtype == torch.bfloat16
    assert "lm_head.weight" not in tensors  # tied, so stored once


def test_checkpoint_loads_in_transformers_with_the_doubled_window(finished: Path) -> None:
    folder = finished / "checkpoint"
    before = json.loads((finished / "stages" / "extend.json").read_text())["metrics"]["window"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.max_position_embeddings == before["after"] == 2 * before["before"]
    ids = AutoTokenizer.from_pretrained(folder)("The file is", return_tensors="pt")["input_ids"]
    ours = load(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs, found = model(ids).logits, ours(ids).logits
    assert (theirs - found).abs().max() < 0.02 * theirs.abs().max()
    assert torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


def test_second_run_does_nothing(
    small: Small, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {f: f.stat().st_mtime_ns for f in finished.rglob("*") if f.is_file()}
    before = {f: t for f, t in before.items() if f.name not in (".lock", "log.txt")}
    config = small()
    config.out = str(finished)
    pipeline.run(config)
    assert {f: f.stat().st_mtime_ns for f in before} == before
    assert "nothing to do" in (finished / "log.txt").read_text()


def test_same_seed_same_bytes(small: Small, finished: Path) -> None:
    pipeline.run(small("stages=[plan,calibrate,quantize,distill,extend,export]"))
    again, first = (files(Path(out) / "checkpoint") for out in (small().out or "", finished))
    assert len(again.pop("README.md")) < len(first.pop("README.md"))  # no scores on its card
    assert again == first


def test_changed_field_is_refused_by_name_then_rebuilt_by_force(small: Small) -> None:
    stages = "stages=[plan,calibrate,quantize]"
    out = Path(small().out or "")
    pipeline.run(small(stages))
    before = files(out / "stages" / "quantize")
    with pytest.raises(
        UserError, match=r"quantize\.clip was true, is now false.*force=\[quantize\]"
    ):
        pipeline.run(small(stages, "quantize.clip=false"))
    assert files(out / "stages" / "quantize") == before
    calibrated = (out / "stages" / "calibrate.json").stat().st_mtime_ns
    pipeline.run(small(stages, "quantize.clip=false", "force=[quantize]"))
    assert files(out / "stages" / "quantize")["model.safetensors"] != before["model.safetensors"]
    assert (out / "stages" / "calibrate.json").stat().st_mtime_ns == calibrated


def test_changed_files_are_told_by_the_field_that_names_them(small: Small, tmp_path: Path) -> None:
    stages = "stages=[calibrate,quantize]"
    text = tmp_path / "text.txt"
    text.write_text("One word after the other. " * 200)
    out = pipeline.run(small("stages=[calibrate]"))
    other = tmp_path / "other"
    shutil.copytree(small().model.path, other)
    (other / "generation_config.json").write_text("{}")
    said = f"{out}/stages/calibrate: made with other settings: "
    way = ". Add force=[calibrate] to rebuild from there on, or give another out=FOLDER"
    for words, told in (
        ([f"model.path={other}"], f"model.path is {other}, another model than before"),
        (["data=file", f"data.path={text}"], f"data.path is {text}, another text than before"),
    ):
        with pytest.raises(UserError) as refused:
            pipeline.run(small(stages, *words))
        assert str(refused.value) == f"{said}{told}{way}"


def test_a_damaged_manifest_is_told_by_its_file_and_made_again_by_force(small: Small) -> None:
    stages = "stages=[calibrate,quantize]"
    out = pipeline.run(small(stages))
    manifest = out / "stages" / "quantize.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:200])
    for words in ([], ["only=calibrate"]):
        with pytest.raises(UserError, match=rf"^{manifest}: damaged .*force=\[quantize\]$"):
            pipeline.run(small(stages, *words))
    pipeline.run(small(stages, "force=[quantize]"))
    assert json.loads(manifest.read_text())["key"] == json.loads(whole)["key"]


def test_a_file_that_is_named_anew_is_told_once(small: Small) -> None:
    config = small("score.text=b.txt")
    first = {"score_text": None, "score": {"text": None}}
    second = {"score_text": "a" * 64, "score": {"text": "b.txt"}}
    assert steps._changed(first, second, config) == ["score.text was null, is now b.txt"]
    moved = {**second, "score": {"text": "c.txt"}}
    assert steps._changed(moved, second, config) == ['score.text was "c.txt", is now "b.txt"']


def test_keys_are_told_apart_in_the_user_s_words(small: Small) -> None:
    config = small("distill.teacher=/t", "score.text=null", "quantize.clip=false")
    first = {"teacher": None, "score_text": "a" * 64, "kv_cache": "16", "version": 1}
    first |= {"score_tasks": {"mine": "b" * 64}, "quantize": {"clip": True}}
    second = {"teacher": "c" * 64, "score_text": None, "kv_cache": "v8", "version": 2}
    second |= {"score_tasks": {"mine": "d" * 64}, "quantize": {"clip": False}}
    assert steps._changed(first, second, config) == [
        'serve.kv_cache was "16", is now "v8"',
        "quantize.clip was true, is now false",
        "what the task mine asks has changed",
        "score.text was another text, is now null",
        "distill.teacher was null, is now /t",
        "the stage's version was 1, is now 2",
    ]


SHRINK = {"blocks": 2, "mlp": None}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"budget": "60MB"}, {"budget": "50MB"}, ['budget was "60MB", is now "50MB"']),
        ({}, {"shrink": SHRINK}, ["shrink was not run before"]),
        ({"shrink": SHRINK}, {}, ["shrink was run before"]),
        ({"shrink": SHRINK}, {"shrink": SHRINK | {"blocks": 3}}, ["shrink.blocks was 2, is now 3"]),
        (
            {"keep": [], "shrink": SHRINK},
            {"keep": ["x"]},
            ['quantize.keep was [], is now ["x"]', "shrink was run before"],
        ),
    ],
)
def test_what_the_budget_is_divided_by_is_told_in_the_user_s_words(
    small: Small, before: dict[str, Any], now: dict[str, Any], told: list[str]
) -> None:
    assert steps._changed({"scheme": before}, {"scheme": now}, small()) == told


def test_only_runs_one_stage_from_what_is_on_disk(small: Small) -> None:
    out = Path(small().out or "")
    with pytest.raises(UserError, match=r"quantize needs statistics.*only=calibrate"):
        pipeline.run(small("only=quantize"))
    pipeline.run(small("stages=[plan,calibrate,quantize]", "only=calibrate"))
    assert sorted(p.name for p in (out / "stages").glob("*.json")) == ["calibrate.json"]
    pipeline.run(small("stages=[plan,calibrate,quantize]", "only=quantize"))
    assert (out / "stages" / "quantize" / "model.safetensors").exists()


def test_a_stage_left_out_is_named_before_anything_runs(small: Small) -> None:
    with pytest.raises(UserError, match="quantize needs statistics, made by calibrate"):
        pipeline.run(small("stages=[plan,quantize]"))
    assert not list((Path(small().out or "") / "stages").glob("*.json"))


def test_a_second_run_in_the_same_folder_is_turned_away(small: Small) -> None:
    config = small("stages=[plan]")
    with (
        pipeline._own(Path(config.out or "")),
        pytest.raises(UserError, match="another run is at work there"),
    ):
        pipeline.run(config)


@pytest.mark.parametrize("quantize", ["w8a16", "w4a16", "w4a16_channel", "w4a16_learned"])
def test_other_schemes_go_the_whole_way_to_a_checkpoint(small: Small, quantize: str) -> None:
    config = small(
        f"quantize={quantize}",
        "extend=off",
        "extend.steps=0",
        "quantize.steps=2",
        "stages=[plan,calibrate,quantize,extend,export]",
        out=quantize,
    )
    learned = quantize.endswith("learned")
    assert (config.quantize.rounding == "learned") == learned == bool(config.calibrate.written)
    out = pipeline.run(config)
    folder = out / "checkpoint"
    tensors = load_file(folder / "model.safetensors")
    assert any(name.endswith("down_proj.weight_packed") for name in tensors)
    ids = torch.arange(20, 40).unsqueeze(0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted, found = theirs(ids).logits, load(folder, dtype=torch.float32)(ids).logits
    assert (wanted - found).abs().max() < 0.01 * wanted.abs().max()


def test_native_engine_quantizes_v_as_well(small: Small) -> None:
    out = pipeline.run(small("engine=native", "stages=[plan,calibrate,quantize]"))
    tensors = load_file(out / "stages" / "quantize" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.v_proj.weight"].dtype == torch.int8
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.self_attn.k_proj.weight"].dtype == torch.bfloat16
