"""What feeds what inside a decoder block: where a scale can move from activations to weights.

Also what the output layer is called, in a model and in its files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """A kind of decoder block: the names of its parts, as in Llama where not said otherwise.

    attention_norm, mlp_norm: the norm whose output `attention_in` and `mlp_in` read and nothing
    else does; None where there is none with a weight. value: makes the values; with q and k where
    they are one matrix, which is all q, then all k, then all v, or (by_head) q, k and v of one head
    after those of another. out: reads what attention gives. up: makes what `down` reads, times an
    activation of something else, as the last rows of it where it is gate and up in one; None where
    an activation lies between. offset: the norms multiply by their weight plus this.
    """

    attention_norm: str | None = "input_layernorm"
    attention_in: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    value: str = "self_attn.v_proj"
    by_head: bool = False
    out: str = "self_attn.o_proj"
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str | None = "mlp.up_proj"
    down: str = "mlp.down_proj"
    offset: float = 0.0


LLAMA = Layout()
GEMMA = Layout(offset=1.0)
GEMMA2 = Layout(mlp_norm="pre_feedforward_layernorm", offset=1.0)
OLMO = Layout(attention_norm=None, mlp_norm=None)  # norms without weight, or after the sublayers
GLM = Layout(mlp_in=("mlp.gate_up_proj",), up="mlp.gate_up_proj")
PHI3 = Layout(
    attention_in=("self_attn.qkv_proj",),
    value="self_attn.qkv_proj",
    mlp_in=("mlp.gate_up_proj",),
    up="mlp.gate_up_proj",
)
COHERE = Layout(attention_in=(*LLAMA.attention_in, *LLAMA.mlp_in), mlp_norm=None)
STARCODER2 = Layout(mlp_in=("mlp.c_fc",), up=None)
GPT_NEOX = Layout(
    attention_in=("attention.query_key_value",),
    value="attention.query_key_value",
    by_head=True,
    out="attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    up=None,
)

# By `model_type`. Elsewhere smoothing is left out, and the quantizer says so.
LAYOUTS: Mapping[str, Layout] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "granite": LLAMA,
    "smollm3": LLAMA,
    "seed_oss": LLAMA,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
    "olmo": OLMO,
    "olmo2": OLMO,
    "olmo3": OLMO,
    "exaone4": OLMO,
    "glm": GLM,
    "glm4": GLM,
    "phi3": PHI3,
    "cohere": COHERE,
    "cohere2": COHERE,
    "starcoder2": STARCODER2,
    "gpt_neox": GPT_NEOX,
}

# Modules that transformers calls otherwise than their tensors are called in files.
STORED_AS: Mapping[str, Mapping[str, str]] = {"gpt_neox": {"lm_head": "embed_out"}}


@dataclass(frozen=True)
class Feed:
    """`source` (a norm or a linear, by its name in the block) feeds the linears `targets` alone.

    Dividing the source's output channels by s and multiplying the targets' input channels by s
    leaves the block's result as it was. repeat: how often each of the source's output heads is
    read (grouped-query attention); head: channels a head. rows: the source's output channels that
    the targets read, in their order; None: all. offset: a norm multiplies by its weight plus this.
    """

    source: str
    targets: tuple[str, ...]
    repeat: int = 1
    head: int = 1
    rows: Sequence[int] | None = None
    offset: float = 0.0


def knows(config: PretrainedConfig) -> bool:
    """Whether the blocks of this model are known, so that scales can move in them."""
    return config.model_type in LAYOUTS


def feeds(config: PretrainedConfig, block: nn.Module) -> list[Feed]:
    """The feeds of a block, in the order of its arithmetic; none for a block of an unknown kind."""
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        return []
    found = []
    if layout.attention_norm is not None:
        found.append(Feed(layout.attention_norm, layout.attention_in, offset=layout.offset))
    # A clamp of the values (some OLMo) lets no scale through.
    if getattr(config, "clip_qkv", None) is None:
        found.append(_value_feed(config, block, layout))
    if layout.mlp_norm is not None:
        found.append(Feed(layout.mlp_norm, layout.mlp_in, offset=layout.offset))
    if layout.up is not None:
        read = _width(block, layout.down)
        rows = _last(block.get_submodule(layout.up), read)
        found.append(Feed(layout.up, (layout.down,), rows=rows))
    return found


def _value_feed(config: PretrainedConfig, block: nn.Module, layout: Layout) -> Feed:
    heads = config.num_attention_heads
    head = _width(block, layout.out) // heads
    if layout.by_head:
        rows = [3 * head * h + 2 * head + i for h in range(heads) for i in range(head)]
        return Feed(layout.value, (layout.out,), head=head, rows=rows)
    value_heads = getattr(config, "num_key_value_heads", None) or heads
    last = _last(block.get_submodule(layout.value), value_heads * head)
    return Feed(layout.value, (layout.out,), heads // value_heads, head, last)


def _width(block: nn.Module, name: str) -> int:
    return block.get_parameter(f"{name}.weight").shape[1]


def _last(linear: nn.Module, count: int) -> range | None:
    """The last `count` output channels; None where these are all."""
    total = linear.get_parameter("weight").shape[0]
    return None if count == total else range(total - count, total)


def stored_name(config: PretrainedConfig, name: str) -> str:
    """What the model's files call the module or tensor that the model calls `name`."""
    return _renamed(name, STORED_AS.get(config.model_type, {}))


def model_name(config: PretrainedConfig, name: str) -> str:
    """The inverse of `stored_name`."""
    renamed = STORED_AS.get(config.model_type, {})
    return _renamed(name, {stored: ours for ours, stored in renamed.items()})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    module, dot, leaf = name.partition(".")
    return names.get(module, module) + dot + leaf


def head_names(model: PreTrainedModel) -> list[str]:
    """The output layer: its name in the model and, where that differs, in the model's files.

    Engines look for the one or the other in a checkpoint's `ignore`.
    """
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    return list(dict.fromkeys(n for name in names for n in (name, stored_name(model.config, name))))
