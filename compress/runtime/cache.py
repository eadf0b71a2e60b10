"""The KV cache in 8 bit: V alone, or K and V, as INT8.

Values have a scale a token and KV head. Keys have channels that are large in every token, so they
have a scale a channel, over blocks of 64 tokens; the newest, which make no whole block yet, stay as
they came (KIVI, arXiv:2402.02750, which does so in 2 bit), and so does the first token, to which
all others look (KVQuant, arXiv:2401.18079). Tokens of one forward see each other as they are and
all earlier ones as they are stored. docs/kv_cache.md has the fidelity by length, docs/log.md what
was tried beside this.

Shapes: B requests, H KV heads, T tokens so far, D head size.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from compress.errors import UserError
from compress.runtime.stored import SCALE_DTYPE, Growing, Int8
from compress.source import head_dim

KV_CACHES = ("16", "v8", "kv8")
"""K and V in 16 bit; V in 8 bit; K and V in 8 bit."""
KEY_BLOCK = 64
"""Tokens whose keys share their channels' scales."""
FIRST = 1
"""Tokens at the start whose keys stay as they came: unlike the others, they inflate the scales."""


def make_cache(kind: str, config: PretrainedConfig) -> Cache:
    """An empty cache of `kind`, one of KV_CACHES, for the model of `config`.

    Layers that keep all tokens are stored as asked. The others, bounded by a sliding window or a
    state of fixed size, stay as transformers keeps them. Raises UserError for a model that has
    only such layers, and for another `kind`.
    """
    if kind not in KV_CACHES:
        raise UserError(f"serve.kv_cache is {kind!r}; wanted one of {', '.join(KV_CACHES)}")
    cache = DynamicCache(config=config)
    if kind == "16":
        return cache
    layers = [
        Int8Layer(keys_int8=kind == "kv8") if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    if not any(isinstance(layer, Int8Layer) for layer in layers):
        raise UserError(
            f"serve.kv_cache is {kind}, but no layer of this {config.model_type} model keeps all "
            "tokens (windows and states stay in 16 bit); wanted serve.kv_cache=16"
        )
    return Cache(layers=layers)


def cache_for(model: PreTrainedModel, kind: str) -> Cache:
    """`make_cache` for a loaded model, whose forward is asked first whether it takes a `cache`.

    Raises UserError too where it does not: Python of a model's own may call it past_key_values, as
    transformers before 5 did, or have none.
    """
    parameters = inspect.signature(model.forward).parameters
    passed_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "cache" not in parameters and ("past_key_values" in parameters or not passed_on):
        way_out = "stages= without serve" if kind == "16" else "serve.kv_cache=16"
        raise UserError(
            f"the forward of {type(model).__name__} takes no `cache`, by which transformers "
            f"hands keys and values on; wanted one that does, or {way_out}"
        )
    return make_cache(kind, model.config)


def all_logits(
    model: PreTrainedModel, ids: Tensor, kv_cache: str = "16", mask: Tensor | None = None
) -> Tensor:
    """Logits [B, T, V] of the texts `ids` [B, T], as decoding through such a cache meets them.

    In 8 bit, KEY_BLOCK tokens go in at a time, so that each reads the history as it is stored; in
    one forward all would see all as it is. mask [B, T]: 0 where `ids` is padding on the right.
    """
    if kv_cache == "16":
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    cache = cache_for(model, kv_cache)
    logits = []
    for start in range(0, ids.shape[1], KEY_BLOCK):
        end = start + KEY_BLOCK
        seen = None if mask is None else mask[:, :end]
        part = ids[:, start:end]
        logits.append(
            model(input_ids=part, attention_mask=seen, use_cache=True, cache=cache).logits
        )
    return torch.cat(logits, 1)


def bytes_per_token(kind: str, config: PretrainedConfig) -> int:
    """Bytes that one more token takes, over all layers and KV heads.

    In 16 bit K and V have D numbers of 2 bytes each; in 8 bit D bytes and the scales: one for V, D
    for a block of K. Left out is what does not grow: the keys that stay in 16 bit, and room.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = head_dim(text)
    layers = sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    rows = heads * layers  # of K, and of V, that a token has in 8 bit
    saved = {
        "16": 0,
        "v8": rows * (size - SCALE_DTYPE.itemsize),
        "kv8": rows * (2 * size - SCALE_DTYPE.itemsize)
        - rows * size * SCALE_DTYPE.itemsize // KEY_BLOCK,
    }
    return 2 * heads * text.num_hidden_layers * size * 2 - saved[kind]


def bytes_held(cache: Cache) -> int:
    """Bytes that `cache` has allocated for keys and values, room for coming tokens included."""
    held = 0
    for layer in cache.layers:
        if isinstance(layer, Int8Layer):
            held += layer.stored_keys.nbytes + layer.stored_values.nbytes
        elif layer.keys is not None:
            held += layer.keys.nbytes + layer.values.nbytes
    return held


class Int8Layer(CacheLayerMixin):
    """One layer of a transformers `Cache`: values in INT8, and keys too if asked."""

    is_sliding = False
    is_croppable = True

    def __init__(self, *, keys_int8: bool) -> None:
        super().__init__()
        self.keys_int8 = keys_int8
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        by_channel, by_token = Int8(KEY_BLOCK, axis=-2, exact=FIRST), Int8(1, axis=-1)
        self.stored_keys: Int8 | Growing = by_channel if self.keys_int8 else Growing()
        self.stored_values = by_token
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first token comes."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, new tokens, D]; returns all, [B, H, T, D], to attend to.

        What is returned in 16 bit lives as long as the layer's attention: the extra memory at its
        peak is that of one layer of a cache in 16 bit.
        """
        self.is_initialized = True
        return self.stored_keys.extend(key_states), self.stored_values.extend(value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what the next `query_length` tokens attend to, and where it begins."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.stored_keys.length

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as many as `tokens_to_remove` is below 0."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens, not {tokens_to_remove}")
        length = max(0, self.get_seq_length() + tokens_to_remove)
        if length == 0:
            self.reset()
        elif tokens_to_remove:
            self.stored_keys.crop(length)
            self.stored_values.crop(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the tokens of the one that it goes on from, by `beam_idx` [B]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the requests of these indices, in their order."""
        self._change_batch(lambda held: held.index_select(0, indices.to(held.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Give each request `repeats` copies, side by side."""
        self._change_batch(lambda held: held.repeat_interleave(repeats, 0))

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self.stored_keys.change_batch(change)
        self.stored_values.change_batch(change)
