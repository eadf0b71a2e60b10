"""Distillation through the pipeline: what learns, and labels that are made once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import as_vllm, server
from small import forked
from test_processes import killed_at
from transformers import AutoTokenizer, PreTrainedModel

from compress import pipeline
from compress.config import Config
from compress.errors import UserError
from compress.eval.answers import ask, score, total
from compress.eval.items import items
from compress.eval.own import named
from compress.steps import plan_steps
from compress.tensors import TensorFiles
from compress.training import learning
from compress.training.trainable import load_exact

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


ASKED = (*FOUR_BIT, "distill.tasks=[knowledge,commonsense]", "distill.task_items=12")


def answered(model: PreTrainedModel, folder: Path, name: str) -> float:
    """The score of a model's answers, asked as the stage score does."""
    (task,), tokenizer = named([name]), AutoTokenizer.from_pretrained(folder)
    its = items(task, 12)
    answers = ask(model, tokenizer, task, its, batch_size=8)
    metric = task.metrics[0]
    return total(metric)(score(task, its, answers)[metric].sum(0))


def test_tasks_are_asked_at_each_measure_and_a_killed_run_goes_on_with_their_scores(
    small: Small, tiny_model: Path
) -> None:
    stages = "stages=[plan,calibrate,quantize,distill]"
    plain = small(*FOUR_BIT, stages, out="plain")
    assert forked(lambda: pipeline.run(plain)) == 0
    kl = [(point["step"], point["kl"]) for point in metrics(Path(plain.out or ""))["curve"]]
    more = "stages=[plan,calibrate,quantize,distill,export,score]"
    config = small(*ASKED, more, "only=distill", out="asked")
    out = Path(config.out or "")
    shutil.copytree(Path(plain.out or ""), out, ignore=shutil.ignore_patterns("distill*"))
    assert forked(lambda: killed_at(35, config)) == -9
    state = torch.load(out / "stages" / "distill.partial" / "work" / "distill.state")
    assert (state["step"], len(state["curve"])) == (30, 2)
    assert set(state["answers"]) == {"knowledge", "commonsense"}
    assert forked(lambda: pipeline.run(config)) == 0
    told, stage = metrics(out), out / "stages" / "distill"
    assert [(point["step"], point["kl"]) for point in told["curve"]] == kl
    assert [point["falls"] for point in told["curve"]] == [[]] * len(kl)
    assert not told["held_back"]
    assert (stage / "model.safetensors").read_bytes() == (
        (Path(plain.out or "") / "stages" / "distill" / "model.safetensors").read_bytes()
    )

    original = load_exact(tiny_model, config)
    for name, task in told["tasks"].items():
        assert task == {"items": 12, "original": answered(original, tiny_model, name)}
    for step, folder in ((0, out / "stages" / "quantize"), (told["best_step"], stage)):
        model = load_exact(folder, config)
        (point,) = (point for point in told["curve"] if point["step"] == step)
        assert point["tasks"] == {name: answered(model, folder, name) for name in told["tasks"]}
    log = (out / "log.txt").read_text()
    assert "  knowledge: in score.tasks too; what chose the step then judges it\n" in log


def test_where_a_task_falls_at_every_step_the_input_is_handed_on_with_a_word(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([[True] * 9 + [False] * 3, [False] * 12, [False] * 12])
    monkeypatch.setattr(learning, "right", lambda *_: {"knowledge": next(answers)})
    config = small(*ASKED, "stages=[plan,calibrate,quantize,distill]")
    out = Path(config.out or "")
    pipeline.run(config)
    told = metrics(out)
    assert min(point["kl"] for point in told["curve"][1:]) < told["curve"][0]["kl"]
    assert (told["kept"], told["best_step"], told["held_back"]) == (False, 0, True)
    assert told["notes"] == [
        "step 24: knowledge fell from 75.0 to 0.0 (p 0.0039): not kept",
        "step 48: knowledge fell from 75.0 to 0.0 (p 0.0039): not kept",
        "no step improved the held-out KL without a task falling; the input is handed on",
    ]
    before, after = (
        out / "stages" / name / "model.safetensors" for name in ("quantize", "distill")
    )
    assert before.read_bytes() == after.read_bytes()
    assert f"  {told['notes'][0]}\n" in (out / "log.txt").read_text()


def test_tasks_count_by_what_they_ask_and_leave_keys_without_them_as_they_were(
    small: Small, tmp_path: Path
) -> None:
    def key(*more: str) -> dict[str, Any]:
        return plan_steps(small("stages=[calibrate,quantize,distill]", *more), tmp_path)[-1].key

    assert "tasks" not in key()["distill"]
    assert key("distill.task_items=9") == key()
    (tmp_path / "mine.jsonl").write_text('{"text": "Two and two", "references": "are four"}\n')
    own = tmp_path / "mine.yaml"
    own.write_text("data: mine.jsonl\nkind: cloze\nprompt: '{text}'\n")
    first = key(f"distill.tasks=[{own}]")
    assert first["distill"]["tasks"] == [str(own)]
    assert first != key(f"distill.tasks=[{own}]", "distill.task_items=9")
    own.write_text("data: mine.jsonl\nkind: cloze\nprompt: 'Sum: {text}'\n")
    assert first != key(f"distill.tasks=[{own}]")
    (tmp_path / "mine.jsonl").write_text('{"text": "Two and two", "references": "make 4"}\n')
    own.write_text("data: mine.jsonl\nkind: cloze\nprompt: '{text}'\n")
    assert first != key(f"distill.tasks=[{own}]")
