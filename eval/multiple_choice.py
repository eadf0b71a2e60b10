"""Multiple choice by likelihood: what an item's choices share goes through the model once.

The context is read into a KV cache, and each choice goes on from a copy of it, as decoding would.
docs/log.md counts the tokens that this saves.
"""

import inspect
from copy import copy

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from compress.eval.likelihood import (
    Row,
    Scored,
    by_length,
    last_logits,
    read,
    scored,
)
from compress.log import progress
from compress.runtime.cache import cache_for

SLACK = 4
"""Tokens by which contexts of one batch may differ in length: what the longer ones have beyond the
shortest is read with each of their choices."""
BY_LENGTH = ("dynamic", "longrope")
"""Types of RoPE whose frequencies, those of the first tokens too, depend on the text's length."""


@torch.inference_mode()
def scored_items(
    model: PreTrainedModel, items: list[list[Row]], *, batch_size: int, kv_cache: str = "16"
) -> list[list[Scored]]:
    """`scored` for the rows of each item; tokens that they begin with alike are read once.

    batch_size: contexts at a time, then choices at a time. Items that share nothing, and models
    that cannot go on from one context several times, take the plain way.
    """
    shares = kv_cache == "16" and can_share(model)
    lengths = [shared_tokens(rows) if shares else 0 for rows in items]
    results: dict[int, list[Scored]] = {}
    for batch in progress(_of_like_context(lengths, batch_size), "likelihoods", "batch"):
        length = lengths[batch[0]]
        of_batch = _after_shared(model, [items[i] for i in batch], length, batch_size)
        results |= zip(batch, of_batch, strict=True)
    alone = [i for i, length in enumerate(lengths) if not length]
    rows = [row for i in alone for row in items[i]]
    plain = iter(scored(model, rows, batch_size=batch_size, kv_cache=kv_cache))
    results |= {i: [next(plain) for _ in items[i]] for i in alone}
    return [results[i] for i in range(len(items))]


def can_share(model: PreTrainedModel) -> bool:
    """Whether texts can go on from what `model` keeps of their beginning as if read whole.

    So they can from keys and values, all of them or those in a window. From states (of Mamba, of
    convolutions) not every model goes on by more than a token, and other caches we do not know.
    """
    if "cache" not in inspect.signature(model.forward).parameters:
        return False
    turns = " ".join(str(getattr(module, "rope_type", "")) for module in model.modules())
    kept = {type(layer) for layer in cache_for(model, "16").layers}
    known = kept <= {DynamicLayer, DynamicSlidingWindowLayer}
    return known and not any(name in turns for name in BY_LENGTH)


def shared_tokens(rows: list[Row]) -> int:
    """How many tokens all rows begin with; 0 for a single row, which shares with none.

    The last token before a continuation is not counted, even where all have it: it predicts the
    continuation's first. Where tokens reach across the end of the prompt, rows part before.
    """
    if len(rows) == 1:
        return 0
    most = min(start for _, start in rows) - 1
    columns = zip(*(ids[:most] for ids, _ in rows), strict=True)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), most)


def _of_like_context(lengths: list[int], batch_size: int) -> list[list[int]]:
    """Indices of the lengths above 0, in batches that begin with their shortest."""
    batches: list[list[int]] = []
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lengths.__getitem__):
        fits = batches and lengths[i] - lengths[batches[-1][0]] <= SLACK
        if fits and len(batches[-1]) < batch_size:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _after_shared(
    model: PreTrainedModel, items: list[list[Row]], length: int, batch_size: int
) -> list[list[Scored]]:
    """`scored` for items whose rows begin with `length` tokens alike, or more."""
    shared = torch.tensor([rows[0][0][:length] for rows in items], device=model.device)
    cache = cache_for(model, "16")
    last_logits(model, 1, {"input_ids": shared, "use_cache": True, "cache": cache})
    rows = [row for of_item in items for row in of_item]
    item = torch.tensor([i for i, of_item in enumerate(items) for _ in of_item])
    results: dict[int, Scored] = {}
    for batch in by_length(rows, batch_size):
        context = _copies(cache, item[batch].to(model.device))
        of_batch = read(model, [rows[i] for i in batch], context=context, length=length)
        results |= zip(batch, of_batch, strict=True)
    in_order = iter(results[i] for i in range(len(rows)))
    return [[next(in_order) for _ in of_item] for of_item in items]


def _copies(cache: Cache, texts: Tensor) -> Cache:
    """A cache with a copy of each of these `texts` [B] of `cache`, which stays as it is."""
    # A layer that grows makes new tensors, so that no copy writes into what another reads.
    copies = Cache(layers=[copy(layer) for layer in cache.layers])
    copies.batch_select_indices(texts)
    return copies
