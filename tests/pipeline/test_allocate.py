"""Mixed precision under a budget, the whole way: what it leaves, refuses and goes on from."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import SMALL, composed, die, forked
from test_run import files
from transformers import AutoModelForCausalLM

from compress import pipeline
from compress.budget import gradients
from compress.config import Config
from compress.errors import ConfigError, UserError
from compress.report.words import size
from compress.runtime.loader import load
from compress.stages.allocate import UNTRIED
from compress.tensors import TensorFiles

Small = Callable[..., Config]

W4 = ("quantize=w4a16", "quantize.rounding=nearest", "quantize.group_size=64")
WHOLE = (*W4, "extend=off", "extend.steps=0")
BUILD = "stages=[plan,calibrate,quantize]"
LEFT_16 = ("q_proj", "k_proj", "v_proj")


def manifest(out: Path, stage: str) -> dict[str, Any]:
    return json.loads((out / "stages" / f"{stage}.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of `small` that is calibrated and no more, to be copied."""
    out = tmp_path_factory.mktemp("calibrated") / "run"
    arguments = ["recipe=tiny", f"model.path={tiny_model}", f"out={out}", *SMALL]
    return pipeline.run(composed(*arguments, "stages=[calibrate]"))


@pytest.fixture
def calibrated(small: Small, statistics: Path) -> Small:
    """A recipe=tiny as in `small`, in a folder where calibrate is done."""

    def make(*overrides: str) -> Config:
        config = small(*overrides)
        out = Path(config.out or "")
        if not out.exists():
            shutil.copytree(statistics, out)
        return config

    return make


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, statistics: Path) -> Path:
    """A run with room for 10 bits a weight: 4, 8 and 16 bit."""
    out = shutil.copytree(statistics, tmp_path_factory.mktemp("mixed") / "run")
    stages = "stages=[plan,calibrate,quantize,export,score,report]"
    arguments = ["recipe=tiny", f"model.path={tiny_model}", f"out={out}", *SMALL, *WHOLE, stages]
    pipeline.run(composed(*arguments, "budget=10", "score.tasks=[]"))
    return out


def test_the_mean_is_within_the_budget_and_near_it(mixed: Path) -> None:
    found = manifest(mixed, "allocate")
    assert 9.5 < found["bits_per_weight"] <= 10
    assert set(found["counts"]) == {"W8A16", "16 bit"}
    # Counted again, from the tensors on disk.
    tensors = load_file(mixed / "checkpoint" / "model.safetensors")
    stored = sum(
        t.numel() * t.element_size()
        for name, t in tensors.items()
        if ".layers." in name
        and "norm" not in name
        and not name.endswith(("weight_shape", "bias"))
        and not any(kept in name for kept in LEFT_16)
    )
    assert stored == found["bytes"] <= 10 / 8 * found["weights"]


def test_the_manifest_names_the_layers_kept_and_why(mixed: Path) -> None:
    found = manifest(mixed, "allocate")
    tensors = load_file(mixed / "checkpoint" / "model.safetensors")
    kept = {n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")}
    assert {n for n in kept if not n.endswith(LEFT_16)} == set(found["kept"]) != set()
    assert all("would cost a KL of" in why for why in found["kept"].values())
    assert found["kl"] == pytest.approx(
        sum(layer["kl"].get(layer["taken"], 0) for layer in found["layers"])
    )
    assert found["kl"] < min(row["kl"] for row in found["uniform"])
    assert any("W8A16 in vLLM runs on CUDA only" in note for note in found["notes"])
    kept = json.loads((mixed / "stages" / "plan.json").read_text())["metrics"]["kept"]
    assert kept["model.layers.0.self_attn.q_proj"] == "query and key, on which RoPE acts"


def test_the_report_draws_it(mixed: Path) -> None:
    report = json.loads((mixed / "report.json").read_text())
    assert report["allocate"]["budget"] == "10"
    html, markdown = ((mixed / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert "Where the bits went" in html
    assert "gate_proj+up_proj" in html
    assert "Budget 10: 10.00 bits a weight" in markdown
    assert "| W8A16 |" in markdown
    card = (mixed / "checkpoint" / "README.md").read_text()
    found = manifest(mixed, "allocate")
    assert f"{found['quantized']} linear layers are stored" in card
    weights = sum(t.nbytes for t in load_file(mixed / "checkpoint" / "model.safetensors").values())
    assert weights - found["checkpoint_bytes"] == 16 * found["quantized"]  # weight_shape
    assert f"{size(found['checkpoint_bytes'])} after" in card


def test_a_budget_in_bytes_is_kept_to_on_disk_and_every_loader_reads_it(calibrated: Small) -> None:
    out = pipeline.run(
        calibrated(*WHOLE, "stages=[plan,calibrate,quantize,export]", "budget=1.2MB")
    )
    folder = out / "checkpoint"
    weights = sum(file.stat().st_size for file in TensorFiles.files(folder))
    assert 1_150_000 < weights <= 1_200_000
    planned = manifest(out, "plan")["bytes"]["after"]["total"]
    assert planned <= 1_200_000
    assert planned == pytest.approx(weights, rel=0.03)

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert UNTRIED in manifest(out, "allocate")["notes"]
    targets = [name for group in config["config_groups"].values() for name in group["targets"]]
    assert len(config["config_groups"]) > 1
    assert len(targets) == len(set(targets)) == manifest(out, "allocate")["quantized"]
    assert not set(targets) & set(config["ignore"])
    assert "W8A16" in manifest(out, "quantize")["scheme"]
    ids = torch.arange(20, 40).unsqueeze(0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted, found = theirs(ids).logits, load(folder, dtype=torch.float32)(ids).logits
    assert (wanted - found).abs().max() < 0.01 * wanted.abs().max()


def test_what_cannot_be_is_refused_with_the_least_that_can(small: Small) -> None:
    with pytest.raises(UserError, match=r"budget=4: .* wanted budget=4\.1 or more") as caught:
        pipeline.run(small(*WHOLE, BUILD, "budget=4"))
    assert "\n" not in str(caught.value)
    assert not (Path(small().out or "") / "stages" / "calibrate.json").exists()  # plan said it
    with pytest.raises(
        UserError, match=r"budget=10MB: all fits in 16 bit.* below \d\.\dMB, or none"
    ):
        pipeline.run(small(*WHOLE, BUILD, "budget=10MB"))
    assert not (Path(small().out or "") / "stages" / "calibrate.json").exists()


@pytest.mark.parametrize("budget", ["much", "0", "4PB"])
def test_what_is_no_budget_is_refused_before_anything(small: Small, budget: str) -> None:
    with pytest.raises(ConfigError, match=r"wanted bits a weight such as 4\.5"):
        small(f"budget={budget}")


@pytest.mark.parametrize("choice", ["W4A16 g0", "W4A16 g7", "W4A16 g48", "W8A8 g64", "W4A8"])
def test_what_no_kernel_serves_is_no_choice(small: Small, choice: str) -> None:
    with pytest.raises(ConfigError, match=rf"choices has '{choice}'; wanted W8A8, W8A16 or W4A16"):
        small("budget=5", f"allocate.choices=[W8A16,{choice}]")


def test_an_unknown_rounding_is_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match=r"allocate\.rounding is 'best'; wanted one of nearest"):
        small("budget=5", "allocate.rounding=best")


def test_float16_is_guarded_format_by_format(
    small: Small, tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 2.0**-12  # too small for 4 and 8 bit
    tensors["model.layers.2.mlp.down_proj.weight"] *= 2.0**-6  # for the scales of 8 bit alone
    half = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    settings = ("stages=[calibrate,quantize]", "budget=8", "allocate.choices=[W4A16 g64,W8A16]")
    out = pipeline.run(small(*WHOLE, *settings, f"model.path={folder}"))
    found = manifest(out, "allocate")
    of = {layer["name"]: set(layer["bytes"]) for layer in found["layers"]}
    assert of["model.layers.2.mlp.down_proj"] == {"W4A16 g64", "16 bit"}
    assert of["model.layers.1.mlp.down_proj"] == {"W4A16 g64", "W8A16", "16 bit"}
    lost = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    assert "model.layers.0.mlp.gate_proj+up_proj" not in of
    assert all("below float16's" in found["kept"][name] for name in lost)
    assert any("W8A16 is not offered: 1 × down_proj (its scales" in n for n in found["notes"])
    config = json.loads((out / "stages" / "quantize" / "config.json").read_text())
    assert set(lost) <= set(config["quantization_config"]["ignore"])
    assert manifest(out, "quantize")["heldout_kl"]["after"] < 1


def test_int8_chooses_between_int8_and_16_bit(calibrated: Small) -> None:
    out = pipeline.run(calibrated("quantize=w8a8", "stages=[calibrate,quantize]", "budget=12"))
    found = manifest(out, "allocate")
    assert set(found["counts"]) == {"W8A8", "16 bit"}
    assert manifest(out, "quantize")["scheme"] == "W8A8"


def test_without_a_budget_the_stage_is_not_there(small: Small) -> None:
    assert "allocate" not in small().stages
    assert small("budget=5").stages[2:4] == ["allocate", "quantize"]
    for asked in ("only=allocate", "stages=[allocate]"):
        with pytest.raises(ConfigError, match="allocate runs with a budget alone"):
            small(asked)


def test_a_budget_is_neither_switched_on_nor_off_unasked(calibrated: Small) -> None:
    stages = "stages=[plan,calibrate,quantize,export]"
    out = pipeline.run(calibrated(*WHOLE, stages))
    on = r"budget was null, is now \"5\".*force=\[quantize\]"
    for only in ((), ("only=quantize",), ("only=export",)):
        with pytest.raises(UserError, match=on):
            pipeline.run(calibrated(*WHOLE, stages, "budget=5", *only))
    assert manifest(out, "quantize")["scheme"] == "W4A16 g64"
    with pytest.raises(UserError, match="run the stage allocate first"):
        pipeline.run(calibrated(*WHOLE, stages, "budget=5", "only=quantize", "force=[quantize]"))
    pipeline.run(calibrated(*WHOLE, stages, "budget=9", "force=[quantize]"))
    assert "W8A16" in manifest(out, "quantize")["scheme"]
    for only in ((), ("only=quantize",), ("only=export",)):
        with pytest.raises(UserError, match=r"budget was \"9\", is now null.*force=\[quantize\]"):
            pipeline.run(calibrated(*WHOLE, stages, *only))


def test_a_changed_budget_is_refused_by_name_then_rebuilt(calibrated: Small) -> None:
    out = pipeline.run(calibrated(*WHOLE, "stages=[calibrate,quantize]", "budget=5"))
    before = manifest(out, "allocate")["bytes"]
    with pytest.raises(UserError, match=r"budget was .5., is now .6.*force=\[allocate\]"):
        pipeline.run(calibrated(*WHOLE, "stages=[calibrate,quantize]", "budget=6"))
    pipeline.run(calibrated(*WHOLE, "stages=[calibrate,quantize]", "budget=6", "force=[allocate]"))
    assert manifest(out, "allocate")["bytes"] > before
    assert "sensitivities were measured before" in (out / "log.txt").read_text()
    said = (out / "log.txt").read_text().count("sensitivities were measured before")
    settings = ("stages=[calibrate,quantize]", "budget=6")
    for other in (("force=[calibrate]",), ("seed=1", "force=[allocate]")):
        pipeline.run(calibrated(*WHOLE, *settings, *other))
        assert (out / "log.txt").read_text().count("sensitivities were measured before") == said


def killed(config: Config, after: int) -> None:
    """Run, and die when allocate has done `after` blocks."""

    def dying(items: Iterable[object], what: str, *_: object, **__: object) -> Iterator[object]:
        for number, item in enumerate(items):
            if number == after:
                die()
            yield item

    gradients.progress = dying  # type: ignore[attr-defined, assignment]
    pipeline.run(config)


def test_killed_it_goes_on_and_ends_with_the_same_bytes(calibrated: Small, tmp_path: Path) -> None:
    settings = (*WHOLE, "quantize.rounding=gptq", "stages=[calibrate,quantize]", "budget=6")
    assert forked(lambda: killed(calibrated(*settings), 2)) == -9
    out, other = Path(calibrated().out or ""), tmp_path / "other"
    assert forked(lambda: pipeline.run(calibrated(*settings))) == 0
    assert "allocate: goes on" in (out / "log.txt").read_text()
    assert forked(lambda: pipeline.run(calibrated(*settings, f"out={other}"))) == 0
    for stage in ("allocate", "quantize"):
        assert files(out / "stages" / stage) == files(other / "stages" / stage)
    one, two = (manifest(folder, "allocate") | {"seconds_by_part": {}} for folder in (out, other))
    assert one == two
    assert one["rounding"] == "gptq"  # as quantize does
