"""Attention of one new token by groups of heads: what transformers' gives, under any mask."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from compress.runtime.attention import attend

B, HEADS, GROUPS, T, D = 2, 6, 3, 40, 16


def masks() -> dict[str, Tensor | None]:
    seen = torch.rand(B, 1, 1, T) < 0.7
    seen[..., 0] = True
    return {
        "none": None,
        "padding": seen,
        "additive": torch.zeros(B, 1, 1, T).masked_fill(~seen, float("-inf")),
        "by head": torch.randn(B, HEADS, 1, T),
    }


@pytest.mark.parametrize("kind", ["none", "padding", "additive", "by head"])
def test_grouped_attention_is_that_of_transformers(kind: str) -> None:
    module: Any = SimpleNamespace(num_key_value_groups=GROUPS, is_causal=True)
    query = torch.randn(B, HEADS, 1, D)
    key, value = torch.randn(2, B, HEADS // GROUPS, T, D)
    mask = masks()[kind]
    wanted, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = attend(module, query, key, value, mask, scaling=0.3)
    assert found.shape == wanted.shape == (B, 1, HEADS, D)
    assert torch.allclose(found, wanted, atol=1e-5)
