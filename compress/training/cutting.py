"""A smaller model cut out of a larger: fewer blocks, fewer MLP channels, fewer KV groups.

What is left is a dense model of the same kind, in the Hugging Face layout; nothing in it is new.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress import checkpoint
from compress.blocks.structure import GEMMA, GEMMA2, LAYOUTS, LLAMA
from compress.errors import UserError
from compress.source import describe, head_dim
from compress.tensors import TensorFiles, ToWrite

NARROWABLE = (LLAMA, GEMMA, GEMMA2)
"""Blocks with matrices of their own for q, k, v, gate and up, whose widths are known here."""
ATTENTION_OUT, MLP_OUT = "self_attn.o_proj", "mlp.down_proj"
QUERY_ROWS, KV_ROWS = ("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj")
MLP_ROWS = ("mlp.gate_proj", "mlp.up_proj")
PER_BLOCK = ("layer_types", "no_rope_layers")
"""Lists in a configuration that have a value a block."""


@dataclass(frozen=True)
class Size:
    """What a model is cut to: decoder blocks, KV groups and MLP channels of each."""

    blocks: int
    kv_heads: int
    mlp: int


@dataclass(frozen=True)
class Cut:
    """What stays: numbers of blocks and, of each of these, of its KV groups and MLP channels."""

    blocks: list[int]
    kv_heads: list[list[int]]
    mlp: list[list[int]]


def size_of(config: PretrainedConfig) -> Size:
    """The size that a model has."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return Size(config.num_hidden_layers, kv_heads, mlp)


def refuse(config: PretrainedConfig, wanted: Size) -> None:
    """Raise UserError where a model of this configuration cannot be cut to this size."""
    whole = size_of(config)
    for name in ("blocks", "kv_heads", "mlp"):
        most, asked = getattr(whole, name), getattr(wanted, name)
        if not 1 <= asked <= most:
            raise UserError(f"shrink.{name} is {asked}; the model has {most}; wanted 1 to {most}")
    kind = config.model_type
    narrower = (wanted.kv_heads, wanted.mlp) != (whole.kv_heads, whole.mlp)
    if narrower and LAYOUTS.get(kind) not in NARROWABLE:
        raise UserError(
            f"shrink: blocks of {kind} are not known well enough to cut them in width; wanted a "
            "model like Llama, or shrink.mlp=null shrink.kv_heads=null to leave out blocks alone"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UserError(
            f"shrink: blocks of {kind} share keys and values, so none can be left out; "
            "wanted a model without num_kv_shared_layers, or shrink.student=DIR"
        )


def cut_config(described: Mapping[str, Any], config: PretrainedConfig, cut: Cut) -> dict[str, Any]:
    """config.json of what is left. described: that of the whole; config: as transformers reads it,
    which fills in lists of a value a block that config.json may leave out.
    """
    whole = size_of(config)
    named = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    changed = {**described, named: len(cut.blocks)}
    for name in PER_BLOCK:
        if values := getattr(config, name, None):
            changed[name] = [values[block] for block in cut.blocks]
    if "max_window_layers" in described:  # Qwen: the first so many blocks see the whole window
        changed["max_window_layers"] = sum(b < config.max_window_layers for b in cut.blocks)
    kv_heads, mlp = len(cut.kv_heads[0]), len(cut.mlp[0])
    if kv_heads < whole.kv_heads:
        queries = config.num_attention_heads // whole.kv_heads
        changed["num_attention_heads"] = queries * kv_heads
        changed["num_key_value_heads"] = kv_heads
        changed["head_dim"] = head_dim(config)
    if mlp < whole.mlp:
        changed["intermediate_size"] = mlp
    return changed


def write_cut(
    source: Path, folder: Path, config: PretrainedConfig, prefix: str, cut: Cut, dtype: torch.dtype
) -> None:
    """Write to `folder` what is left of the model in `source`, floating point in `dtype`, with its
    tokenizer and all else. prefix: of its blocks' names, `model.layers`.
    """
    files = TensorFiles(source)
    changed = cut_config(describe(source), config, cut)
    changed["dtype"] = str(dtype).removeprefix("torch.")
    changed.pop("torch_dtype", None)
    tensors = {}
    for name in files:
        if not name.startswith(f"{prefix}."):
            tensors[name] = ToWrite.stored(files.file_of[name], name, dtype)
    for number, block in enumerate(cut.blocks):
        old, new = f"{prefix}.{block}.", f"{prefix}.{number}."
        slices = _slices(config, cut, number)
        for name in (name for name in files if name.startswith(old)):
            local = name.removeprefix(old)
            tensors[new + local] = _sliced(files, name, slices.get(local), dtype)
    checkpoint.write(folder, tensors, changed, source)


def _slices(config: PretrainedConfig, cut: Cut, number: int) -> dict[str, tuple[int, list[int]]]:
    """Of the tensors of the block that becomes `number`, those that are cut: dimension and what
    stays of it, by their names in the block.
    """
    whole, dim = size_of(config), head_dim(config)
    groups, mlp = cut.kv_heads[number], cut.mlp[number]
    found: dict[str, tuple[int, list[int]]] = {}
    if len(groups) < whole.kv_heads:
        group = dim * (config.num_attention_heads // whole.kv_heads)
        queries, keys = _spread(groups, group), _spread(groups, dim)
        found |= _rows(QUERY_ROWS, queries) | _rows(KV_ROWS, keys)
        found[f"{ATTENTION_OUT}.weight"] = 1, queries
    if len(mlp) < whole.mlp:
        found |= _rows(MLP_ROWS, mlp)
        found[f"{MLP_OUT}.weight"] = 1, mlp
    return found


def _rows(linears: Iterable[str], rows: list[int]) -> dict[str, tuple[int, list[int]]]:
    return {f"{name}.{part}": (0, rows) for name in linears for part in ("weight", "bias")}


def _spread(groups: Iterable[int], size: int) -> list[int]:
    """The channels of some groups of `size`."""
    return [size * group + channel for group in groups for channel in range(size)]


def _sliced(
    files: TensorFiles, name: str, part: tuple[int, list[int]] | None, dtype: torch.dtype
) -> ToWrite:
    stored = ToWrite.stored(files.file_of[name], name, dtype)
    if part is None:
        return stored
    dimension, numbers = part
    shape = list(stored.shape)
    shape[dimension] = len(numbers)

    def values() -> list[Tensor]:
        return [files[name].index_select(dimension, torch.tensor(numbers)).to(stored.dtype)]

    return ToWrite(stored.dtype, tuple(shape), values)
