"""One token between the products, as it is meant: read this first. See the package for letters."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rmsnorm(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """As in Llama: normalized in float32, rounded to bf16, multiplied by the weight in bf16."""
    x = x_MK.float()
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normalized.to(x_MK.dtype) * weight_K


def swiglu(gate_up_MN: Tensor) -> Tensor:
    """[M, I] in their dtype for gate and up side by side, [M, 2I]."""
    gate, up = gate_up_MN.chunk(2, -1)
    return F.silu(gate) * up


def rope(x: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    """Heads [.., D] turned (Su et al., arXiv:2104.09864), pairs half of D apart, in their dtype."""
    first, second = x.chunk(2, -1)
    return x * cos_D + torch.cat([-second, first], -1) * sin_D


def attend(
    qkv: Tensor,
    cos_D: Tensor,
    sin_D: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float,
) -> Tensor:
    """[1, H * D] for q of H heads and k, v of KV side by side, [1, (H + 2 KV) * D], of the token
    at `position`.

    keys, values [KV, T, D]: those before it, and from now on its own. Scores, softmax and sums are
    in float32.
    """
    heads, size = len(keys), keys.shape[-1]
    k, v = heads * size, heads * size
    q, k, v = qkv.split([qkv.shape[1] - k - v, k, v], -1)
    keys[:, position] = rope(k.view(heads, size), cos_D, sin_D)
    values[:, position] = v.view(heads, size)
    groups = rope(q.view(heads, -1, size), cos_D, sin_D).float()
    seen_keys, seen_values = (kept[:, : position + 1].float() for kept in (keys, values))
    weights = (groups @ seen_keys.transpose(1, 2) * scale).softmax(-1)
    return (weights @ seen_values).to(q.dtype).view(1, -1)
