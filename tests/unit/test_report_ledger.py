"""What compressing cost beside what serving saves, against reckoning by hand."""

from typing import Any

import pytest

from compress.errors import ConfigError
from compress.report.ledger import Terms, ledger, seconds_of_request
from compress.stages.report import Report

STAGES = [
    {"name": "quantize", "seconds": 5400.0},
    {"name": "distill", "seconds": 1800.0},
    {"name": "score", "seconds": 3600.0},
]
DISTILL = {"labels": {"tokens": 40_960, "seconds": 360.0}, "tokens": 81_920}


def timed(ttft: float, tpot: float) -> dict[str, Any]:
    return {"ttft_ms": {"p50": ttft}, "tpot_ms": {"p50": tpot}, "new_tokens": 33}


LATENCY = {"before": timed(400.0, 50.0), "after": timed(360.0, 20.0)}


def test_a_request_is_its_first_token_and_all_further_ones() -> None:
    assert seconds_of_request(LATENCY["before"]) == pytest.approx(0.4 + 32 * 0.05)


def test_money_is_hours_times_price_and_is_saved_again_by_serving() -> None:
    found = ledger(STAGES, DISTILL, LATENCY, Terms(requests=1_800_000, price=2.0, currency="EUR"))
    assert found["spent"] == {
        "making": {"hours": 2.0, "money": 4.0},
        "judging": {"hours": 1.0, "money": 2.0},
    }
    assert found["distill"] == {
        "hours": 0.5,
        "money": 1.0,
        "teacher_tokens": 40_960,
        "teacher_hours": 0.1,
        "student_tokens": 81_920,
    }
    # 2.0 s and 1.0 s a request.
    assert found["serving"]["before"] == pytest.approx({"hours": 1000.0, "money": 2000.0})
    assert found["serving"]["after"] == pytest.approx({"hours": 500.0, "money": 1000.0})
    assert found["months_to_repay"] == pytest.approx(6.0 / 1000.0)


def test_a_smaller_machine_has_a_price_of_its_own() -> None:
    terms = Terms(requests=3600, price=2.0, price_after=0.5)
    serving = ledger(STAGES, None, LATENCY, terms)["serving"]
    assert serving["after"]["money"] == pytest.approx(0.5)
    assert serving["before"]["money"] == pytest.approx(4.0)


def test_what_saves_nothing_is_never_repaid() -> None:
    slower = {"before": LATENCY["after"], "after": LATENCY["before"]}
    found = ledger(STAGES, None, slower, Terms(requests=1000, price=2.0))
    assert found["serving"]["after"]["money"] > found["serving"]["before"]["money"]
    assert found["months_to_repay"] is None


def test_of_a_checkpoint_that_was_there_it_is_not_known_when_it_is_repaid() -> None:
    found = ledger([STAGES[2]], None, LATENCY, Terms(requests=1000, price=2.0))
    assert found["spent"]["making"] == {"hours": 0.0, "money": 0.0}
    assert found["serving"]["after"]["money"] < found["serving"]["before"]["money"]
    assert found["months_to_repay"] is None


def test_without_prices_there_are_hours_and_without_traffic_no_serving() -> None:
    found = ledger(STAGES, None, LATENCY, Terms(requests=3600))
    assert found["serving"]["before"] == {"hours": pytest.approx(2.0), "money": None}
    assert found["months_to_repay"] is None
    assert ledger(STAGES, None, LATENCY, Terms(price=1.0))["serving"] is None
    assert ledger(STAGES, None, None, Terms(requests=5, price=1.0))["serving"] is None


def test_terms_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Report(requests=0, hour_price=-1.0)
    assert error.value.problems == [
        "report.requests is 0; wanted above 0, or null",
        "report.hour_price is -1.0; wanted above 0, or null",
    ]
    with pytest.raises(ConfigError, match=r"hour_price_after is 0.5, but hour_price is null"):
        Report(hour_price_after=0.5)
