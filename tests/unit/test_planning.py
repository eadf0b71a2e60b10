"""Plans agree with hand calculation: bytes, times, and small simulations."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from compress.errors import UserError
from compress.kernels.native import build
from compress.planning import lengths, simulate
from compress.planning.devices import GPUS, Curve, Device, Roofline, Steady, first_with
from compress.planning.memory import (
    OVERHEAD,
    all_schemes,
    kv_bytes,
    kv_sliding,
    largest_batch,
    largest_length,
    needed,
    weights_of,
)
from compress.planning.requests import Request, read_requests
from compress.planning.shape import Shape, read_model, shape_of
from compress.planning.study import Question, study
from compress.planning.tables import simulated
from compress.planning.timing import Clock
from compress.qtensor import QuantSpec

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
LLAMA_2_7B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_31_8B = LLAMA_2_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
}
SMALL = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def shape(fields: dict[str, Any], **more: Any) -> Shape:
    return shape_of(AutoConfig.for_model(**(fields | more)), "model")


@pytest.fixture(scope="module")
def llama() -> Shape:
    return shape(LLAMA_2_7B)


@pytest.fixture(scope="module")
def small() -> Shape:
    return shape(SMALL)


@pytest.mark.parametrize(
    ("fields", "parameters", "kv_per_token"),
    [
        (LLAMA_2_7B, 6_738_415_616, 512 * 1024),  # 2 * 32 blocks * 32 heads * 128 * 2 bytes
        (LLAMA_31_8B, 8_030_261_248, 128 * 1024),  # 8 KV heads instead of 32
        (QWEN25_7B, 7_615_616_512, 56 * 1024),  # 28 blocks, 4 KV heads
    ],
)
def test_a_7b_from_its_config_alone(
    fields: dict[str, Any], parameters: int, kv_per_token: int
) -> None:
    found = shape(fields)
    assert found.parameters == parameters  # as published
    assert weights_of(found, None).total == 2 * parameters
    assert found.kv_per_token["16"] == kv_per_token
    assert kv_bytes(found, "16", 1000) == 1000 * kv_per_token


def test_w8a8_of_llama_2_7b_by_hand(llama: Shape) -> None:
    found = weights_of(llama, QuantSpec(8, activation_bits=8))
    quantized = 32 * (4096 * 4096 + 3 * 4096 * 11008)  # o, gate, up, down
    scales = 32 * 2 * (4096 + 2 * 11008 + 4096)
    assert found.quantized_weights == quantized
    assert found.total == 2 * llama.parameters - quantized + scales
    assert found.plain_weights == 32 * 3 * 4096 * 4096  # q, k, v
    native = weights_of(llama, QuantSpec(8, activation_bits=8), "native")
    assert found.total - native.total == 32 * (4096 * 4096 - 2 * 4096)  # v too


def test_w4a16_of_llama_2_7b_by_hand(llama: Shape) -> None:
    quantized = 32 * (4096 * 4096 + 3 * 4096 * 11008)
    for group in (128, 64, 32):
        found = weights_of(llama, QuantSpec(4, group))
        sixteen = 2 * (llama.parameters - quantized)
        shapes = 16 * 4 * 32
        assert found.total == sixteen + quantized // 2 + 2 * quantized // group + shapes


def test_on_cpu_integers_are_held_twice_only_without_a_compiler(
    llama: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = 32 * (4096 * 4096 + 3 * 4096 * 11008)
    for built, spec, copies in (
        (True, QuantSpec(4, 128), 4 * quantized // 128),  # scales in float32
        (False, QuantSpec(4, 128), quantized // 2 + 4 * quantized // 128),
        (True, QuantSpec(8), 4 * 32 * (2 * 4096 + 2 * 11008)),
        (False, QuantSpec(8), quantized + 2 * 32 * (2 * 4096 + 2 * 11008)),
    ):
        monkeypatch.setattr(build, "available", lambda built=built: built)
        assert weights_of(llama, spec, on_cpu=True).parts["copies"] == copies


def test_schemes_are_listed_once_and_refusals_say_why(small: Shape) -> None:
    found, refused = all_schemes(shape(SMALL, hidden_size=192, intermediate_size=576))
    names = [weights.scheme for weights in found]
    assert len(set(names)) == len(names)
    assert "W4A16 g64" in names
    assert "W4A16 g64" in refused["W4A16 g128"]
    names = [weights.scheme for weights in all_schemes(small)[0]]
    assert names[0] == "16 bit"
    assert names[-1] == "W4A16"


def test_a_sliding_window_bounds_the_cache() -> None:
    fields = SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    found = shape(fields, sliding_window=512)
    row = 2 * 2 * 64 * 2 * 4  # K and V, KV heads, channels, bytes, blocks
    assert kv_bytes(found, "16", 100) == 100 * row
    assert kv_bytes(found, "16", 5000) == 512 * row
    assert list(found.kv_per_token) == ["16"]
    assert kv_sliding(found) == [{"window": 512, "layers": 4, "bytes": row}]


def test_beams_have_windows_of_their_own(small: Shape) -> None:
    fields = SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    found, row = shape(fields, sliding_window=512), 2 * 2 * 64 * 2 * 4
    # A prompt fills the windows, so that the answers of beams take what the prompt no longer has.
    room = 10 * (512 + 3 * 100) * row + 10 * 4 * 4 * 1000
    asked = lengths.decoding([Request(4000, 100)], second_a_forward(found), room, beams=4)
    assert asked["beam_requests"] == {"1": int(room / (512 * row + 4000)), "4": 10}


def test_8_bit_caches_take_what_the_runtime_says(small: Shape) -> None:
    row = 2 * 64  # a token's K, or V, in a block
    whole = 4 * 2 * row * 2
    assert small.kv_per_token == {
        "16": whole,
        "v8": whole - 4 * 2 * (64 - 2),
        "kv8": whole - 4 * 2 * (2 * 64 - 2) + 4 * 2 * 64 * 2 // 64,
    }


def test_the_largest_batch_and_length_just_fit(small: Shape) -> None:
    weights, memory = weights_of(small, None), 40_000_000

    def taken(batch: int, tokens: int) -> float:
        return sum(needed(small, weights, "16", batch, tokens).values())

    room = (1 - OVERHEAD) * memory
    batch = largest_batch(small, weights, "16", 512, memory)
    assert taken(batch, 512) <= room < taken(batch + 1, 512)
    tokens = largest_length(small, weights, "16", 2, memory)
    assert taken(2, tokens) <= room < taken(2, tokens + 1)
    assert largest_batch(small, weights, "16", 512, 1_000_000) == 0
    assert largest_length(small, weights, "16", 1, 1_000_000) == 0


def test_requests_of_4096_on_24_gb_by_hand(llama: Shape) -> None:
    request = 4096 * 512 * 1024 + 4 * 32000  # K and V, and its logits
    prefill = 4096 * 2 * (2 * 4096 + 3 * 11008)
    room = 0.95 * 24e9 - 2 * 6_738_415_616 - prefill
    weights = weights_of(llama, None)
    assert largest_batch(llama, weights, "16", 4096, 24 * 10**9) == int(room / request) == 4
    each = 512 * 1024 + 2 * (2 * 4096 + 3 * 11008)
    longest = (0.95 * 24e9 - 2 * 6_738_415_616 - 4 * 32000) / each
    assert largest_length(llama, weights, "16", 1, 24 * 10**9) == int(longest)


def test_the_table_of_three_models_in_the_docs_is_what_plans_say() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    section = page.split("## Three models on 24 GB")[1].split("## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")][1:7]
        for line in section.splitlines()
        if re.match(r"\|.*\| (16 bit|W\dA)", line)
    ]
    memory, expected = 24 * 10**9, []
    for fields in (LLAMA_2_7B, LLAMA_31_8B, QWEN25_7B):
        model = shape(fields)
        for weights in all_schemes(model)[0]:
            batches = [largest_batch(model, weights, k, 4096, memory) for k in model.kv_per_token]
            length = largest_length(model, weights, "16", 1, memory)
            size = f"{weights.total / 1e9:.2f}"
            expected.append([weights.scheme, size, *map(str, batches), f"{length:,}"])
    assert [row for row in expected if row[0] != "W4A16 g32"] == rows
    assert len(rows) == 18


def test_decoding_a_7b_is_bound_by_its_bytes(llama: Shape) -> None:
    clock = Clock(llama, weights_of(llama, None), GPUS["a10g"])
    read = 2 * (llama.parameters - 32000 * 4096 - 65 * 4096)  # all but embedding and norms
    bandwidth = 0.7 * 600e9
    kv = 1000 * 512 * 1024
    assert clock.decode(1, 1000) == pytest.approx((read + kv) / bandwidth, rel=0.05)
    # A prompt of 1000 tokens: two operations a weight of the blocks and a token.
    inside = sum(n * k for n, k in llama.linears.values())
    assert clock.prefill([1000]) == pytest.approx(2 * inside * 1000 / 35e12, rel=0.1)


def test_a_curve_is_met_where_measured_and_grows_in_proportion_beyond() -> None:
    curve = Curve((1, 16, 256), (1e-10, 2e-10, 8e-10))
    assert curve.seconds(10**6, 0, 16) == pytest.approx(2e-4)
    assert curve.seconds(10**6, 0, 4) == pytest.approx(math.sqrt(2) * 1e-4)
    assert curve.seconds(10**6, 0, 512) == pytest.approx(16e-4)


def test_the_first_device_that_has_the_memory() -> None:
    found = [first_with(int(gigabytes * 1e9)).name for gigabytes in (24, 40, 141, 500)]
    assert found == ["a10g", "a100", "h200", "h200"]


def second_a_forward(model: Shape) -> Clock:
    """A clock by which every forward takes one second."""
    free = Roofline(math.inf, math.inf)
    device = Device(
        name="metronome",
        memory=10**9,
        rates=dict.fromkeys(("16", "W8A8", "W8A16", "W4A16"), free),
        values=dict.fromkeys(("norm", "rotation", "product"), Steady(0.0)),
        pair_s=0.0,
        kv_s=0.0,
        block_s=0.0,
        forward_s=1.0,
        source="a test",
    )
    return Clock(model, weights_of(model, None), device)


THREE = [Request(10, 3), Request(10, 1), Request(10, 5)]


def times(served: list[simulate.Served]) -> dict[int, tuple[float, float]]:
    return {one.request.new: (one.first, one.last) for one in served}


def test_static_batching_waits_for_the_longest(small: Shape) -> None:
    found = times(simulate.static(THREE, second_a_forward(small), slots=2))
    assert found == {3: (1, 3), 1: (1, 1), 5: (4, 8)}


def test_continuous_batching_takes_in_who_fits(small: Shape) -> None:
    clock = second_a_forward(small)
    # Two at once, with a thousand logits each; the third fits in when the second has left.
    room = kv_bytes(small, "16", 13 + 15) + 2 * 4 * 1000
    found = times(simulate.continuous(THREE, clock, room))
    # The second leaves with its first token; the third's prefill holds the first one up.
    assert found == {3: (1, 4), 1: (1, 1), 5: (2, 6)}
    assert times(simulate.continuous(THREE, clock, 10**9)) == {3: (1, 3), 1: (1, 1), 5: (1, 5)}


def test_nobody_is_served_before_coming(small: Shape) -> None:
    late = [Request(10, 4), Request(10, 2, at=2.5), Request(10, 6, at=100)]
    found = times(simulate.continuous(late, second_a_forward(small), 10**9))
    # Steps end at 2, 3; who came at 2.5 is prefilled until 4, and both step on together.
    assert found == {4: (1, 5), 2: (4, 5), 6: (101, 106)}


def test_split_prefills_one_at_a_time_and_hands_on(small: Shape) -> None:
    found = times(simulate.split(THREE, second_a_forward(small), 10**9))
    assert [found[new][0] for new in (3, 1, 5)] == [1, 2, 3]
    assert found[3][1] == pytest.approx(3, abs=0.1)
    assert found[5][1] == pytest.approx(7, abs=0.1)


def test_a_prompt_attends_within_its_windows() -> None:
    fields = SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    found, clock = shape(fields, sliding_window=512), second_a_forward(shape(SMALL))
    timed = replace(clock, shape=found, device=replace(clock.device, pair_s=1.0))
    channels = found.query_heads * found.head_size
    pairs = 4 * (512 * 512 / 2 + (2000 - 512) * 512)  # blocks; the first 512 see less
    assert timed.prefill([2000]) == pytest.approx(1 + channels * pairs)
    assert timed.prefill([300]) == pytest.approx(1 + channels * 4 * 300 * 300 / 2)
    on_cpu = replace(timed, device=replace(timed.device, name="cpu"))
    assert on_cpu.prefill([2000]) == pytest.approx(1 + channels * 4 * 2000 * 2000 / 2)


def test_of_a_long_log_the_first_requests_are_simulated(
    small: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.planning.study.SIMULATED", 10)
    asked = [Request(20, 5)] * 30
    plan = study(Question(small, small, GPUS["a10g"], 24 * 10**9, asked, window=2048))
    assert plan["batching"]["requests"] == 10
    assert plan["requests"]["count"] == 30
    assert list(simulated(plan)) == ["Simulated on the first 10 of 30 requests."]


def test_outcome_counts_from_arrival(small: Shape) -> None:
    found = simulate.outcome(simulate.static(THREE, second_a_forward(small), slots=2))
    assert found["seconds"] == 8
    assert found["tokens_per_s"] == pytest.approx(9 / 8)
    assert found["ttft_s"]["max"] == 4
    assert found["tpot_s"]["max"] == 1


def test_reservations_by_hand(small: Shape) -> None:
    requests = [Request(60, 40)] * 8 + [Request(900, 100)] * 2
    token = small.kv_per_token["16"]
    clock, memory = second_a_forward(small), 30_000_000
    found = {r["rule"]: r for r in lengths.reservations(requests, clock, memory)}
    assert found["p80"]["p80"] == 100
    assert found["max"]["bytes"] == 1000 * token
    assert found["p80"]["bytes"] == pytest.approx((0.8 * 100 + 0.2 * 1000) * token)
    assert found["paged"]["bytes"] == pytest.approx((0.8 * 112 + 0.2 * 1008) * token)
    # Beside the weights and a prefill of the longest that may come; 4 bytes for each logit.
    left = 0.95 * memory - clock.weights.total
    assert found["window"]["requests"] == int((left - 2048 * 4096) / (2048 * token + 4000)) == 3
    assert found["max"]["requests"] == int((left - 1000 * 4096) / (1000 * token + 4000)) == 9
    each = (0.8 * 112 + 0.2 * 1008) * token + 4000
    assert found["paged"]["requests"] == int((left - 1000 * 4096) / each) == 31


def test_what_fits_is_said_alike_by_every_part_of_a_plan(small: Shape) -> None:
    asked = [Request(512, 128)] * 8
    plan = study(Question(small, small, GPUS["a10g"], 24 * 10**9, asked, window=2048))
    at_once = {row["rule"]: row["requests"] for row in plan["reservations"]}
    room = 0.95 * 24e9 - plan["schemes"][0]["weights"]
    batch = plan["schemes"][0]["largest_batch"]["16"]
    assert batch == int((room - 640 * 4096) / (640 * 2048 + 4000)) == 17335
    assert at_once["max"] == at_once["p80"] == at_once["paged"] == batch
    assert at_once["window"] == plan["long_context"]["windows"][0]["at_once"] == 5427


def test_decoding_settings_by_hand(small: Shape) -> None:
    requests = [Request(50, 50)] * 19 + [Request(50, 250)]
    token = small.kv_per_token["16"]
    room = 1100 * token + 10 * 4 * 1000
    found = lengths.decoding(requests, second_a_forward(small), room, beams=4)
    assert found["without_stop"] == pytest.approx(250 / 60)
    assert found["cap"] == 50
    assert found["cut_share"] == 0.05
    assert found["cap_saves_tokens"] == pytest.approx(200 / 1200)
    assert found["cap_reserves"] == pytest.approx((100 * token + 4000) / (300 * token + 4000))
    # Of 1100 tokens one request takes 50 + 60, in four beams 50 + 4 * 60.
    assert found["beam_requests"] == {"1": 10, "4": 3}
    assert found["beam_tokens_per_s"] == {"1": 10, "4": 3}


def test_requests_are_read_with_their_times(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    lines = '{"prompt": 8, "new": 2, "at": 3}\r\n\n{"prompt_tokens": 5, "new_tokens": 1, "at": 0}\n'
    file.write_text(lines, encoding="utf-8-sig")
    assert read_requests(str(file)) == [Request(5, 1), Request(8, 2, 3.0)]
    assert read_requests("12x3") == [Request(12, 3)] * 64
    drawn = read_requests("12x3", rate=2.0, seed=1)
    assert drawn == read_requests("12x3", rate=2.0, seed=1)
    assert 20 < drawn[-1].at < 45  # 63 intervals of half a second in the mean


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "lengths.jsonl:2: not JSON"),
        ('{"new": 1, "prompt": 3, "new": 2}', 'lengths.jsonl:2: not JSON ("new" is given twice)'),
        ("[1]", "lengths.jsonl:2: found [1]"),
        ('{"prompt": 3}', 'lengths.jsonl:2: "new" is None'),
        ('{"prompt": 0, "new": 1}', 'lengths.jsonl:2: "prompt" is 0'),
        (
            '{"prompt": 1, "new": 10000001}',
            'lengths.jsonl:2: "new" is 10000001; wanted tokens, 1 to',
        ),
        ('{"user": "J\xf6rg"}', "lengths.jsonl:2: not UTF-8"),
        ('{"prompt": 3, "new": 1, "at": -1}', 'lengths.jsonl:2: "at" is -1'),
        (
            '{"prompt": 3, "new": 1, "at": 1e300}',
            'lengths.jsonl:2: "at" is 1e+300; wanted seconds, 0 to 10,000,000,000, not '
            "milliseconds or less",
        ),
        ('{"prompt": 3, "new": 1, "at": 1796000000000}', '"at" is 1796000000000; wanted seconds'),
        ('{"prompt": 3, "new": 1, "at": Infinity}', 'lengths.jsonl:2: "at" is inf; wanted seconds'),
        ('{"prompt": 3, "new": 1, "at": NaN}', 'lengths.jsonl:2: "at" is nan; wanted seconds'),
    ],
)
def test_a_wrong_request_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(f'{{"prompt": 8, "new": 2}}\n{line}\n', encoding="latin-1")
    with pytest.raises(UserError) as raised:
        read_requests(str(file))
    assert said in str(raised.value)


def test_times_that_some_lines_have_or_that_stand_beside_a_rate_are_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "lengths.jsonl"
    timed, bare = '{"prompt": 8, "new": 2, "at": 3}\n', '{"prompt": 5, "new": 1}\n'
    file.write_text(timed + bare)
    said = rf'^{file}:2: no "at", which other lines have; wanted it in all, or in none$'
    for rate in (None, 2.0):
        with pytest.raises(UserError, match=said):
            read_requests(str(file), rate=rate)
    file.write_text(timed)
    with pytest.raises(UserError, match=rf'^rate=2.5, but the lines of {file} have "at"; wanted'):
        read_requests(str(file), rate=2.5)
    file.write_text(bare)
    assert read_requests(str(file), rate=2.5) == [Request(5, 1, 0.0)]


def test_requests_at_the_times_of_a_clock_are_planned_for(small: Shape, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    times = (1_796_000_000, 1_796_000_000.5, 10_000_000_000)
    file.write_text("\n".join(f'{{"prompt": 10, "new": 2, "at": {at}}}' for at in times))
    clock = second_a_forward(small)
    found = simulate.outcome(simulate.continuous(read_requests(str(file)), clock, 10**9))
    assert found["ttft_s"]["max"] == 1.5  # the second came while the first was prefilled
    assert found["seconds"] == 10_000_000_000 - 1_796_000_000 + 2


@pytest.mark.parametrize(("name", "why"), [("absent", "no such file"), ("", "a folder")])
def test_requests_that_cannot_be_read_are_told_by_why(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"^requests={tmp_path}/{name}: {why}; wanted a JSONL"):
        read_requests(f"{tmp_path}/{name}")


def test_requests_in_the_home_of_nobody_are_no_such_file() -> None:
    with pytest.raises(UserError, match=r"^requests=~no-user/x: no such file"):
        read_requests("~no-user/x")


def test_a_config_file_is_enough_and_what_is_none_is_said(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL))
    assert shape_of(read_model(str(file)), "small").blocks == 4
    assert shape_of(read_model(str(file)), "small", blocks=2).blocks == 2
    for text in ("{", "[]", "{}", '{"model_type": "abacus"}'):
        file.write_text(text)
        with pytest.raises(UserError, match=r"small\.json: "):
            read_model(str(file))
    with pytest.raises(UserError, match="no such file"):
        read_model(str(tmp_path / "absent"))
