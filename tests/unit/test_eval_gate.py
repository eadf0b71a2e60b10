"""What a recipe's limits say of scores."""

from typing import Any

import pytest

from compress.errors import ConfigError
from compress.eval.gate import Gate, broken
from compress.stages.score import Score


def scores(kl: float | None = 0.05, after: float = 50.0) -> dict[str, Any]:
    row = {"name": "knowledge", "metric": "accuracy", "before": 60.0, "after": after}
    second = {"name": "knowledge", "metric": "other", "before": 60.0, "after": 0.0}
    return {"fidelity": {"kl": kl}, "tasks": [row, second]}


def test_a_gate_without_limits_breaks_on_nothing() -> None:
    assert broken(Gate(), scores(kl=99.0, after=0.0)) == []


def test_limits_are_kept_up_to_the_limit_itself() -> None:
    assert broken(Gate(kl=0.05, tasks={"knowledge": 10}), scores()) == []


def test_each_limit_that_is_broken_is_said_in_words() -> None:
    assert broken(Gate(kl=0.04, tasks={"knowledge": 9.5}), scores()) == [
        "KL 0.0500 nats a token, at most 0.04 allowed",
        "knowledge, accuracy fell 10.0 points (60.0 to 50.0), at most 9.5 allowed",
    ]


@pytest.mark.parametrize("kl", [None, float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_no_pass(kl: float | None) -> None:
    assert len(broken(Gate(kl=1.0), scores(kl=kl))) == 1


def test_a_task_of_which_nothing_was_asked_is_no_pass() -> None:
    (reason,) = broken(Gate(tasks={"summaries": 5}), scores())
    assert reason.startswith("summaries was not asked")


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Score(tasks=["knowledge"], gate=Gate(kl=-1.0, tasks={"boundary": 3.0}))
    assert error.value.problems == [
        "score.gate.kl is -1.0; wanted 0 or more",
        "score.gate.tasks names boundary, which score.tasks leaves out; ask it too, or drop it: "
        "~score.gate.tasks.boundary",
    ]
