"""One token of one request on CPU without the modules: products, and one call for what is between.

The modules of a block like Llama's are 40 operations of torch a token, views left out, and in a
small model these and Python take about as long as the products. Here a block is 10 calls. The
products are those for one token, of one input joined (compress.runtime.joined); norms, SwiGLU,
RoPE and attention are compress.kernels.token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from compress.kernels import token
from compress.runtime.fused import FAMILIES, HOMES
from compress.runtime.joined import joined

Norm = Callable[[Tensor], Tensor]


@dataclass
class Room:
    """Keys and values of one request, [KV heads, T, D] a layer, of which `length` are there."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int

    @staticmethod
    def of(cache: Cache, size: int) -> "Room":
        """What lies in `cache`, of one request, with room for `size` tokens."""

        def grown(kept: Tensor) -> Tensor:
            return F.pad(kept[0], (0, 0, 0, size - kept.shape[2]))

        keys = [grown(layer.keys) for layer in cache.layers]
        values = [grown(layer.values) for layer in cache.layers]
        return Room(keys, values, cache.get_seq_length())


class TokenStep:
    """The step of a model to which `why_not` objects nothing.

    Its linears are taken as they are now, prepared for single tokens by compress.runtime.decode.
    Scores of attention are summed in another order than the modules do: last bits of bf16 differ.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        inner = model.model
        self._embedding, self._rotary = inner.embed_tokens.weight, inner.rotary_emb
        self._blocks = [_block(block) for block in inner.layers]
        self._norm, self._head = _norm(inner.norm), model.lm_head.forward

    def __call__(self, ids: Tensor, room: Room) -> Tensor:
        """`ids` [1, 1] to the likeliest next id [1, 1]; `room` takes up the token."""
        return self.logits(ids, room).float().argmax(-1, keepdim=True)

    def logits(self, ids: Tensor, room: Room) -> Tensor:
        """[1, V] after `ids` [1, 1]; `room` takes up the token."""
        x = F.embedding(ids[0], self._embedding)
        cos, sin = (t[0, 0] for t in self._rotary(x[None], torch.tensor([[room.length]])))
        for block, keys, values in zip(self._blocks, room.keys, room.values, strict=True):
            x = block(x, cos, sin, keys, values, room.length)
        room.length += 1
        return self._head(self._norm(x))


def why_not(model: PreTrainedModel, cache: Cache) -> str | None:
    """What keeps `model`, which would decode through `cache`, from a TokenStep; None: nothing."""
    config = model.config
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return f"it is for bfloat16 on CPU, the model is {model.dtype} on {model.device.type}"
    activation = getattr(config, "hidden_act", "another activation")
    # Not by config.model_type: Python of a model's own may use a known one.
    if type(model).__module__ not in HOMES or activation != "silu":
        found = f"{type(model).__name__} with {activation}"
        return f"it knows {', '.join(FAMILIES)} with silu, the model is a {found}"
    parts = {type(part) for block in model.model.layers for part in block.children()}
    if foreign := {part.__name__ for part in parts if part.__module__ not in HOMES}:
        return f"its blocks have modules of another kind: {', '.join(sorted(foreign))}"
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return "the KV cache is in 8 bit, or has layers with windows"
    return None if token.available() else "there is no C++ compiler"


def _norm(module: nn.Module) -> Norm:
    weight, eps, rmsnorm = module.weight, module.variance_epsilon, token.ops().rmsnorm
    return lambda x: rmsnorm(x, weight, eps)


def _block(block: Any) -> Callable[..., Tensor]:
    """A function of x [1, hidden], cos and sin [D], keys and values [KV heads, T, D], position."""
    attention, mlp = block.self_attn, block.mlp
    before, between = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
    qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up = joined([mlp.gate_proj, mlp.up_proj])
    o, down = joined([attention.o_proj]), joined([mlp.down_proj])
    if hasattr(attention, "q_norm"):
        qkv = _normed(qkv, attention)
    scale, attend, swiglu = attention.scaling, token.ops().attend, token.ops().swiglu

    def run(
        x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: int
    ) -> Tensor:
        x = x + o(attend(qkv(before(x)), cos, sin, keys, values, position, scale))
        return x + down(swiglu(gate_up(between(x))))

    return run


def _normed(qkv: Callable[[Tensor], Tensor], attention: Any) -> Callable[[Tensor], Tensor]:
    """`qkv`, and then the norms over each head of queries and keys."""
    q_norm, k_norm, size = _norm(attention.q_norm), _norm(attention.k_norm), attention.head_dim
    sizes = [attention.q_proj.out_features, attention.k_proj.out_features]
    sizes.append(attention.v_proj.out_features)

    def run(x: Tensor) -> Tensor:
        query, key, value = qkv(x).split(sizes, -1)
        query, key = q_norm(query.view(-1, size)), k_norm(key.view(-1, size))
        return torch.cat([query.view(1, -1), key.view(1, -1), value], -1)

    return run
