"""What learns, and that training sees the integers that are served."""

import torch
from transformers import LlamaConfig, Phi3Config

from compress.algorithms.smooth import fake_quantize
from compress.kernels.w8a8.reference import quantize_per_token
from compress.model import skeleton
from compress.qtensor import QuantSpec
from compress.trainable import ATTENTION_INPUTS, ROTATED, norms_and, straight_through_int8

SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}


def test_training_rounds_as_the_kernels_do_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 40, 63), generator=generator) * torch.logspace(-4, 4, 40).unsqueeze(-1)
    x[0, 0] = 0
    x[1, 0] = torch.arange(63) - 31.5  # halves, once divided by the scale
    ints, scale = quantize_per_token(x)
    found = straight_through_int8(x)
    assert torch.equal(found, ints * scale)
    spec = QuantSpec(bits=8, activation_bits=8)
    assert torch.equal(found.reshape(-1, 63), fake_quantize(x.reshape(-1, 63), spec))
    tiny = 1e-30 * x
    ints, scale = quantize_per_token(tiny)
    assert torch.equal(straight_through_int8(tiny), ints * scale)
    assert straight_through_int8(x.bfloat16()).dtype == torch.bfloat16


def test_the_gradient_passes_straight_through() -> None:
    x = torch.randn(5, 16, requires_grad=True)
    upstream = torch.randn(5, 16)
    straight_through_int8(x).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


def kinds(names: dict[str, torch.nn.Parameter]) -> set[str]:
    return {name.split(".")[-2] for name in names}


def test_what_rope_acts_on_is_q_and_k_and_v_only_where_fused() -> None:
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    llama = skeleton(LlamaConfig(**SIZES), torch.float32)
    assert kinds(norms_and(ROTATED, llama)) == norms | {"q_proj", "k_proj"}
    assert kinds(norms_and(ATTENTION_INPUTS, llama)) == norms | {"q_proj", "k_proj", "v_proj"}
    fused = skeleton(Phi3Config(**SIZES, pad_token_id=0), torch.float32)
    assert kinds(norms_and(ROTATED, fused)) == norms | {"qkv_proj"}
