"""A checkpoint that is there already, from whatever tool, judged beside its original."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small import SMALL, composed

from compress import pipeline
from compress.config import Config
from compress.errors import ConfigError, GateError, UserError

JUDGED = [word for word in SMALL if word.startswith(("serve.", "score."))]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A W8A8 checkpoint outside of any run's folder."""
    out = tmp_path_factory.mktemp("made") / "run"
    stages = "stages=[plan,calibrate,quantize,export]"
    pipeline.run(composed("recipe=tiny", f"model.path={tiny_model}", f"out={out}", stages, *SMALL))
    folder = out.parent / "peer"
    shutil.move(out / "checkpoint", folder)
    return folder


@pytest.fixture
def judge(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    def make(checkpoint: Path, *overrides: str) -> Config:
        words = ["recipe=judge", f"model.path={tiny_model}", f"checkpoint={checkpoint}"]
        return composed(*words, *JUDGED, f"out={tmp_path / 'run'}", *overrides)

    return make


def test_a_checkpoint_is_judged_where_it_lies(
    judge: Callable[..., Config], peer: Path, tiny_model: Path
) -> None:
    before = {file.name: file.read_bytes() for file in peer.iterdir()}
    out = pipeline.run(judge(peer))
    report = json.loads((out / "report.json").read_text())
    sizes = [(at / "model.safetensors").stat().st_size for at in (tiny_model, peer)]
    assert report["bytes"] == {
        "before": sizes[0],
        "after": sizes[1],
        "measured": True,
        "by_part": None,
    }
    assert report["scheme"] == "W8A8"
    assert report["bits_per_weight"] == pytest.approx(16 * sizes[1] / sizes[0], rel=0.02)
    assert 0 < report["fidelity"]["kl"] < 0.2
    assert report["faults"] == []
    assert report["latency"]["after"]["decode_tokens_per_s"] > 0
    assert [stage["name"] for stage in report["stages"]] == ["serve", "score"]
    assert "W8A8: " in report["verdict"]["headline"]
    assert "% smaller" in report["verdict"]["headline"]
    page = (out / "report.html").read_text()
    assert "The files of the weights: " in page
    assert "the stage <code>export</code> was not run" not in page
    assert {file.name: file.read_bytes() for file in peer.iterdir()} == before
    assert not (out / "checkpoint").exists()
    assert not (out / "stages/report/card.md").exists()  # we did not make it


def test_what_is_broken_in_it_is_found_and_its_gate_ends_the_run(
    judge: Callable[..., Config], peer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(peer, folder)
    tensors = load_file(peer / "model.safetensors")
    for name in tensors:
        if name.startswith("model.layers.1.") and name.endswith("weight_scale"):
            tensors[name] = 2 * tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GateError, match="KL"):
        pipeline.run(judge(folder, "stages=[score,report]", "score.gate.kl=0.02"))
    report = json.loads((tmp_path / "run/report.json").read_text())
    (fault,) = report["faults"]
    assert fault["text"].startswith("Block 1 is off by")
    assert fault["text"].endswith("so its scales or norms are wrong.")
    # Another checkpoint in the same run's folder is scored anew.
    assert pipeline.run(judge(peer, "stages=[score,report]", "score.gate.kl=0.2"))
    assert json.loads((tmp_path / "run/report.json").read_text())["faults"] == []


def test_a_report_of_an_earlier_version_is_drawn_anew_unasked(
    judge: Callable[..., Config], peer: Path
) -> None:
    config = judge(peer, "stages=[score,report]", "score.gate.kl=0.2")
    made = pipeline.run(config) / "stages" / "report"
    (made / "card.md").write_text("16 bit, made by the recipe judge")
    manifest = made.with_name("report.json")
    earlier = json.loads(manifest.read_text())
    earlier["key"]["version"] = earlier["version"] = 3
    manifest.write_text(json.dumps(earlier))
    pipeline.run(config)
    assert not (made / "card.md").exists()


def test_each_checkpoint_has_a_folder_of_its_own(peer: Path, tiny_model: Path) -> None:
    words = ["recipe=judge", f"model.path={tiny_model}"]
    assert composed(*words, f"checkpoint={peer}").out == "runs/judge/peer"
    inside = peer.parent / "int8" / "model" / "checkpoint"
    shutil.copytree(peer, inside)
    assert composed(*words, f"checkpoint={inside}").out == "runs/judge/int8-model-checkpoint"


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def emptied(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def taken_away(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def reshaped(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def left_out(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def of_another_method(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (cut, r"model\.safetensors: damaged or cut short at \d+ bytes \(.*\); fetch it again$"),
        (emptied, r"model\.safetensors: damaged or cut short at 0 bytes \(.*\); fetch it again$"),
        (taken_away, "no model.safetensors and no model.safetensors.index.json; wanted weights"),
        (reshaped, r"model\.norm\.weight has shape \(\d+,\); wanted \(\d+,\)$"),
        (left_out, r"layers\.1\.mlp\.up_proj\.weight_scale is missing from the safetensors files;"),
        (of_another_method, "^quantization_config is 'awq' with 1 groups; wanted compressed-tens"),
    ],
)
def test_a_broken_checkpoint_is_told_before_the_original_is_asked(
    judge: Callable[..., Config],
    peer: Path,
    tmp_path: Path,
    broken: Callable[[Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(peer, folder)
    broken(folder)
    monkeypatch.setattr(pipeline, "_run_steps", lambda *_: pytest.fail("a stage was begun"))
    with pytest.raises(UserError, match=said):
        pipeline.run(judge(folder))


def test_what_cannot_be_judged_is_refused(
    judge: Callable[..., Config], peer: Path, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no config.json there; wanted a model's folder"):
        judge(tmp_path)
    with pytest.raises(ConfigError, match="stages has calibrate, quantize; wanted recipe=judge"):
        judge(peer, "stages=[calibrate,quantize,score]")
    other = tmp_path / "other"
    other.mkdir()
    whole = (peer / "config.json").read_text()
    (other / "config.json").write_text(whole[:200])
    said = rf"^{other}/config.json: damaged or cut short \(.+\); get the checkpoint again$"
    with pytest.raises(UserError, match=said):
        pipeline.run(judge(other))
    (other / "config.json").write_text(json.dumps(json.loads(whole) | {"vocab_size": 512}))
    with pytest.raises(UserError, match=r"other: a vocabulary of 512, the original's is \d+; want"):
        pipeline.run(judge(other))
    missing = composed("recipe=judge", f"model.path={tiny_model}", f"out={tmp_path / 'none'}")
    with pytest.raises(UserError, match="or give checkpoint=FOLDER"):
        pipeline.run(missing)
