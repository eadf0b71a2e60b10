"""Distillation through the pipeline: what learns, and labels that are made once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import as_vllm, server

from compress import pipeline
from compress.config import Config
from compress.errors import UserError
from compress.steps import plan_steps
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

    pipeline.run(small(*run, "distill.scale_rate=3e-3", "distill.batch=99", "force=[distill]"))
    assert metrics(out)["steps"] == 4  # of all 28 windows
    assert made(out) == labels
    after = TensorFiles(out / "stages" / "distill")
    assert all(torch.equal(before[name], after[name]) for name in packed)
    assert metrics(out)["kept"]

    pipeline.run(small(*run, "distill.train=adapters", "distill.rank=4", "force=[distill]"))
    told = metrics(out)
    assert told["kept"]
    assert told["kl"]["after"] < told["kl"]["before"]
    best = min(point["kl"] for point in told["curve"])
    assert told["kl"]["after"] == pytest.approx(best, rel=1e-3)
    assert told["unrounded_kl"] != best
    assert made(out) == labels
    after = TensorFiles(out / "stages" / "distill")
    assert any(not torch.equal(before[name], after[name]) for name in packed)


def test_a_teacher_behind_a_server_teaches_what_it_would_from_its_folder(
    small: Small, tiny_model: Path
) -> None:
    run = (*FOUR_BIT, "stages=[plan,calibrate,quantize,distill]")
    config = small(*run)
    pipeline.run(config)
    own = metrics(Path(config.out or ""))
    with server(as_vllm(tiny_model)) as url:
        pipeline.run(small(*run, f"distill.endpoint={url}", "force=[distill]"))
    told = metrics(Path(config.out or ""))
    assert told["teacher"] == f"the model at {url}"
    assert told["labels"]["flops"] is None
    assert told["labels"]["mass"] == pytest.approx(own["labels"]["mass"], abs=1e-3)
    assert told["kept"]
    steps = [point["kl"] for point in told["curve"]]
    assert steps == pytest.approx([point["kl"] for point in own["curve"]], rel=0.02)


def test_a_teacher_counts_by_what_it_holds_and_is_missed_before_anything_runs(
    small: Small, tiny_model: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_model, teacher)
    config = small("stages=[calibrate,quantize,distill]", f"distill.teacher={teacher}")
    before = [step.key for step in plan_steps(config, tmp_path)]
    (teacher / "config.json").write_text("{}")
    after = [step.key for step in plan_steps(config, tmp_path)]
    assert before[:2] == after[:2]
    assert before[2] != after[2]
    shutil.rmtree(teacher)
    with pytest.raises(UserError, match=r"distill\.teacher=.*: no config\.json there"):
        plan_steps(config, tmp_path)
