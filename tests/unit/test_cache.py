"""The KV cache in 8 bit: its error, its bytes, and what generation does with it."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Cache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
)

from compress.errors import ConfigError, UserError
from compress.runtime.cache import (
    KEY_BLOCK,
    KV_CACHES,
    all_logits,
    bytes_held,
    bytes_per_token,
    cache_for,
    make_cache,
)
from compress.runtime.decode import Decoder
from compress.runtime.latency import time_request
from compress.runtime.stored import GROWTH, Int8, quantize
from compress.stages.serve import Serve

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
EIGHT_BIT = ("v8", "kv8")
MOST_KL = 1e-3
"""Nats a token, to the same random model in float32 with a cache that keeps its numbers."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def text(tokens: int, batch: int = 1) -> Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def fed(model: PreTrainedModel, ids: Tensor, kind: str, step: int) -> tuple[Tensor, Cache]:
    """Logits of `ids`, `step` tokens at a time, and the cache that they leave."""
    cache = make_cache(kind, model.config)
    parts = [
        model(input_ids=part, cache=cache, use_cache=True).logits for part in ids.split(step, 1)
    ]
    return torch.cat(parts, 1), cache


def kl(before: Tensor, after: Tensor) -> float:
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@given(st.integers(0, 10**6), st.sampled_from([-1, -2]), st.integers(-30, 30))
def test_an_error_is_at_most_half_a_scale(seed: int, axis: int, magnitude: int) -> None:
    x = torch.randn((2, 3, 5, 8), generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    x[0, 0] = 0
    x[1, 1, 2, 3] *= 1000
    ints, scales = quantize(x, axis)
    assert ints.dtype == torch.int8
    assert ints.abs().max() <= 127
    assert scales.shape == x.amax(axis, keepdim=True).shape
    error = (ints.float() * scales.float() - x).abs()
    assert (error <= scales.float() * 0.5000001).all()


@pytest.mark.parametrize(("block", "axis", "exact"), [(1, -1, 0), (KEY_BLOCK, -2, 1)])
@given(st.lists(st.integers(1, 150), min_size=1, max_size=4))
def test_pieces_of_any_length_store_the_same(
    block: int, axis: int, exact: int, lengths: list[int]
) -> None:
    states = torch.randn((2, 3, sum(lengths), 8), generator=torch.Generator().manual_seed(0))
    whole, pieces = Int8(block, axis, exact), Int8(block, axis, exact)
    assert torch.equal(whole.extend(states), states)
    for part in states.split(lengths, 2):
        read = pieces.extend(part)
        assert torch.equal(read[:, :, -part.shape[2] :], part)
    nothing = states[:, :, :0]
    read = whole.extend(nothing)
    assert torch.equal(read, pieces.extend(nothing))
    assert whole.length == pieces.length == sum(lengths)
    end = exact + (sum(lengths) - exact) // block * block
    assert torch.equal(read[:, :, :exact], states[:, :, :exact])
    assert torch.equal(read[:, :, end:], states[:, :, end:])
    assert (read - states).abs().max() < 0.03
    assert torch.equal(read, states) == (end == exact)


def test_a_large_channel_costs_the_others_nothing() -> None:
    keys = torch.randn((1, 2, KEY_BLOCK, 32), generator=torch.Generator().manual_seed(0))
    keys[..., 5] += 100
    errors = []
    for axis in (-1, -2):
        ints, scales = quantize(keys[:, :, None], axis)
        errors.append(((ints.float() * scales.float())[:, :, 0] - keys)[..., 6:].abs().mean())
    by_token, by_channel = errors
    assert by_channel < by_token / 20


@pytest.mark.parametrize("kind", EIGHT_BIT)
@pytest.mark.parametrize("step", [10, 50, 300])
def test_a_long_text_is_predicted_as_in_16_bit(
    model: PreTrainedModel, kind: str, step: int
) -> None:
    ids = text(300)
    exact = model(input_ids=ids, use_cache=False).logits
    logits, cache = fed(model, ids, kind, step)
    assert cache.get_seq_length() == 300
    assert (kl(exact, logits) > 1e-7) == (step < 300)
    assert kl(exact, logits) < MOST_KL
    next_token = text(1)
    exact_next = model(input_ids=torch.cat([ids, next_token], 1), use_cache=False).logits[:, -1:]
    found = model(input_ids=next_token, cache=cache, use_cache=True).logits
    assert 1e-7 < kl(exact_next, found) < MOST_KL


def test_keys_cost_more_than_values(model: PreTrainedModel) -> None:
    ids = text(300)
    exact, v8, kv8 = (all_logits(model, ids, kind) for kind in KV_CACHES)
    assert 0 < kl(exact, v8) < kl(exact, kv8)


def test_padding_on_the_right_changes_nothing(model: PreTrainedModel) -> None:
    ids, mask = text(100, batch=2), torch.ones((2, 100), dtype=torch.int64)
    mask[0, 90:] = 0
    alone = all_logits(model, ids[:1, :90], "kv8")
    together = all_logits(model, ids, "kv8", mask)
    assert torch.allclose(together[:1, :90], alone, atol=1e-4)


def test_bytes_held_are_those_that_are_planned(model: PreTrainedModel) -> None:
    tokens = 2 * GROWTH
    by_kind = {kind: bytes_per_token(kind, model.config) for kind in KV_CACHES}
    half = model.to(torch.bfloat16)
    held = {kind: bytes_held(fed(half, text(tokens), kind, 200)[1]) for kind in KV_CACHES}
    model.to(torch.float32)
    rows = 2 * 2 * 16 * 2  # bytes of a token's keys in 16 bit; the first and the newest 63 are kept
    assert held["kv8"] - tokens * by_kind["kv8"] == KEY_BLOCK * rows
    assert [held[kind] / tokens for kind in ("16", "v8")] == [by_kind["16"], by_kind["v8"]]
    # 2 layers of 2 KV heads of 16: scales of 2 bytes for V, and for K of 16 * 2 bytes for 64 tokens
    assert by_kind == {"16": 256, "v8": 2 * 2 * (32 + 18), "kv8": 2 * 2 * (16.5 + 18)}


def test_requests_are_picked_repeated_and_cropped(model: PreTrainedModel) -> None:
    ids, next_token = text(150, batch=3), text(1)
    _, cache = fed(model, ids, "kv8", 100)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    cache.crop(-40)
    assert cache.get_seq_length() == 110
    found = model(input_ids=next_token.expand(4, 1), cache=cache, use_cache=True).logits
    kept = torch.cat([ids[[2, 0, 0, 0], :110], next_token.expand(4, 1)], 1)
    assert kl(model(input_ids=kept, use_cache=False).logits[:, -1:], found) < MOST_KL
    cache.crop(-111)
    assert (cache.get_seq_length(), bytes_held(cache)) == (0, 0)


@pytest.mark.parametrize("left", [1, 2, 64, 65, 70, 129, 130])
def test_a_crop_leaves_what_was_stored(left: int) -> None:
    states = torch.randn((1, 2, 131, 8), generator=torch.Generator().manual_seed(0))
    stored = Int8(KEY_BLOCK, axis=-2, exact=1)
    stored.extend(states)
    before = stored.extend(states[:, :, :0])
    stored.crop(left)
    assert stored.length == left
    after = stored.extend(states[:, :, left:])
    assert torch.allclose(after[:, :, :left], before[:, :, :left], atol=1e-6)
    assert torch.equal(after[:, :, left:], states[:, :, left:])


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_beams_and_batches_padded_on_the_left_are_generated_as_in_16_bit(
    model: PreTrainedModel, kind: str, beams: int
) -> None:
    ids, mask = text(80, batch=2), torch.ones((2, 80), dtype=torch.int64)
    ids[0, :30] = mask[0, :30] = 0
    found = [
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            num_beams=beams,
            pad_token_id=0,
            cache=cache_for(model, each),
            output_scores=True,
            return_dict_in_generate=True,
        )
        for each in ("16", kind)
    ]
    exact, stored = found
    assert torch.equal(exact.sequences, stored.sequences)
    if beams == 1:
        logits = [torch.stack(each.scores, 1) for each in found]
        assert 1e-7 < kl(*logits) < MOST_KL
    else:
        torch.testing.assert_close(
            exact.sequences_scores, stored.sequences_scores, rtol=0, atol=0.02
        )
        assert not torch.equal(exact.sequences_scores, stored.sequences_scores)


def test_windows_stay_in_16_bit_beside_layers_that_keep_all() -> None:
    sizes = {**SIZES, "num_hidden_layers": 3, "head_dim": 16}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**sizes, sliding_window=32, layer_types=kinds)
    torch.manual_seed(0)
    gemma = Gemma3ForCausalLM(config).eval()
    ids = text(200)
    logits, cache = fed(gemma, ids, "kv8", 40)
    assert cache.is_sliding == [True, False, True]
    assert kl(gemma(input_ids=ids, use_cache=False).logits, logits) < MOST_KL
    assert bytes_per_token("kv8", config) == 2 * 128 + 2 * (16.5 + 18)


class NamesItOtherwise(LlamaForCausalLM):
    """As the Python in a model's folder may: keys and values by the name of earlier versions."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):  # type: ignore[no-untyped-def]
        return super().forward(input_ids, cache=past_key_values, **kwargs)


class PassesAllOn(LlamaForCausalLM):
    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return super().forward(*args, **kwargs)


def test_a_forward_that_takes_no_cache_is_refused_in_one_line() -> None:
    config = LlamaConfig(**SIZES)
    own, ids = NamesItOtherwise(config).eval(), text(8)
    said = r"^the forward of NamesItOtherwise takes no `cache`.*, or serve\.kv_cache=16$"
    with pytest.raises(UserError, match=said):
        all_logits(own, ids, "v8")
    with pytest.raises(UserError, match=said):
        time_request(Decoder(own, kv_cache="kv8"), ids, 2)
    with pytest.raises(UserError, match=r"takes no `cache`.*, or stages= without serve$"):
        time_request(Decoder(own), ids, 2)
    assert all_logits(own, ids).shape == (1, 8, 96)
    assert all_logits(PassesAllOn(config).eval(), ids, "v8").shape == (1, 8, 96)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^serve\.kv_cache is 'k8'; wanted one of 16, v8, kv8$"):
        make_cache("k8", LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match=r"^serve\.kv_cache is '4'; wanted one of 16, v8, kv8$"):
        Serve(kv_cache="4")
    windowed = MistralConfig(**SIZES, sliding_window=8)
    with pytest.raises(UserError, match=r"no layer of this mistral model keeps all tokens"):
        make_cache("kv8", windowed)
    assert bytes_per_token("kv8", windowed) == bytes_per_token("16", windowed)
    with pytest.raises(ValueError, match="minus the number"):
        make_cache("v8", LlamaConfig(**SIZES)).crop(3)
