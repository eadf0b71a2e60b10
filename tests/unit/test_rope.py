"""Stretched frequencies: by the formulae, as transformers builds them, and from scaled models."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compress.algorithms import rope
from compress.model import skeleton

FACTOR, HEAD, WINDOW = 4.0, 64, 2048
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    **PLAIN,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {
    **PLAIN,
    "rope_type": "longrope",
    "short_factor": [1.0] * 32,
    "long_factor": [1 + i / 8 for i in range(32)],
    "original_max_position_embeddings": 512,
}


def config(parameters: dict[str, Any], positions: int, kind: str = "llama") -> PretrainedConfig:
    return AutoConfig.for_model(
        kind,
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=positions,
        rope_parameters=dict(parameters),
    )


def built(parameters: dict[str, Any], positions: int, kind: str = "llama") -> tuple[Tensor, float]:
    """Frequencies and temperature that transformers builds into a model."""
    model = skeleton(config(parameters, positions, kind), torch.float32)
    (turner,) = (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    turner(torch.zeros(1, 1, 4), torch.arange(positions).unsqueeze(0))  # longrope chooses now
    return turner.inv_freq.double(), turner.attention_scaling


KINDS = {
    "ntk": rope.scaled("ntk", PLAIN, FACTOR, HEAD, WINDOW),
    "yarn": rope.scaled("yarn", PLAIN, FACTOR, HEAD, WINDOW),
    "linear": rope.scaled("linear", PLAIN, FACTOR, HEAD, WINDOW),
    "ntk of a part of a head": rope.scaled(
        "ntk", {**PLAIN, "partial_rotary_factor": 0.25}, FACTOR, HEAD, WINDOW
    ),
    "yarn without whole pairs": {**YARN, "truncate": False},
    "yarn of DeepSeek": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn with a temperature": {**YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
    "llama3": LLAMA3,
    "longrope": LONG,
}


@pytest.mark.parametrize("name", KINDS)
def test_transformers_builds_what_the_formulae_say(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    parameters, positions = KINDS[name], int(FACTOR) * WINDOW
    kind = "gpt_neox" if "partial_rotary_factor" in parameters else "llama"
    with caplog.at_level(logging.WARNING, "transformers"):
        found, temperature = built(parameters, positions, kind)
    wanted, wanted_temperature = rope.frequencies(parameters, HEAD, positions)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert temperature == pytest.approx(wanted_temperature, rel=1e-6)
    if name in rope.METHODS:
        assert not caplog.records  # transformers knows every field that we write


@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_what_each_method_does_to_the_fastest_and_the_slowest_pair(partial: float) -> None:
    parameters = {**PLAIN, "partial_rotary_factor": partial}
    before, _ = rope.frequencies(parameters, HEAD, WINDOW)
    slowed = {}
    for method in rope.METHODS:
        scaled = rope.scaled(method, parameters, FACTOR, HEAD, WINDOW)
        after, temperature = rope.frequencies(scaled, HEAD, int(FACTOR) * WINDOW)
        slowed[method] = before / after
        warm = 0.1 * math.log(FACTOR) + 1 if method == "yarn" else 1
        assert temperature == pytest.approx(warm)
        assert float(slowed[method][-1]) == pytest.approx(FACTOR)
    assert float(slowed["ntk"][0]) == float(slowed["yarn"][0]) == 1
    torch.testing.assert_close(slowed["linear"], torch.full_like(before, FACTOR))
    turns = WINDOW * before / (2 * math.pi)
    assert (slowed["yarn"][turns > 40] == 1).all()
    assert float((slowed["yarn"][turns < 0.8] - FACTOR).abs().max()) < 1e-9
    between = slowed["ntk"][1:-1]
    assert ((between > 1) & (between < FACTOR)).all()


def test_more_stretch_slows_more_in_the_same_window() -> None:
    for method in rope.METHODS:
        usual, more = (
            rope.frequencies(rope.scaled(method, PLAIN, 2, HEAD, WINDOW, s), HEAD, 2 * WINDOW)[0]
            for s in (1.0, 1.5)
        )
        assert float(usual[-1] / more[-1]) == pytest.approx(1.5)


@pytest.mark.parametrize("stretch", [0.5, 0.75, 1.5])
def test_a_stretched_yarn_fills_its_window_with_the_frequencies_of_its_factor(
    stretch: float,
) -> None:
    scaled = rope.scaled("yarn", PLAIN, FACTOR, HEAD, WINDOW, stretch)
    longer = int(FACTOR) * WINDOW
    assert longer <= scaled["factor"] * scaled["original_max_position_embeddings"] < longer + 8
    found, temperature = rope.frequencies(scaled, HEAD, longer)
    wanted = rope.by_parts(10000, HEAD, FACTOR * stretch, WINDOW)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    assert temperature == pytest.approx(0.1 * math.log(FACTOR * stretch) + 1)


def test_scaled_models_are_stretched_from_the_window_they_were_trained_with() -> None:
    # A llama3 of 512 positions made 4096 by 8: by parts it stays what it is, twice as slow.
    assert rope.scaled("yarn", LLAMA3, 2, HEAD, 4096) == {**LLAMA3, "factor": 16.0}
    theta = rope.scaled("ntk", LLAMA3, 2, HEAD, 4096)
    assert theta == {**PLAIN, "rope_theta": pytest.approx(10000 * 16 ** (64 / 62))}
    found, _ = rope.frequencies(rope.scaled("linear", LLAMA3, 2, HEAD, 4096), HEAD, 8192)
    torch.testing.assert_close(found, rope.plain(10000, HEAD) / 16)

    warm = {**YARN, "attention_factor": 1.1386, "beta_fast": 16}
    again = rope.scaled("yarn", warm, 2, HEAD, 2048)
    assert again == {**YARN, "factor": 8.0, "beta_fast": 16}
    assert rope.frequencies(again, HEAD, 4096)[1] == pytest.approx(0.1 * math.log(8) + 1)


def test_linear_goes_on_as_linear_and_our_own_is_known() -> None:
    theirs = {**PLAIN, "rope_type": "linear", "factor": 2.0}
    twice = rope.scaled("linear", theirs, 2, HEAD, 4096)
    torch.testing.assert_close(rope.frequencies(twice, HEAD, 8192)[0], rope.plain(10000, HEAD) / 4)
    ours = rope.scaled("linear", PLAIN, 2, HEAD, 2048)
    by_parts = rope.scaled("yarn", ours, 2, HEAD, 4096)
    assert by_parts == {**YARN, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("method", "parameters", "said"),
    [
        ("yarn", LONG, "longrope's factors were searched"),
        ("ntk", {**PLAIN, "rope_type": "linear", "factor": 2.0}, "does not say from which window"),
        ("ntk", {"full_attention": PLAIN, "sliding_attention": PLAIN}, "differs by layer"),
        ("ntk", {**PLAIN, "rope_type": "proportional"}, "of the kind 'proportional'"),
        ("ntk", {"rope_type": "default"}, "no rope_theta"),
        ("ntk", {}, "no rope_theta"),
    ],
)
def test_what_cannot_be_stretched_is_refused_with_its_reason(
    method: str, parameters: dict[str, Any], said: str
) -> None:
    assert said in str(rope.refusal(method, parameters))
    with pytest.raises(ValueError, match=said):
        rope.scaled(method, parameters, 2, HEAD, WINDOW)


def test_the_window_of_a_yarn_whose_card_adds_the_factor_alone() -> None:
    assert rope.whole_window(YARN, 512) == 2048
    assert rope.whole_window(YARN, 1024) == 1024  # slowed more than its window asks for
    assert rope.whole_window(LLAMA3, 4096) == 4096


def test_a_short_text_reaches_every_position_of_the_window() -> None:
    seen = torch.zeros(256, dtype=torch.int64)
    for seed in range(2000):
        positions = rope.skipping(64, 256, torch.Generator().manual_seed(seed))
        assert positions[0] == 0
        assert positions[-1] < 256
        steps = positions.diff()
        assert (steps >= 1).all()
        assert int((steps > 1).sum()) <= 1
        seen[positions] += 1
    assert (seen > 0).all()
    assert torch.equal(rope.skipping(64, 64, torch.Generator().manual_seed(0)), torch.arange(64))


def test_dynamic_is_taken_as_what_it_is_within_its_window() -> None:
    dynamic = {**PLAIN, "rope_type": "dynamic", "factor": 2.0}
    assert rope.scaled("ntk", dynamic, 2, HEAD, WINDOW) == rope.scaled(
        "ntk", PLAIN, 2, HEAD, WINDOW
    )
    inside, _ = ROPE_INIT_FUNCTIONS["dynamic"](config(dynamic, WINDOW), torch.device("cpu"))
    torch.testing.assert_close(inside.double(), rope.plain(10000, HEAD), rtol=1e-5, atol=0)


def test_the_method_of_a_stretched_rope_is_told_however_it_is_spelled() -> None:
    windows = (WINDOW, int(FACTOR) * WINDOW)
    for method in rope.METHODS:
        made = rope.scaled(method, PLAIN, FACTOR, HEAD, WINDOW)
        assert rope.method_of(PLAIN, made, HEAD, windows) == method
        searched = rope.scaled(method, PLAIN, FACTOR, HEAD, WINDOW, 1.5)
        assert rope.method_of(PLAIN, searched, HEAD, windows) is None
    bare = {**PLAIN, "rope_type": "linear", "factor": FACTOR}
    assert rope.method_of(PLAIN, bare, HEAD, windows) == "linear"
    assert rope.method_of(PLAIN, {**bare, "factor": 2.0}, HEAD, windows) is None
    raised = {**LLAMA3, "factor": 32.0}
    assert rope.method_of(LLAMA3, raised, HEAD, (4096, 16384)) == "yarn"
    assert rope.method_of(PLAIN, PLAIN, HEAD, windows) is None
    assert rope.method_of(LONG, {"rope_type": "axial"}, HEAD, windows) is None
