"""What feeds what inside a decoder block: where a scale can move from activations to weights."""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

# Blocks in which the norm multiplies by its weight as stored, and the MLP is
# down(act(gate(x)) * up(x)). Elsewhere smoothing is left out, and the quantizer says so.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Feed:
    """`source` (a norm or a linear, by its name in the block) feeds the linears `targets` alone.

    Dividing the source's output channels by s and multiplying the targets' input channels by s
    leaves the block's result as it was. repeat: how often each of the source's output heads is
    read (grouped-query attention); head: channels a head.
    """

    source: str
    targets: tuple[str, ...]
    repeat: int = 1
    head: int = 1


def feeds(config: PretrainedConfig, block: nn.Module) -> list[Feed]:
    """The feeds of a Llama-like block; none for a block of another kind."""
    if config.model_type not in LLAMA_LIKE:
        return []
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linears = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
    attention, mlp = "self_attn.", "mlp."
    values = linears[attention + "v_proj"].out_features
    heads = linears[attention + "o_proj"].in_features
    return [
        Feed("input_layernorm", tuple(attention + p for p in ("q_proj", "k_proj", "v_proj"))),
        Feed(attention + "v_proj", (attention + "o_proj",), heads // values, head_dim),
        Feed("post_attention_layernorm", (mlp + "gate_proj", mlp + "up_proj")),
        Feed(mlp + "up_proj", (mlp + "down_proj",)),
    ]
