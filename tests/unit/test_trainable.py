"""What learns, and that training sees the integers that are served."""

import torch
from transformers import LlamaConfig, Phi3Config

from compress.algorithms.smooth import fake_quantize
from compress.kernels.w8a8.reference import quantize_per_token
from compress.model import skeleton
from compress.qtensor import QTensor, QuantSpec, pack_int32
from compress.training.trainable import (
    ATTENTION_INPUTS,
    ROTATED,
    AdapterLinear,
    Adapters,
    LatentLinear,
    ScaleLinear,
    adapters_of,
    as_stored,
    fewest_bits,
    latents,
    norms_and,
    scales,
    straight_through_int8,
    unrounded,
)

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


W4 = QuantSpec(bits=4, group_size=32)


def weight(seed: int = 0) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    ints = torch.randint(-8, 8, (6, 64), generator=generator, dtype=torch.int8)
    return QTensor(ints, 0.01 + 0.01 * torch.rand((6, 2), generator=generator), W4)


def test_scales_compute_as_they_will_be_stored_and_learn_in_float32() -> None:
    given = weight()
    stored = QTensor(given.ints, given.scales.bfloat16(), W4)
    linear, x = ScaleLinear(stored, None), torch.randn(5, 64)
    before = linear(x)
    with torch.no_grad():
        linear.weight_scale *= 1 + 2**-11  # less than half of bfloat16's step
    assert torch.equal(linear(x), before)
    linear(x).sum().backward()
    grouped = (x.sum(0) * given.ints).view(6, 2, 32).sum(-1)
    assert linear.weight_scale.grad is not None
    assert torch.allclose(linear.weight_scale.grad, grouped, rtol=1e-4, atol=1e-4)


def test_latent_weights_begin_as_the_integers_and_stay_on_their_grid() -> None:
    x = torch.randn(5, 64)
    frozen, latent = ScaleLinear(weight(), None), LatentLinear(weight(), None)
    assert torch.allclose(latent(x), frozen(x), atol=1e-6)
    with torch.no_grad():
        latent.latent += 0.49
        assert torch.allclose(latent(x), frozen(x), atol=1e-6)
        latent.latent += 100  # far above the largest integer
    expected = torch.full((6, 64), 7.0) * latent.weight_scale.repeat_interleave(32, 1)
    assert torch.allclose(latent(x), x @ expected.T, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_latent_weights_is_that_of_the_weight() -> None:
    x, upstream = torch.randn(5, 64), torch.randn(5, 6)
    linear = LatentLinear(weight(), None)
    linear(x).backward(upstream)
    assert linear.latent.grad is not None
    expected = (upstream.T @ x) * linear.weight_scale.repeat_interleave(32, 1)
    assert torch.allclose(linear.latent.grad, expected, rtol=1e-4, atol=1e-6)


def test_latent_weights_are_stored_as_the_integers_that_they_round_to() -> None:
    model = skeleton(LlamaConfig(**SIZES), torch.float32)
    name = "model.layers.0.self_attn.o_proj"
    model.set_submodule(name, LatentLinear(weight(), None))
    assert fewest_bits(model) == 4
    assert list(latents(model)) == [f"{name}.latent"]
    assert list(scales(model)) == [f"{name}.weight_scale"]
    learned = {
        f"{name}.latent": weight().ints + torch.full((6, 64), 0.4),
        f"{name}.weight_scale": weight().scales.bfloat16(),
        "model.norm.weight": torch.ones(64),
    }
    found = as_stored(model, learned)
    assert torch.equal(found[f"{name}.weight_packed"], pack_int32(weight().ints, 4))
    assert found[f"{name}.weight_scale"].dtype == torch.bfloat16
    assert found[f"{name}.weight_shape"].tolist() == [6, 64]
    assert torch.equal(found["model.norm.weight"], torch.ones(64))
    assert not any(key.endswith(".latent") for key in found)


def with_adapters(up: float) -> AdapterLinear:
    """Adapters of rank 2 that move every integer by `up` steps of the grid."""
    linear = AdapterLinear(weight(), None, Adapters(rank=2, alpha=4.0))
    with torch.no_grad():
        linear.adapter_down.fill_(0.5)
        linear.adapter_up.fill_(up / 2)
    return linear


def test_adapters_begin_as_nothing_and_move_the_integers_by_whole_steps() -> None:
    x, frozen = torch.randn(5, 64), ScaleLinear(weight(), None)
    new = AdapterLinear(weight(), None, Adapters(rank=2, alpha=4.0))
    assert torch.allclose(new(x), frozen(x), atol=1e-6)
    assert torch.allclose(with_adapters(0.49)(x), frozen(x), atol=1e-6)
    moved = (weight().ints + 1.0).clamp(-8, 7) * frozen.weight_scale.repeat_interleave(32, 1)
    assert torch.allclose(with_adapters(0.51)(x), x @ moved.T, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_adapters_is_that_of_the_weight_through_their_product() -> None:
    x, upstream = torch.randn(5, 64), torch.randn(5, 6)
    linear = with_adapters(0.2)
    linear(x).backward(upstream)
    moved = (upstream.T @ x) * linear.weight_scale.detach().repeat_interleave(32, 1)
    assert linear.adapter_up.grad is not None
    assert linear.adapter_down.grad is not None
    expected = 2 * moved @ linear.adapter_down.detach().T
    assert torch.allclose(linear.adapter_up.grad, expected, rtol=1e-4, atol=1e-5)
    expected = 2 * linear.adapter_up.detach().T @ moved
    assert torch.allclose(linear.adapter_down.grad, expected, rtol=1e-4, atol=1e-5)


def test_adapters_are_stored_as_the_integers_that_the_sum_rounds_to() -> None:
    model = skeleton(LlamaConfig(**SIZES), torch.float32)
    name = "model.layers.0.self_attn.o_proj"
    model.set_submodule(name, with_adapters(1.3))
    learned = {key: p.detach().bfloat16() for key, p in adapters_of(model).items()}
    assert [key.rpartition(".")[2] for key in learned] == ["adapter_up", "adapter_down"]
    learned[f"{name}.weight_scale"] = weight().scales.bfloat16()
    found = as_stored(model, learned)
    wanted = (weight().ints + 1).clamp(-8, 7).to(torch.int8)
    assert torch.equal(found[f"{name}.weight_packed"], pack_int32(wanted, 4))
    assert sorted(key.rpartition(".")[2] for key in found) == [
        "weight_packed",
        "weight_scale",
        "weight_shape",
    ]


def test_a_model_says_what_its_adapters_would_without_rounding() -> None:
    model = skeleton(LlamaConfig(**SIZES), torch.float32)
    linear, x = with_adapters(0.3), torch.randn(5, 64)
    model.set_submodule("model.layers.0.self_attn.o_proj", linear)
    scales = linear.weight_scale.repeat_interleave(32, 1)
    with unrounded(model):
        assert torch.allclose(linear(x), x @ ((weight().ints + 0.3) * scales).T, atol=1e-5)
    assert torch.allclose(linear(x), x @ (weight().ints * scales).T, atol=1e-5)
