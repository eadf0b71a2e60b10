"""What of a model decides its memory and its time, read from config.json alone."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from compress.blocks.structure import head_names
from compress.errors import UserError
from compress.model import find_blocks, skeleton, storage_dtype, tied_names
from compress.model_path import home
from compress.runtime.cache import KV_CACHES, bytes_per_token
from compress.source import UNREADABLE, head_dim, read_config, reason_of, refuse_sizes
from compress.support import refuse_unsupported
from compress.training.scaling import window_of


@dataclass(frozen=True)
class Shape:
    """A decoder-only model by its sizes; no weight is known.

    name: as the user calls it. tensors: values of each stored tensor by name, a tied head left
    out. linears: (out_features, in_features) of those inside the blocks, by full name. heads:
    names of the output layer. dtype: of what stays in 16 bit. windows: of each layer, tokens that
    it keeps, None for all. kv_per_token: bytes that one more token takes in the layers that keep
    all, by kind of KV cache. positions: the window that it has.
    """

    name: str
    tensors: Mapping[str, int]
    linears: Mapping[str, tuple[int, int]]
    heads: tuple[str, ...]
    dtype: torch.dtype
    blocks: int
    hidden: int
    intermediate: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    kv_per_token: Mapping[str, int]
    positions: int

    @property
    def parameters(self) -> int:
        return sum(self.tensors.values())


def read_model(path: str) -> PretrainedConfig:
    """The configuration in a model's folder, or in a config file.

    Raises UserError where there is none, and for what this project cannot compress.
    """
    place = home(path)
    if place.is_dir():
        return read_config(place, trust_remote_code=False)
    if not place.is_file():
        raise UserError(f"model={path}: no such file; wanted a model's folder or its config.json")
    try:
        fields = json.loads(place.read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise ValueError("no model_type in it")
        if fields["model_type"] not in tuple(CONFIG_MAPPING):
            raise ValueError(
                f"model_type is {fields['model_type']!r}; wanted one such as llama or qwen2"
            )
        config = AutoConfig.for_model(**fields)
    except UnicodeDecodeError as error:
        raise UserError(
            f"model={path}: no text file; wanted a model's folder or its config.json"
        ) from error
    except UNREADABLE as error:
        raise UserError(
            f"model={path}: not a config.json that transformers knows ({reason_of(error)})"
        ) from error
    refuse_unsupported(config, f"model={path}")
    refuse_sizes(config, fields, f"model={path}")
    return config


def shape_of(config: PretrainedConfig, name: str, blocks: int | None = None) -> Shape:
    """The shape of a model by its configuration. blocks: the first so many only, for a student.

    Raises UserError for a configuration of which transformers can make no model.
    """
    config = _cut(config, blocks) if blocks else config
    text = config.get_text_config()
    model = skeleton(config, torch.bfloat16)
    prefix, layers = find_blocks(model)
    if not any(isinstance(module, torch.nn.Linear) for module in layers.modules()):
        raise UserError(
            f"{name}: the blocks of a {config.model_type} hold no nn.Linear, so nothing of them "
            "can be quantized or planned; wanted another kind of model"
        )
    tied = tied_names(model)
    hidden, intermediate, vocabulary = widths(config)
    return Shape(
        name=name,
        tensors={n: p.numel() for n, p in model.named_parameters() if n not in tied},
        linears={
            f"{prefix}.{n}": (m.out_features, m.in_features)
            for n, m in layers.named_modules()
            if isinstance(m, torch.nn.Linear)
        },
        heads=tuple(head_names(model)),
        dtype=storage_dtype(config, "auto"),
        blocks=text.num_hidden_layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        query_heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_size=head_dim(text),
        windows=tuple(
            layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            for layer in DynamicCache(config=config).layers
        ),
        kv_per_token=_kv_per_token(config),
        positions=window_of(text) if getattr(text, "max_position_embeddings", None) else 2048,
    )


def widths(config: PretrainedConfig) -> tuple[int, int, int]:
    """Channels between blocks, channels inside an MLP, and the vocabulary."""
    text = config.get_text_config()
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return text.hidden_size, intermediate, text.vocab_size


def _cut(config: PretrainedConfig, blocks: int) -> PretrainedConfig:
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    text.num_hidden_layers = blocks
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:blocks]
    return cut


def _kv_per_token(config: PretrainedConfig) -> dict[str, int]:
    """Of the layers that keep all tokens; a model without such has its cache in 16 bit alone."""
    layers = DynamicCache(config=config).layers
    bounded = sum(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
    kinds = KV_CACHES if bounded < len(layers) else KV_CACHES[:1]
    text = config.get_text_config()
    whole = bytes_per_token("16", config) // text.num_hidden_layers
    return {kind: bytes_per_token(kind, config) - whole * bounded for kind in kinds}
