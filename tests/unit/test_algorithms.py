"""The algorithms against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, LlamaConfig

from compress.algorithms import rtn as rtn_module
from compress.algorithms import smooth as smooth_module
from compress.algorithms.blockwise import error_of_rtn, even_rows, report_on, smooth_block
from compress.algorithms.rtn import rtn, scales_for, search_clip
from compress.algorithms.smooth import fake_quantize, search_strength, tied
from compress.blocks.structure import feeds
from compress.model import skeleton
from compress.qtensor import QuantSpec

W8A8, W8, W4 = QuantSpec(8, None, 8), QuantSpec(8), QuantSpec(4, 32)


def weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 4),
    bits=st.sampled_from([4, 8]),
    grouped=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_rounding_is_within_half_a_step(
    n: int, groups: int, bits: int, grouped: bool, seed: int
) -> None:
    spec = QuantSpec(bits, 32 if grouped else None)
    weight = weights(n, 32 * groups, seed)
    quantized = rtn(weight, spec, torch.float32)
    step = quantized.scales.abs().repeat_interleave(weight.shape[1] // quantized.scales.shape[1], 1)
    assert ((weight - quantized.dequantize()).abs() <= step / 2 + 1e-6).all()
    assert int(quantized.ints.max()) <= spec.qmax
    assert int(quantized.ints.min()) >= spec.qmin


def test_the_largest_weight_takes_the_last_integer() -> None:
    weight = torch.tensor([[0.5, -2.0, 1.1, 0.25]])
    assert float(scales_for(weight, QuantSpec(4))) == pytest.approx(2 / 7)
    assert rtn(weight, QuantSpec(4), torch.float32).ints.tolist() == [[2, -7, 4, 1]]


def test_rows_of_zeros_stay_zero_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        quantized = rtn(torch.zeros(2, 32), W4, dtype)
        assert torch.isfinite(quantized.dequantize()).all()
        assert not quantized.ints.any()


def test_clip_search_beats_no_clip_where_one_weight_sticks_out() -> None:
    weight = weights(4, 64)
    weight[:, 5] = 6.0
    inputs = weights(200, 64, seed=1)
    inputs[:, 5] = 0.01  # the weight that sticks out hardly matters
    for spec in (QuantSpec(4), QuantSpec(4, 32)):
        clips = search_clip(weight, inputs, spec, torch.float32)
        wanted = inputs @ weight.T
        plain = inputs @ rtn(weight, spec, torch.float32).dequantize().T
        clipped = inputs @ rtn(weight, spec, torch.float32, clips).dequantize().T
        assert (clipped - wanted).norm() < 0.8 * (plain - wanted).norm()
        assert float(clips[:, 0].max()) < 0.7  # of the group with that weight; 32 channels each
        assert spec.group_size is None or float(clips[:, 1].min()) > 0.75


def test_clip_search_is_the_same_through_rows_and_through_their_gram_matrix() -> None:
    weight, inputs = weights(40, 64), weights(300, 64, seed=3)
    for spec in (QuantSpec(4), QuantSpec(4, 32)):
        rows = inputs.reshape(300, spec.groups(64), -1).transpose(0, 1)
        through_rows = rtn_module._search(weight, rows, None, spec, torch.float32)
        through_gram = rtn_module._search(weight, rows, rows.mT @ rows, spec, torch.float32)
        assert torch.equal(through_rows, through_gram)
        assert len(through_rows.unique()) > 1


def test_a_few_weights_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = weights(33, 64), weights(300, 64, seed=3)
    for spec in (QuantSpec(4), QuantSpec(4, 32), QuantSpec(8)):
        clips = search_clip(weight, inputs, spec, torch.bfloat16)
        rounded = rtn_module.rounded(weight, spec, torch.bfloat16)
        assert torch.equal(rounded, rtn(weight, spec, torch.bfloat16).dequantize())
        with monkeypatch.context() as patch:
            patch.setattr(rtn_module, "WEIGHTS", 130)
            assert torch.equal(search_clip(weight, inputs, spec, torch.bfloat16), clips)
            assert torch.equal(rtn_module.rounded(weight, spec, torch.bfloat16), rounded)


def test_four_bit_scales_have_the_sign_that_gives_the_largest_weight_the_longer_side() -> None:
    weight = torch.tensor([[8.0, -7.0, 1.0, 0.0], [-8.0, 7.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = rtn(weight, QuantSpec(4), torch.float32, clip=7 / 8)
    assert found.scales[:2].flatten().tolist() == [-1.0, 1.0]
    assert found.ints[:2].tolist() == [[-8, 7, -1, 0], [-8, 7, 1, 0]]
    assert torch.equal(found.dequantize(), weight)
    for spec in (QuantSpec(8), W8A8):
        assert (rtn(weight, spec, torch.float32).scales > 0).all()


@pytest.mark.parametrize("channels", [2048, 8])
def test_smoothing_finds_the_outlier_channel(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smooth_module, "CHANNELS", channels)
    inputs = weights(256, 64, seed=4)
    inputs[:, 7] *= 80
    weight = weights(32, 64)
    relative = (inputs / inputs.square().mean(-1, keepdim=True).sqrt()).square().mean(0).sqrt()
    scales, strength = search_strength(inputs, relative, [weight], W8A8, torch.float32)
    assert strength is not None
    assert int(scales.argmax()) == 7
    wanted = inputs @ weight.T
    plain = fake_quantize(inputs, W8A8) @ weight.T
    smooth = fake_quantize(inputs / scales, W8A8) @ (weight * scales).T
    assert (smooth - wanted).norm() < 0.3 * (plain - wanted).norm()


def test_with_weights_alone_the_channels_that_are_active_are_rounded_finer() -> None:
    spec = QuantSpec(4)
    inputs = weights(256, 64, seed=4) * torch.logspace(-1.5, 0.5, 64)
    weight = weights(32, 64) / torch.logspace(-1, 0.5, 64)  # large where hardly active
    size = inputs.abs().mean(0)
    scales, strength = search_strength(inputs, size, [weight], spec, torch.float32)
    assert strength is not None
    assert 0.3 <= strength <= 1
    assert torch.corrcoef(torch.stack([scales.log(), size.log()]))[0, 1] > 0.99
    wanted = inputs @ weight.T
    plain = inputs @ rtn(weight, spec, torch.float32).dequantize().T
    scaled = (inputs / scales) @ rtn(weight * scales, spec, torch.float32).dequantize().T
    assert (scaled - wanted).norm() < 0.6 * (plain - wanted).norm()


def test_smoothing_leaves_alone_what_it_cannot_help() -> None:
    inputs, weight = weights(256, 64, seed=5), weights(32, 64)
    scales, strength = search_strength(inputs, inputs.abs().mean(0), [weight], W8, torch.float32)
    assert strength is None
    assert torch.equal(scales, torch.ones(64))


def test_tied_scales_are_equal_across_the_heads_that_read_one_value_head() -> None:
    scales = torch.rand(2 * 3 * 4) + 0.5  # 2 value heads, each read by 3 query heads of 4 channels
    heads = tied(scales, 3, 4).reshape(2, 3, 4)
    assert torch.equal(heads[:, 0], heads[:, 1])
    assert torch.equal(heads[:, 0], heads[:, 2])
    assert torch.allclose(heads[:, 0], scales.reshape(2, 3, 4).log().mean(1).exp())


def test_smoothing_a_block_does_not_change_what_it_computes() -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
    )
    model = skeleton(config, torch.float32).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    block, ids = model.model.layers[0], torch.arange(12).reshape(1, 12)
    before = model(ids).logits
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    statistics = {}
    for name, inputs in seen.items():
        rows = inputs.flatten(0, -2).clone()
        rows[:, 0] *= 50  # an outlier, so that smoothing pays
        statistics[f"{name}.rows"] = rows
        relative = rows / rows.square().mean(-1, keepdim=True).sqrt()
        statistics[f"{name}.relative"] = relative.square().mean(0).sqrt()
    every = dict.fromkeys(seen, W8A8)
    divided, strengths = smooth_block(block, feeds(config, block), statistics, every, torch.float32)
    assert {
        "self_attn.o_proj",
        "mlp.down_proj",
        "mlp.gate_proj",
        "self_attn.q_proj",
    } <= divided.keys()
    assert strengths.keys() == divided.keys()
    assert torch.allclose(model(ids).logits, before, atol=1e-3, rtol=1e-3)


def test_a_layer_report_says_what_the_layer_does() -> None:
    weight, rows = weights(16, 64), weights(128, 64, seed=6)
    quantized = rtn(weight, W4, torch.float32)
    plain = error_of_rtn(weight, rows, W4, torch.float32)
    report = report_on("x", plain, weight, quantized, rows, None, None, torch.float32)
    error = (rows @ (weight - quantized.dequantize()).T).norm() / (rows @ weight.T).norm()
    assert report.error == pytest.approx(float(error), rel=1e-4)
    assert report.error == pytest.approx(report.error_rtn, rel=1e-6)
    assert report.smooth is None
    assert report.clip == pytest.approx(1.0)
    halved = rtn(weight, W4, torch.float32, 0.5)
    report = report_on("x", plain, weight, halved, rows, None, 0.3, torch.float32)
    assert report.clip == pytest.approx(0.5)
    assert report.error > report.error_rtn


def test_even_rows_give_outputs_of_size_one() -> None:
    weight, rows = weights(16, 64), weights(10, 64, seed=7) * torch.logspace(-2, 3, 10).unsqueeze(1)
    assert torch.allclose((even_rows(rows, [weight]) @ weight.T).norm(dim=-1), torch.ones(10))


def test_feeds_are_for_blocks_that_are_known() -> None:
    config = AutoConfig.for_model("opt", num_hidden_layers=1, hidden_size=64)
    assert feeds(config, nn.Module()) == []
