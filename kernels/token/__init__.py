"""What stands between the products of one new token in a block like Llama's, on CPU in bf16.

    RMSNorm:    y_MK = w_K * x / sqrt(mean(x^2) + eps)
    SwiGLU:     y_MI = silu(gate) * up
    attention:  q, k turned by RoPE; k, v put into the cache; softmax(q k^T * scale) v

H heads, KV heads of keys and values, D numbers a head, T tokens of room in the cache. As modules of
torch these are 31 operations a block, views left out. `reference.py` is the truth.
"""

from typing import Any

import torch

from compress.kernels.native import build

__all__ = ["available", "ops"]

available = build.available


def ops() -> Any:
    """Has the functions of reference.py, with their arguments, once `available`."""
    return torch.ops.compress_cpu
