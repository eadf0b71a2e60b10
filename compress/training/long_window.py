"""A long window through a model, with the logits of a part of it in memory at a time.

A window of 32 thousand tokens has 20 GB of logits in float32 at V = 152 thousand. Attention has no
mask in memory either: transformers' SDPA is told that it is causal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

CHUNK = 512
"""Positions whose logits are held at once: 0.3 GB in float32 at V = 152 thousand."""


def arithmetic(model: PreTrainedModel, precision: torch.dtype) -> torch.autocast:
    """A context in which `model` computes in `precision`: float32, or bfloat16 but for norms,
    softmax and the residual stream.
    """
    enabled = precision != torch.float32
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)


@contextmanager
def checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Keep a block's input alone for the way back, and make the rest again when it is its turn.

    transformers does so in training mode alone, which would switch dropout on: it stays off. A
    model that cannot do so keeps all.
    """
    if not model.supports_gradient_checkpointing:
        yield
        return
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    try:
        yield
    finally:
        model.eval()
        model.activation_checkpointing_disable()


class _Given(nn.Module):
    """Stands in the place of all that comes before the head, and gives what is known already."""

    def __init__(self, states: ModelOutput) -> None:
        super().__init__()
        self.states = states

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self.states


def before_head(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None
) -> ModelOutput:
    """What the model makes of tokens `ids` [B, T] at `positions` [T] (0, 1, … if None) before its
    head; its `last_hidden_state` is [B, T, H].

    Every token attends to all before it, over a jump of positions too: without a mask transformers
    would take that for the start of another document packed into the same row.
    """
    if positions is None:
        return model.base_model(ids, use_cache=False)
    return model.base_model(
        ids,
        position_ids=positions.to(ids.device).expand_as(ids),
        attention_mask=torch.ones_like(ids),
        use_cache=False,
    )


def logits(model: PreTrainedModel, made: Any, part: slice) -> Tensor:
    """Logits [B, n, V], float32, of a part of the positions of `made`, from `before_head`.

    The model makes them itself, since some scale or cap what comes out of the head.
    """
    hidden = made.last_hidden_state[:, part]
    name = model.base_model_prefix
    body = getattr(model, name)
    setattr(model, name, _Given(type(made)(last_hidden_state=hidden)))
    try:
        nothing = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return model(nothing, use_cache=False).logits.float()
    finally:
        setattr(model, name, body)


def losses(model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The loss in nats of every token but the first, [B, T - 1]; `ids`, `positions` as above.

    Where gradients are taken, logits are made again when it is their turn to go back.
    """
    made = before_head(model, ids, positions)

    def of(part: slice, tokens: Tensor) -> Tensor:
        found = logits(model, made, part).transpose(1, 2)
        return nn.functional.cross_entropy(found, tokens, reduction="none")

    parts = []
    for first in range(0, ids.shape[1] - 1, CHUNK):
        tokens = ids[:, first + 1 : first + 1 + CHUNK]
        part = slice(first, first + tokens.shape[1])
        if torch.is_grad_enabled():
            parts.append(checkpoint(of, part, tokens, use_reentrant=False))
        else:
            parts.append(of(part, tokens))
    return torch.cat(parts, 1)
