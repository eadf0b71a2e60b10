"""A part of a head that turns is scaled as transformers turns it."""

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compress.algorithms import rope
from compress.model import skeleton

FACTOR, HEAD, ROTARY = 4.0, 64, 16  # GPT-NeoX turns a quarter of a head


def neox(parameters: dict[str, object]) -> PretrainedConfig:
    return AutoConfig.for_model(
        "gpt_neox",
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )


PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def test_ntk_slows_the_slowest_turning_pair_by_the_factor() -> None:
    scaled = rope.scaled("ntk", PLAIN, FACTOR, HEAD, 2048)
    models = [skeleton(neox(p), torch.float32) for p in (PLAIN, scaled)]
    before, after = (m.gpt_neox.rotary_emb.inv_freq for m in models)
    assert before.shape == (ROTARY // 2,)
    assert float(before[-1] / after[-1]) == pytest.approx(FACTOR, rel=1e-5)
    assert float(after[0]) == 1
    assert scaled["rope_theta"] == pytest.approx(10000.0 * FACTOR ** (ROTARY / (ROTARY - 2)))


@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_other_methods_leave_the_part_to_transformers(method: str) -> None:
    scaled = rope.scaled(method, PLAIN, FACTOR, HEAD, 2048)
    found, _ = ROPE_INIT_FUNCTIONS[method](neox(scaled), torch.device("cpu"))
    slowest = 10000.0 ** -((ROTARY - 2) / ROTARY)
    assert found.shape == (ROTARY // 2,)
    assert float(found[-1]) == pytest.approx(slowest / FACTOR)
