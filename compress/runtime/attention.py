"""Attention on CPU: transformers' SDPA, but for one new token with several heads to a key's head.

For grouped queries torch's CPU kernel takes a row at a time: one token of SmolLM2 (9 heads on 3)
and 200 keys take 290 µs a layer, and 42 µs where the heads of a group are the rows of one product.
transformers does so for some masks; here it is done without one too, and where it is compiled.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import pack_gqa, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_by_group"
SPECIAL = ("position_bias", "softcap")
"""What a layer may hand on beside, for transformers to do or refuse."""


def install(model: PreTrainedModel) -> None:
    """Let `model` attend so, where it is on CPU and would by SDPA."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def in_words(model: PreTrainedModel) -> str:
    """How `model` attends, for reports."""
    name = str(model.config._attn_implementation)
    if name == NAME:
        return "SDPA, the heads of a group together"
    if name != "sdpa":
        return name
    flash = model.device.type == "cuda" and torch.backends.cuda.flash_sdp_enabled()
    return "SDPA, by FlashAttention where torch has it" if flash else "SDPA"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Output [B, N, H, D] for `query` [B, H, N, D]; `key`, `value` [B, KV heads, T, D]."""
    groups = getattr(module, "num_key_value_groups", 1)
    plain = not any(kwargs.get(name) is not None for name in SPECIAL)
    if query.shape[2] > 1 or groups == 1 or not plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    packed = F.scaled_dot_product_attention(
        pack_gqa(query, groups),
        key,
        value,
        attn_mask=pack_gqa(attention_mask, groups),
        scale=scaling,
    )
    return packed.reshape(query.shape).transpose(1, 2), None
