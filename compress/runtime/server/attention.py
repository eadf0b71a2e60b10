"""Attention of a batch of requests of different lengths, each by itself.

transformers' continuous batching puts the tokens of all requests in one row, and its SDPA path
attends from all of them to the keys of all, masked: 16 requests of 500 tokens pay for 8000 keys a
token. Here each request attends to its own keys by the same call as in `generate`. That is less
work, and it keeps the arithmetic of a request apart from what else is in the batch: with linears
whose rows do not depend on each other, a request's tokens are those of `generate`, bit by bit.

Shapes: T tokens of R requests in one row, H heads, D head size; N new tokens of one request, K keys
that it has with them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from compress.runtime import attention

NAME = "each_request_alone"
UNSERVED = ("softcap", "s_aux", "position_bias")
"""What layers of some models hand on beside: a cap of logits, attention sinks, biases."""


def install(model: PreTrainedModel) -> None:
    """Let `model` attend so in continuous batching; its manager is to be made before."""
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The output [1, T, H, D] for `query` [1, H, T, D]; `key`, `value` hold all requests' keys.

    cu_seq_lens_q, cu_seq_lens_k [R + 1]: where the tokens and keys of each request begin.
    Raises ValueError where a layer hands on what SDPA does not do, or not by request.
    """
    for name in UNSERVED:
        if others.get(name) is not None:
            raise ValueError(f"`sdpa` attention by request does not support `{name}`")
    outputs = []
    bounds_q, bounds_k = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    for request in range(len(bounds_q) - 1):
        tokens = slice(bounds_q[request], bounds_q[request + 1])
        keys = slice(bounds_k[request], bounds_k[request + 1])
        output, _weights = attention.attend(
            module,
            query[:, :, tokens],
            key[:, :, keys],
            value[:, :, keys],
            mask(tokens.stop - tokens.start, keys.stop - keys.start, sliding_window, query.device),
            scaling=scaling,
            is_causal=True,
        )
        outputs.append(output)
    return torch.cat(outputs, 1), None


def mask(new: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each of the last `new` of `keys` tokens sees, [N, K]; None: all before it.

    window: a token sees that many, itself included; None: all.
    """
    cut = window is not None and keys > window
    if not cut and new in (1, keys):
        return None
    token = torch.arange(keys - new, keys, device=device).unsqueeze(1)
    back = token - torch.arange(keys, device=device)
    return (back >= 0) & (back < (window or keys))
