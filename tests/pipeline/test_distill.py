"""Distillation through the pipeline: what learns, and labels that are made once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress import pipeline
from compress.config import Config
from compress.tensors import TensorFiles

Small = Callable[..., Config]

FOUR_BIT = ("quantize=w4a16_channel", "quantize.rounding=nearest", "distill.epochs=4")


def metrics(out: Path) -> dict[str, Any]:
    return json.loads((out / "stages" / "distill.json").read_text())["metrics"]


def made(out: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (out / "stages" / "labels").iterdir()}


def test_integers_learn_and_other_settings_use_the_labels_again(small: Small) -> None:
    stages = "stages=[plan,calibrate,quantize,distill]"
    latent = ("distill.train=latent", "distill.latent_rate=0.05", "distill.loss=jensen_shannon")
    run = (*FOUR_BIT, "calibrate.written=2", stages)
    config = small(*run, *latent)
    out = Path(config.out or "")
    pipeline.run(config)
    told, labels = metrics(out), made(out)
    assert told["kept"]
    assert told["kl"]["after"] < told["kl"]["before"]
    assert told["curve"][-1]["tokens"] == told["steps"] * 2 * 32
    assert told["labels"]["tokens"] == 24 * 32 + 2 * 64
    before, after = (TensorFiles(out / "stages" / name) for name in ("quantize", "distill"))
    packed = [name for name in before if name.endswith("weight_packed")]
    assert any(not torch.equal(before[name], after[name]) for name in packed)

    pipeline.run(small(*run, "distill.scale_rate=3e-3", "force=[distill]"))
    assert made(out) == labels
    after = TensorFiles(out / "stages" / "distill")
    assert all(torch.equal(before[name], after[name]) for name in packed)
    assert metrics(out)["kept"]
