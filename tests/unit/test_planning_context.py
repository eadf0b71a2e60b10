"""Whether a longer context is needed, and what each way out costs, agree with hand calculation."""

import math
from typing import Any

import pytest
from transformers import AutoConfig

from compress.planning import tables
from compress.planning.advice import advice
from compress.planning.context import long_context, within
from compress.planning.devices import GPUS, Device, Roofline, Steady
from compress.planning.memory import OVERHEAD, cache_room, weights_of
from compress.planning.requests import Request
from compress.planning.shape import Shape, shape_of
from compress.planning.study import Question, study
from compress.planning.timing import Clock

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1000,
}
TOKEN = 2 * 2 * 64 * 2 * 4  # K and V, KV heads, channels, bytes, blocks
MEMORY = 100_000_000
SHORT = [Request(100, 10)] * 3
LONG = Request(1500, 100)


@pytest.fixture(scope="module")
def small() -> Shape:
    return shape_of(AutoConfig.for_model(**SMALL), "model")


@pytest.fixture(scope="module")
def clock(small: Shape) -> Clock:
    """A clock by which every forward takes one second, and attention to 1000 x 1000 another."""
    free = Roofline(math.inf, math.inf)
    channels = small.query_heads * small.head_size * small.blocks
    device = Device(
        name="metronome",
        memory=10**9,
        rates=dict.fromkeys(("16", "W8A8", "W8A16", "W4A16"), free),
        values=dict.fromkeys(("norm", "rotation", "product"), Steady(0.0)),
        pair_s=1 / (channels * 1000 * 1000 / 2),
        kv_s=0.0,
        block_s=0.0,
        forward_s=1.0,
        source="a test",
    )
    return Clock(small, weights_of(small, None), device)


def test_nothing_is_needed_where_all_fit(clock: Clock) -> None:
    found = long_context([*SHORT, LONG], clock, 1600, MEMORY)
    assert (found["over"], found["share"], found["choice"]) == (0, 0, "none")
    assert [row["tokens"] for row in found["windows"]] == [1600]
    assert found["windows"][0]["bytes"] == 1600 * TOKEN


def test_each_window_by_hand(clock: Clock) -> None:
    found = long_context([*SHORT, LONG, Request(3000, 1000)], clock, 1000, MEMORY)
    first, second, last = found["windows"]
    assert [row["tokens"] for row in found["windows"]] == [1000, 2000, 4000]
    assert found["factor"] == 4
    assert (first["over"], second["over"], last["over"]) == (0.4, 0.2, 0)
    # Of 1500 tokens 900 are kept beside an answer of 100; of 3000 one, beside one of 1000.
    assert first["cut"] == pytest.approx((600 + 2999) / (300 + 1500 + 3000))
    assert second["cut"] == pytest.approx(2000 / (300 + 1500 + 3000))
    assert last["cut"] == 0
    for row in (first, second, last):
        assert row["bytes"] == row["tokens"] * TOKEN
        room = cache_room(clock.shape, clock.weights, MEMORY, row["tokens"])
        assert row["at_once"] == int(room / (row["tokens"] * TOKEN + 4 * 1000))


def test_each_way_by_hand(clock: Clock) -> None:
    found = long_context([*SHORT, LONG], clock, 1000, MEMORY)
    assert (found["over"], found["share"]) == (1, 0.25)
    assert found["dropped"] == pytest.approx(600 / 1500)
    ways = found["ways"]

    extended = ways["extend"]
    assert extended["bytes"] == 1600 * TOKEN
    assert extended["ttft_s"] == pytest.approx(1 + 1.5**2)
    assert extended["seconds"] == pytest.approx(1 + 1.5**2 + 99)
    assert extended["tokens"] == 1600

    cut = ways["truncate"]
    assert cut["bytes"] == 1000 * TOKEN
    assert cut["ttft_s"] == pytest.approx(1 + 0.9**2)
    assert cut["tokens"] == 1000

    # Parts of 744, 744 and 12 tokens, a summary of 256 from each; then 768 tokens, and 100 new.
    parts = 2 * (1 + 0.744**2) + (1 + 0.012**2) + 3 * 255
    summarized = ways["summaries"]
    assert found["parts"] == 3
    assert summarized["bytes"] == 1000 * TOKEN
    assert summarized["ttft_s"] == pytest.approx(parts + 1 + 0.768**2)
    assert summarized["seconds"] == pytest.approx(parts + 1 + 0.768**2 + 99)
    assert summarized["tokens"] == 1500 + 3 * 256 + 768 + 100


def test_a_window_too_small_for_a_summary_is_halved(clock: Clock) -> None:
    found = long_context([Request(300, 10)], clock, 100, MEMORY)
    assert found["parts"] == 6  # of 50 tokens, 50 new ones from each; of all the summaries 90 fit
    assert found["ways"]["summaries"]["tokens"] == 300 + 6 * 50 + 90 + 10


def test_as_many_fit_at_once_as_the_memory_holds(clock: Clock) -> None:
    found = long_context([LONG] * 3, clock, 1000, 20_000_000)["ways"]["extend"]
    left = (1 - OVERHEAD) * 20_000_000 - clock.weights.total
    # Activations of a prefill of the whole request, 2 * (2 * 256 + 3 * 512) each; logits of all.
    left -= 1600 * 2 * (2 * 256 + 3 * 512)
    assert found["at_once"] == int(left / (1600 * TOKEN + 4 * 1000))
    assert found["at_once"] > 0


def rare(count: int) -> list[Request]:
    return [*SHORT, *[Request(100, 10)] * (count - 4), LONG]


def test_the_way_that_is_advised(clock: Clock) -> None:
    def choice(requests: list[Request], memory: int = MEMORY) -> str:
        return str(long_context(requests, clock, 1000, memory)["choice"])

    assert choice([*SHORT, Request(910, 100)]) == "truncate"  # 10 of 910 tokens are cut
    assert choice([*SHORT, LONG]) == "extend"
    assert choice(rare(100)) == "summaries"  # one in a hundred
    assert choice(rare(99)) == "extend"
    assert choice([*SHORT, LONG], 16_000_000) == "summaries"  # no room for 1600 tokens


def test_a_window_that_answers_later_than_summaries_is_not_advised(clock: Clock) -> None:
    """Attention to 400 thousand tokens takes 160,000 s, a summary of 538 parts 138,000 s."""
    huge = [Request(400_000, 10)]
    found = long_context(huge, clock, 1000, 10**10)
    assert found["ways"]["extend"]["ttft_s"] > found["ways"]["summaries"]["ttft_s"]
    assert found["choice"] == "summaries"


def test_a_window_that_the_model_has_is_served_with(small: Shape, clock: Clock) -> None:
    found = long_context([*SHORT, Request(750, 16)], clock, 400, MEMORY)
    assert [row["tokens"] for row in found["windows"]] == [400, 800]
    assert (found["factor"], found["choice"]) == (1, "window")
    # 600 and 1000 positions: doubling stops at what the model has, and goes on from there.
    assert [row["tokens"] for row in long_context([LONG], clock, 600, MEMORY)["windows"]] == [
        600,
        1000,
        2000,
    ]
    assert long_context([LONG], clock, 600, MEMORY)["factor"] == 2
    assert long_context([LONG], clock, 600, MEMORY)["choice"] == "extend"
    # No room for all of it.
    assert long_context([Request(900, 16)], clock, 400, 10_000_000)["choice"] == "summaries"
    said = context_of(plan_of(small, [*SHORT, Request(750, 16)], 400))
    assert "Serve with window=800, which the model has without training: " in said
    assert "extend" not in said


def test_a_window_beyond_the_model_s_own_is_remarked(small: Shape) -> None:
    own = "The model's own window is 1,000 tokens: "
    said = context_of(plan_of(small, SHORT, 100_000_000))
    assert said.endswith(
        f"{own}100,000,000 take extending it by 100,000, which none of these requests needs."
    )
    assert context_of(plan_of(small, [LONG], 1700)).endswith(f"{own}1,700 take extending it by 2.")
    assert own not in context_of(plan_of(small, SHORT, 1000))


def test_an_answer_longer_than_the_window_is_cut_alike_everywhere(clock: Clock) -> None:
    found = long_context([Request(512, 128)], clock, 100, MEMORY)
    cut, whole = found["ways"]["truncate"], found["windows"][0]
    assert (cut["tokens"], cut["bytes"]) == (100, 100 * TOKEN)
    assert (cut["bytes"], cut["at_once"]) == (whole["bytes"], whole["at_once"])
    # 11 parts of 50 tokens or less with summaries of 50, then one token and 99 new ones.
    assert found["ways"]["summaries"]["tokens"] == 512 + 11 * 50 + 1 + 99
    assert found["ways"]["summaries"]["bytes"] == 100 * TOKEN


def test_requests_over_the_window_are_cut_to_it() -> None:
    asked = [Request(100, 10, 1.0), LONG, Request(3000, 5000)]
    assert within(asked, 1000) == [asked[0], Request(900, 100), Request(1, 999)]


def test_what_does_not_fit_whole_is_planned_for_in_the_window(small: Shape) -> None:
    plan = plan_of(small, [*SHORT, Request(100_000, 100)], 1000)  # 400 MB of KV cache
    assert plan["longest"] == 1000
    assert plan["requests"]["total"]["max"] == 100_100
    (said,) = (one["text"] for one in plan["advice"] if one["about"] == "context")
    assert "a longer window does not fit beside the weights" in said
    assert "requests of 1,000 tokens (the longest, cut to the window)" in tables.console(plan)


def context_of(plan: dict[str, Any]) -> str:
    (said,) = (one["text"] for one in plan["advice"] if one["about"] == "context")
    return str(said)


def plan_of(shape: Shape, requests: list[Request], window: int) -> dict[str, Any]:
    asked = Question(shape, shape, GPUS["a10g"], MEMORY, requests, window)
    found = study(asked)
    return {**found, "advice": advice(found)}


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        (SHORT, "No longer context is needed: the longest request has 110 tokens"),
        ([*SHORT, Request(910, 100)], "truncation drops only 1.1% of their prompts"),
        ([*SHORT, LONG], "A longer one pays if they must be read whole: extend by 2"),
        (rare(100), "summarize in two stages (3.0 parts of a window each, then the answer)"),
    ],
)
def test_the_advice_says_it_in_words(small: Shape, requests: list[Request], said: str) -> None:
    plan = plan_of(small, requests, 1000)
    context = [one["text"] for one in plan["advice"] if one["about"] == "context"]
    assert len(context) == 1
    assert said in context[0]
    printed = tables.console(plan)
    assert "Is a longer context needed?" in printed
    longest = max(request.total for request in requests)
    assert ("a two-stage summary  as summaries" in printed) == (longest > 1000)
