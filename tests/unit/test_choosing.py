"""The step that is kept: the lowest of those at which no task has fallen."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress.errors import UserError
from compress.eval.own import named
from compress.stages.distill import Distill
from compress.training.asking import by_likelihood
from compress.training.choosing import Right, falls, score, words
from compress.training.loop import History, Schedule, train

START = [True] * 12 + [False] * 8


def losing(lost: int, gained: int = 0) -> list[bool]:
    """The answers of START with so many right ones lost, and so many wrong ones gained."""
    return [False] * lost + START[lost : 20 - gained] + [True] * gained


def test_a_task_has_fallen_where_it_lost_more_than_chance_allows() -> None:
    assert score(START) == 60
    assert falls({"a": START}, {"a": losing(5)}) == []  # p 2 / 2^5
    fallen = {"task": "a", "before": 60.0, "after": 30.0, "p": 2 / 2**6}
    assert falls({"a": START}, {"a": losing(6)}) == [fallen]
    assert words(fallen) == "a fell from 60.0 to 30.0 (p 0.031)"
    assert falls({"a": START}, {"a": losing(6, 1)}) == []  # p 2 * 8 / 2^7
    assert falls({"a": START}, {"a": losing(0, 8)}) == []  # 8 gained, p 2 / 2^8
    both = falls({"a": START, "b": START}, {"a": losing(1), "b": losing(9)})
    assert [fall["task"] for fall in both] == ["b"]


def test_the_best_is_the_lowest_of_those_without_a_fall() -> None:
    history, kept = History(), []
    points = [(1.0, 0), (0.8, 5), (0.2, 6), (0.9, 0), (0.7, 1), (0.6, 12)]
    for step, (value, lost) in enumerate(points):
        if history.add(10 * step, value, {"a": losing(lost)}):
            kept.append(10 * step)
    assert kept == [0, 10, 40]
    assert history.best_step == 40
    assert history.answers == {"a": START}
    scores = [point["tasks"]["a"] for point in history.curve]
    assert scores == pytest.approx([60, 35, 30, 60, 55, 0])
    assert [len(point["falls"]) for point in history.curve] == [0, 0, 1, 0, 0, 1]


def test_without_tasks_the_lowest_is_the_best_and_points_stay_as_they_were() -> None:
    history = History()
    assert [history.add(step, value, {}) for step, value in enumerate([1.0, 0.5, 0.7, 0.5])] == [
        *(True, True, False, False)
    ]
    assert history.curve[1] == {"step": 1, "value": 0.5}


def run(
    work: Path, values: list[float], lost: list[int], *, steps: int = 50, **given: Any
) -> tuple[History, list[torch.Tensor]]:
    """A training measured as `values` say, with so many answers lost at each measure."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(3))
    seen: list[torch.Tensor] = []
    answers = iter(lost)

    def measure() -> float:
        seen.append(weight.detach().clone())
        return values[len(seen) - 1]

    def ask() -> Right:
        assert torch.equal(weight, seen[-1])  # rounded, as for the measure
        return {"knowledge": losing(next(answers))}

    def loss(step: int) -> torch.Tensor:
        if step == given.get("killed"):
            raise KeyboardInterrupt
        return weight.sum()

    work.mkdir(exist_ok=True)
    schedule = Schedule(steps, measures=5, patience=given.get("patience"))
    groups = [(0.1, {"weight": weight})]
    history = train(
        groups, loss, measure, schedule, work, what="distill", dtype=torch.bfloat16, ask=ask
    )
    return history, seen


def test_a_step_at_which_a_task_fell_is_not_left_in_the_model_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "compress")
    values, lost = [1.0, 0.5, 0.1, 0.7, 0.2, 0.9], [0, 2, 6, 3, 7, 0]
    history, seen = run(tmp_path / "alone", values, lost)
    assert history.best_step == 10
    assert torch.equal(history.best["weight"].float(), seen[1])
    assert caplog.messages[:5] == [
        "  step 0: held-out KL 1.0000, knowledge 60.0",
        "  step 10: held-out KL 0.5000, knowledge 50.0",
        "  step 20: held-out KL 0.1000, knowledge 30.0",
        "  step 20: knowledge fell from 60.0 to 30.0 (p 0.031): not kept",
        "  step 30: held-out KL 0.7000, knowledge 45.0",
    ]
    impatient, _ = run(tmp_path / "impatient", values, lost, patience=2)
    assert [point["step"] for point in impatient.curve] == [0, 10, 20, 30]


@pytest.mark.parametrize("step", [5, 10, 25, 39])
def test_killed_at_any_step_it_goes_on_with_the_same_curve(tmp_path: Path, step: int) -> None:
    values, lost = [1.0, 0.5, 0.1, 0.7, 0.2, 0.9], [0, 2, 6, 3, 7, 0]
    wanted, _ = run(tmp_path / "alone", values, lost)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", values, lost, killed=step)
    done = step // 10 + 1 if step >= 10 else 0  # measures that the state on disk holds
    found, _ = run(tmp_path / "killed", values[done:], lost[done:])
    assert found.curve == wanted.curve
    assert (found.best_step, found.answers) == (wanted.best_step, wanted.answers)
    assert torch.equal(found.best["weight"], wanted.best["weight"])


def test_tasks_of_right_and_wrong_answers_by_likelihood_alone(tmp_path: Path) -> None:
    cloze = next(task for task in by_likelihood(["knowledge", "cloze"]) if task.kind == "cloze")
    assert cloze.metrics == ("accuracy",)
    assert named(["cloze"])[0].metrics == ("accuracy", "likelihood")
    (tmp_path / "mine.jsonl").write_text('{"text": "Two and two", "references": "are four"}\n')
    own = tmp_path / "mine.yaml"
    yaml = "data: mine.jsonl\nprompt: '{text}'\nkind: cloze\nmetrics: [likelihood]\n"
    own.write_text(yaml)
    assert by_likelihood([str(own)])[0].metrics == ("accuracy",)
    own.write_text("data: mine.jsonl\nkind: perplexity\n")
    with pytest.raises(UserError, match=r"mine is of kind perplexity, whose answers are not right"):
        by_likelihood([str(own)])


def test_tasks_that_cannot_be_asked_are_told_with_all_that_is_wrong() -> None:
    with pytest.raises(UserError) as error:
        Distill(tasks=["short_answers"], task_items=0)
    assert str(error.value).splitlines() == [
        "distill.task_items is 0; wanted at least 1",
        "distill.tasks: short_answers is of kind generation, which takes too long at each measure, "
        "as the model has to write; wanted kind choice or cloze: knowledge, commonsense, cloze, or "
        "a .yaml of your own",
    ]
    with pytest.raises(UserError, match=r"^distill\.tasks: no suite called mmlu; there are know"):
        Distill(tasks=["mmlu"])
    with pytest.raises(UserError, match=r"^distill\.tasks names cloze twice"):
        Distill(tasks=["cloze", "cloze"])
