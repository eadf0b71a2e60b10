"""A float16 model that leaves float16's range, and runs that cannot end well: told at the start."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress import guards, pipeline
from compress.algorithms.gptq import Factor
from compress.blocks import hessians
from compress.config import Config
from compress.errors import UserError
from compress.model import BlockModel
from compress.runtime.loader import load

Small = Callable[..., Config]
LIMIT = 65504 / 4


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny model in float16 with some weights multiplied."""

    def make(factors: dict[str, float]) -> Path:
        folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
        tensors = load_file(folder / "model.safetensors")
        for name, factor in factors.items():
            tensors[f"model.layers.{name}.weight"] *= factor
        half = {name: tensor.half() for name, tensor in tensors.items()}
        save_file(half, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
        return folder

    return make


def metrics(out: Path, stage: str) -> dict:
    return json.loads((out / "stages" / f"{stage}.json").read_text())["metrics"]


@torch.no_grad()
def largest_output(model: nn.Module, name: str) -> float:
    found: list[Tensor] = []
    linear = model.get_submodule(name)
    hook = linear.register_forward_hook(lambda _, __, given: found.append(given.abs().max()))
    model(torch.randint(5, 1000, (4, 64), generator=torch.Generator().manual_seed(0)))
    hook.remove()
    return float(found[0])


def test_what_float16_cannot_hold_is_scaled_or_kept(
    small: Small, model: Callable[..., Path]
) -> None:
    folder = model(
        {
            "0.mlp.gate_proj": 2.0**-12,  # scales of about 1e-7
            "1.mlp.up_proj": 2.0**13,
            "1.mlp.down_proj": 2.0**-4,
            "2.mlp.down_proj": 2.0**-12,
        }
    )
    out = pipeline.run(small(f"model.path={folder}", "stages=[calibrate,quantize,export]"))
    seen, done = metrics(out, "calibrate"), metrics(out, "quantize")
    assert seen["largest_activation"] > 65504  # of down_proj's input
    assert not any(note.startswith("activations reach") for note in seen["notes"])  # it is scaled

    config = json.loads((out / "checkpoint" / "config.json").read_text())
    kept = [n for n in config["quantization_config"]["ignore"] if ".mlp." in n]
    assert kept == [
        f"model.layers.{n}" for n in ("0.mlp.gate_proj", "0.mlp.up_proj", "2.mlp.down_proj")
    ]
    assert config["dtype"] == "float16"
    reasons = [n for n in done["notes"] if "scales are below float16's" in n]
    assert len(reasons) == 1
    assert reasons[0].startswith("16 bit: 2 × down_proj, gate_proj (its scales are below")
    assert any(n.startswith("16 bit: 1 × up_proj (engines fuse gate and up") for n in done["notes"])
    (scaled,) = (n for n in done["notes"] if "to stay within float16" in n)
    assert scaled.startswith("model.layers.1.mlp.up_proj reaches")

    up = "model.layers.1.mlp.up_proj"
    served = load(out / "checkpoint", dtype=torch.float32)
    before = load(folder, dtype=torch.float32)
    assert largest_output(before, up) > LIMIT
    assert largest_output(served, up) < LIMIT
    assert done["heldout_kl"]["after"] < 0.01


def test_a_residual_that_overflows_ends_calibrate_and_bfloat16_is_the_way_out(
    small: Small, model: Callable[..., Path]
) -> None:
    folder = model({"1.mlp.down_proj": 2.0**15})
    settings = (f"model.path={folder}", "stages=[calibrate]")
    with pytest.raises(
        UserError, match=r"layers\.1.*: its output reaches .* model\.dtype=bfloat16"
    ):
        pipeline.run(small(*settings))
    assert not list(Path(small().out or "").glob("stages/*.json"))
    out = pipeline.run(small(*settings, "model.dtype=bfloat16", out="other"))
    seen = metrics(out, "calibrate")
    assert seen["largest_activation"] > 65504
    assert seen["notes"][-1].endswith("float16, which ends at 65504, cannot serve it")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("quantize=w4a16", "quantize.group_size=100"), "group size 100 cannot be"),
        (("quantize.keep=[no_proj]",), "'no_proj' matches no linear"),
        (("model.dtype=float32",), "model.dtype is float32, and sglang's kernels take bfloat16"),
        (("calibrate.least_tokens=257",), "data: 256 calibration tokens, without padding; wanted"),
        (("calibrate.least_tokens=257", "model.dtype=float16"), "data: 256 calibration tokens"),
    ],
)
def test_what_cannot_be_ends_before_anything_is_computed(
    small: Small, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], told: str
) -> None:
    def never(*_: object) -> None:
        pytest.fail("the model was read")

    monkeypatch.setattr(BlockModel, "embed", never)
    monkeypatch.setattr(guards, "refuse_large_weights", never)  # reads all weights
    with pytest.raises(UserError, match=told):
        pipeline.run(small("stages=[calibrate,quantize]", *settings))


def test_hessians_that_are_damped_by_more_are_named_in_the_log_and_the_manifest(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = hessians.factor

    def stubborn(hessian: Tensor) -> Factor:
        found = factor(hessian)
        return replace(found, damping=0.1) if len(found.order) > 128 else found

    monkeypatch.setattr(hessians, "factor", stubborn)
    out = pipeline.run(small("stages=[calibrate,quantize]", "quantize=w4a16"))
    done = metrics(out, "quantize")
    by_kind = {layer["name"].rpartition(".")[2]: layer["damping"] for layer in done["layers"]}
    assert by_kind == {"o_proj": 0.01, "gate_proj": 0.01, "up_proj": 0.01, "down_proj": 0.1}
    told = "4 linears with a Hessian that had to be damped by more than 0.01 of its mean diagonal"
    assert sum(note.startswith(told) for note in done["notes"]) == 1
    assert told in (out / "log.txt").read_text()
