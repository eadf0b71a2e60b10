"""What a plan advises: in which order, and that each verdict follows its figures."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from compress.planning.advice import advice
from compress.planning.devices import GPUS
from compress.planning.requests import Request
from compress.planning.shape import Shape, shape_of
from compress.planning.study import Question, study
from tests.unit.test_planning import LLAMA_2_7B, SMALL

ORDER = (
    *("batching", "cache", "decoding", "splitting prefill from decode", "context"),
    *("quantization", "distillation"),
)


@pytest.fixture(scope="module")
def question() -> Question:
    """A 7B on a card of 24 GB, with chats of mixed lengths that come at once."""
    shape = shape_of(AutoConfig.for_model(**LLAMA_2_7B), "7B")
    student = shape_of(AutoConfig.for_model(**LLAMA_2_7B), "7B", blocks=16)
    requests = [Request(200 + 37 * i, 20 + 23 * (i % 13)) for i in range(40)]
    return Question(shape, student, GPUS["a10g"], 24 * 10**9, requests, window=4096)


@pytest.fixture(scope="module")
def plan(question: Question) -> dict[str, Any]:
    return study(question)


def said(plan: dict[str, Any], about: str) -> str:
    found = " ".join(one["text"] for one in advice(plan) if one["about"] == about)
    return found.replace("\u00a0", " ")


def test_first_what_costs_no_quality_then_numbers_then_training(plan: dict[str, Any]) -> None:
    abouts = [one["about"] for one in advice(plan)]
    assert tuple(dict.fromkeys(abouts)) == ORDER
    assert abouts == sorted(abouts, key=ORDER.index)


def test_batching_and_decoding_have_their_figures(plan: dict[str, Any]) -> None:
    static, continuous = (plan["batching"][way] for way in ("static", "continuous"))
    assert continuous["tokens_per_s"] > 1.5 * static["tokens_per_s"]
    assert said(plan, "batching").startswith("Batch continuously, not statically: ")
    longest = max(20 + 23 * (i % 13) for i in range(40))
    assert f"answers that run to {longest} tokens" in said(plan, "decoding")
    beams = plan["decoding"]["beam_tokens_per_s"]
    assert beams["4"] < beams["1"]
    assert "4 beams, decoding as many requests as fit" in said(plan, "decoding")


def test_batches_that_only_shorten_the_wait_are_advised_by_it(plan: dict[str, Any]) -> None:
    found = plan["batching"]["continuous"]
    waits = found["ttft_s"] | {"p95": 2 * found["ttft_s"]["p95"]}
    alike = plan["batching"] | {"static": found | {"ttft_s": waits}}
    text = said(plan | {"batching": alike}, "batching")
    assert text.startswith("Batch continuously, not statically: TTFT at p95 ")
    assert "though no more is served" in text


def test_splitting_pays_where_it_steadies_and_costs_no_time(plan: dict[str, Any]) -> None:
    def verdict(seconds: float, tpot: float) -> str:
        alike = {"seconds": 10.0, "tpot_s": {"p95": 0.2}}
        split = {"seconds": seconds, "tpot_s": {"p95": tpot}}
        changed = {**plan, "batching": {**plan["batching"], "two alike": alike, "split": split}}
        return said(changed, "splitting prefill from decode")

    assert verdict(10.0, 0.1).startswith("With two machines it pays: 10.0 s for all")
    assert verdict(9.0, 0.2).startswith("With two machines it pays")
    assert verdict(10.0, 0.2).startswith("With two machines it does not pay")
    assert verdict(12.0, 0.1).startswith("With two machines it does not pay")


def test_the_mildest_scheme_near_the_best_is_named(plan: dict[str, Any]) -> None:
    rates = {r["scheme"]: r["continuous"]["tokens_per_s"] for r in plan["schemes"]}
    best = max(rates.values())
    wanted = next(scheme for scheme, rate in rates.items() if rate * 1.05 >= best)
    assert said(plan, "quantization").startswith(f"{wanted} is the mildest scheme near the best: ")


def test_quantization_is_needed_where_16_bit_does_not_fit(question: Question) -> None:
    small = study(replace(question, memory=12 * 10**9))
    assert not small["schemes"][0]["fits"]
    text = said(small, "quantization")
    assert text.startswith("Needed: in 16 bit the weights of 13.5 GB leave no room")
    assert "16 bit 13.5 GB" not in text


def test_on_equal_lengths_static_batching_is_not_talked_down() -> None:
    shape: Shape = shape_of(AutoConfig.for_model(**SMALL), "small")
    equal = [Request(100, 50)] * 8
    plan = study(Question(shape, shape, GPUS["a10g"], 10**9, equal, window=2048))
    assert said(plan, "batching").startswith("Static batching does as well on these lengths: ")


def test_pages_are_advised_where_they_hold_more(plan: dict[str, Any]) -> None:
    found = {row["rule"]: row["requests"] for row in plan["reservations"]}
    assert found["paged"] > found["p80"] > found["max"]
    text = said(plan, "cache")
    assert text.startswith(
        f"Allocate the KV cache in pages: {found['paged']} requests at once; with room for the "
        f"longest in each, {found['max']}. Without pages, allocate for "
    )
    assert f" saved, {found['p80']} requests." in text


@pytest.mark.parametrize(
    ("prompt", "new", "figures"),
    [
        (1000, 1, "2.06 MB, 454 at once; with room for the longest 2.05 MB, 457 at once"),
        (512, 128, "1.31 MB, 716 at once; with room for the longest 1.31 MB, 716 at once"),
    ],
)
def test_on_equal_lengths_nothing_is_advised_that_changes_nothing(
    prompt: int, new: int, figures: str
) -> None:
    shape = shape_of(AutoConfig.for_model(**SMALL), "small")
    equal = [Request(prompt, new)] * 8
    plan = study(Question(shape, shape, GPUS["a10g"], 10**9, equal, window=8192))
    assert said(plan, "cache").startswith(
        f"Pages of 16 tokens do not pay on these lengths: with them a request takes {figures}. "
        "K and V in 8 bit: "
    )
    assert said(plan, "decoding").startswith("4 beams, decoding as many requests as fit")
    assert said(plan, "distillation") == ""  # the student has as many blocks


def test_beams_that_take_no_requests_away_are_not_said_to(plan: dict[str, Any]) -> None:
    def beams(many: int, one: int) -> str:
        requests = {"4": many, "1": one}
        return said(
            {**plan, "decoding": {**plan["decoding"], "beam_requests": requests}}, "decoding"
        )

    assert beams(256, 256).endswith(
        ": 256 requests at once either way, the most that is simulated."
    )
    assert beams(64, 256).endswith(": 64 requests at once instead of 256.")
    assert beams(1, 1).endswith(": 1 request at once either way.")


def test_a_cache_that_holds_no_more_in_8_bit_is_not_advised(plan: dict[str, Any]) -> None:
    rows = [{**row, "largest_batch": {"16": 1, "v8": 1, "kv8": 1}} for row in plan["schemes"]]
    assert "in 8 bit" not in said({**plan, "schemes": rows}, "cache")


def test_quantization_is_not_called_faster_where_16_bit_is(plan: dict[str, Any]) -> None:
    first, *rest = plan["schemes"]
    rows = [first, *({**row, "tpot_s": {"1": 99.0}, "continuous": first["continuous"]}
                     for row in rest)]  # fmt: skip
    assert said({**plan, "schemes": rows}, "quantization").startswith(
        "Not needed, neither for throughput nor for the time of a token: 16 bit 13.5 GB"
    )
