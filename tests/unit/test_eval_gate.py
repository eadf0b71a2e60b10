"""What a recipe's limits say of scores."""

from typing import Any

import pytest

from compress.errors import ConfigError
from compress.eval.gate import Gate, broken
from compress.stages.score import Score


def scores(kl: float | None = 0.05, after: float = 50.0) -> dict[str, Any]:
    row = {"name": "knowledge", "metric": "accuracy", "before": 60.0, "after": after}
    second = {"name": "knowledge", "metric": "other", "before": 60.0, "after": 0.0}
    return {"fidelity": {"kl": kl}, "tasks": [row, second], "faults": []}


def served(ms: float | None) -> dict[str, Any]:
    """Latency of an original that takes 1 ms a token, and of a model with this median."""
    return {
        "before": {"tpot_ms": {"p50": 1.0, "mean": 1.0}},
        "after": {"tpot_ms": {"p50": ms, "mean": 1e9}},
    }


LIMITS = Gate(kl=0.05, tasks={"knowledge": 10}, token_ms=200)


def test_a_gate_without_limits_breaks_on_nothing() -> None:
    assert broken(Gate(), scores(kl=99.0, after=0.0), served(1e6)) == []


def test_limits_are_kept_up_to_the_limit_itself() -> None:
    assert broken(LIMITS, scores(), served(200.0)) == []


def test_each_limit_that_is_broken_is_said_in_words() -> None:
    limits = Gate(kl=0.04, tasks={"knowledge": 9.5}, token_ms=200)
    assert broken(limits, scores(), served(231.0)) == [
        "KL 0.0500 nats a token, at most 0.04 allowed",
        "knowledge, accuracy fell 10.0 points (60.0 to 50.0), at most 9.5 allowed",
        "231.0 ms a token, at most 200 allowed",
    ]


@pytest.mark.parametrize(
    ("after", "most", "said"),
    [
        (59.96, 0, "fell 0.04 points (60.00 to 59.96), at most 0 allowed"),
        (52.9, 7, "fell 7.1 points (60.0 to 52.9), at most 7 allowed"),
        (49.9996, 10, "fell 10.0004 points (60.0000 to 49.9996), at most 10 allowed"),
        (52.5, 7.46, "fell 7.5 points (60.0 to 52.5), at most 7.46 allowed"),
        (49.96, 10, "fell 10.04 points (60.00 to 49.96), at most 10 allowed"),
    ],
)
def test_a_drop_is_told_from_its_limit(after: float, most: float, said: str) -> None:
    limits = Gate(tasks={"knowledge": most})
    assert broken(limits, scores(after=after), None) == [f"knowledge, accuracy {said}"]


@pytest.mark.parametrize("kl", [None, float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_no_pass(kl: float | None) -> None:
    said = "KL that is not a finite number, at most 1 allowed"
    assert broken(Gate(kl=1.0), scores(kl=kl), None) == [said]


def test_faults_break_a_gate_that_allows_none() -> None:
    found = scores() | {"faults": [{"name": "EOS"}, {"name": "block"}]}
    said = "2 faults (EOS, block), at most 1 allowed"
    assert broken(Gate(faults=1), found, None) == [said]
    assert broken(Gate(faults=2), found, None) == broken(Gate(), found, None) == []
    assert Gate(faults=-1).problems([]) == ["score.gate.faults is -1; wanted 0 or more"]


def test_a_kl_is_told_from_its_limit() -> None:
    assert broken(Gate(kl=0.00655), scores(kl=0.006551), None) == [
        "KL 0.0066 nats a token, at most 0.00655 allowed"
    ]
    assert broken(Gate(kl=0.0066), scores(kl=0.0066000001), None) == [
        "KL 0.0066000001 nats a token, at most 0.0066 allowed"
    ]


def test_a_task_of_which_nothing_was_asked_is_no_pass() -> None:
    (reason,) = broken(Gate(tasks={"summaries": 5}), scores(), None)
    assert reason.startswith("summaries was not asked")


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (200.3, "200.3 ms a token, at most 200 allowed"),
        (200.04, "200.04 ms a token, at most 200 allowed"),
        (200.0000004, "200.0000004 ms a token, at most 200 allowed"),
        (12345.0, "12,345.0 ms a token, at most 200 allowed"),
        (float("nan"), "nan ms a token, at most 200 allowed"),
        (None, "no token was timed, at most 200 ms allowed"),
    ],
)
def test_a_token_that_takes_too_long_is_told_from_the_limit(ms: float | None, said: str) -> None:
    assert broken(Gate(token_ms=200), scores(), served(ms)) == [said]


def test_what_was_not_measured_is_no_pass_beside_scores_and_unchecked_without_them() -> None:
    said = ["no token was timed, at most 200 ms allowed"]
    assert broken(LIMITS, scores(), None) == said
    assert broken(LIMITS, None, served(231.0)) == ["231.0 ms a token, at most 200 allowed"]
    assert broken(LIMITS, None, served(199.0)) == broken(LIMITS, None, None) == []
    assert LIMITS.checked(scored=True, served=False) == LIMITS
    assert LIMITS.checked(scored=False, served=True) == Gate(token_ms=200)
    assert LIMITS.checked(scored=False, served=False) == Gate()


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(ms: float) -> None:
    with pytest.raises(ConfigError) as error:
        Score(gate=Gate(token_ms=ms))
    wanted = f"score.gate.token_ms is {ms}; wanted a finite number above 0, or null"
    assert error.value.problems == [wanted]


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Score(tasks=["knowledge"], gate=Gate(kl=-1.0, tasks={"boundary": float("nan")}))
    assert error.value.problems == [
        "score.gate.tasks.boundary is nan; wanted 0 or more",
        "score.gate.kl is -1.0; wanted 0 or more",
        "score.gate.tasks names boundary, which score.tasks leaves out; ask it too, or give no "
        "limit on it: ~score.gate.tasks.boundary takes off the recipe's",
    ]
