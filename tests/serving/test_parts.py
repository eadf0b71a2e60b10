"""The parts of the server by themselves: attention, engine, sampling."""

import asyncio

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from compress.errors import UserError
from compress.log import logger
from compress.runtime import attention
from compress.runtime.server import lifetime
from compress.runtime.server.attention import mask
from compress.runtime.server.engine import Engine, Load
from compress.runtime.server.limits import Limits
from compress.runtime.server.sampling import Sampling, draw_scores

CPU = torch.device("cpu")


def test_a_mask_is_made_only_where_it_hides_something() -> None:
    assert mask(1, 9, None, CPU) is mask(9, 9, None, CPU) is mask(9, 9, 9, CPU) is None
    seen = mask(2, 4, None, CPU)
    assert seen is not None
    assert seen.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    seen = mask(2, 5, 3, CPU)
    assert seen is not None
    assert seen.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    seen = mask(1, 5, 3, CPU)
    assert seen is not None
    assert seen.int().tolist() == [[0, 0, 1, 1, 1]]


def small(dtype: torch.dtype = torch.bfloat16, **changes: object) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **({"sliding_window": 8} | changes),  # type: ignore[arg-type]
    )
    model = MistralForCausalLM(config).eval().to(dtype)
    for parameter in model.parameters():
        parameter.data.mul_(4)  # far from uniform, that greedy tokens say something
    return model


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("batch_tokens", "dtype"), [(4096, torch.bfloat16), (8, torch.float32)])
def test_tokens_are_those_of_generate(
    window: int | None, batch_tokens: int, dtype: torch.dtype
) -> None:
    model = small(dtype, sliding_window=window)
    attention.install(model)
    prompts = [list(range(3, 3 + n)) for n in (1, 5, 23, 40)]
    greedy = GenerationConfig(do_sample=False, max_new_tokens=12, pad_token_id=0)
    alone = [
        model.generate(torch.tensor([p]), generation_config=greedy)[0, len(p) :].tolist()
        for p in prompts
    ]
    limits = Limits(running=3, waiting=4, kv_tokens=512, batch_tokens=batch_tokens)

    async def run() -> list[list[int]]:
        engine = Engine(model, [], limits)
        await engine.start()

        async def one(prompt: list[int]) -> list[int]:
            return [t async for new in engine.tokens(prompt, 12) for t in new]

        try:
            return await asyncio.gather(*map(one, prompts))
        finally:
            await engine.stop()

    assert asyncio.run(run()) == alone
    assert len({token for tokens in alone for token in tokens}) > 10


def test_what_does_not_fit_into_the_cache_is_computed_again() -> None:
    model = small(sliding_window=None)
    prompts = [list(range(3, 3 + n)) for n in (20, 21, 22)]

    async def run(kv_tokens: int) -> list[list[int]]:
        engine = Engine(model, [], Limits(running=3, waiting=4, kv_tokens=kv_tokens))
        await engine.start()

        async def one(prompt: list[int]) -> list[int]:
            return [t async for new in engine.tokens(prompt, 30) for t in new]

        try:
            made = await asyncio.gather(*map(one, prompts))
            # 50 to 52 tokens each: two pages of 32, where there is room for all.
            assert engine.kv_tokens_most == min(kv_tokens, 3 * 64)
            return made
        finally:
            await engine.stop()

    narrow, wide = asyncio.run(run(128)), asyncio.run(run(1024))
    assert [len(tokens) for tokens in narrow] == [30, 30, 30]
    assert narrow == wide


def test_a_model_that_cannot_be_served_is_told_in_one_line() -> None:
    model = small(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UserError, match="mistral: continuous batching cannot serve this model: In"):
        Engine(model, [], Limits())


def test_limits_that_the_context_cuts_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", "compress")
    found = [lifetime._within("new_tokens", limit, 64) for limit in (None, 1, 63, 64, 999)]
    assert found == [63, 1, 63, 63, 63]
    # Once each: another handler of the same logger may have heard them too.
    assert list(dict.fromkeys(message.strip() for message in caplog.messages)) == [
        f"new_tokens={limit}: the context of 64 tokens leaves 63" for limit in (64, 999)
    ]


def test_attention_sinks_are_refused_not_left_out() -> None:
    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
    )
    with pytest.raises(UserError, match=r"gpt_oss: .* does not support `s_aux`; wanted layers"):
        asyncio.run(Engine(model, [], Limits()).start())


def test_requests_that_are_given_up_leave_nothing_behind() -> None:
    async def run() -> int:
        engine = Engine(small(), [], Limits(running=2, waiting=1, kv_tokens=256))
        await engine.start()
        try:
            for _ in range(8):
                tokens = engine.tokens([3] * 20, 100)
                await anext(tokens)
                await tokens.aclose()
            async for _ in engine.tokens([3], 2):
                pass
            assert engine.load() == Load(0, 0, 0)
            assert not engine._manager.output_router.result_handlers
            return engine._manager.output_router.output_queue.qsize()
        finally:
            await engine.stop()

    assert asyncio.run(run()) <= 2  # of the last one


def test_tokens_that_no_one_reads_do_not_pile_up() -> None:
    async def run() -> list[list[int]]:
        engine = Engine(small(sliding_window=None), [], Limits(running=1, waiting=1))
        await engine.start()
        try:
            tokens = engine.tokens([3, 4, 5], 40)
            first = await anext(tokens)
            while engine._manager.output_router.result_handlers:
                await asyncio.sleep(0.01)
            again = [new async for new in engine.tokens([3, 4, 5], 40)]
            return [first, *[new async for new in tokens], [t for new in again for t in new]]
        finally:
            await engine.stop()

    first, rest, whole = asyncio.run(run())
    assert first + rest == whole
    assert len(whole) == 40


def test_what_shows_at_the_first_token_is_told_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    for limits, reason in (
        (Limits(), "gemma2: .* this model: `sdpa` attention by request does not support `softcap`"),
        (
            Limits(kv_tokens=1 << 40),
            r"kv_tokens=1099511627776: .* take [0-9,]+\sTB, and [0-9.]+\s.B are free",
        ),
    ):
        with pytest.raises(UserError, match=f"^{reason}"):
            asyncio.run(Engine(model, [], limits).start())
    assert capfd.readouterr().err == ""


def test_draws_follow_the_softmax() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])

    def shares(sampling: Sampling) -> torch.Tensor:
        drawn = [int(draw_scores(scores, sampling, at).argmax()) for at in range(3000)]
        return torch.bincount(torch.tensor(drawn), minlength=5) / 3000

    assert torch.allclose(shares(Sampling()), scores.softmax(0), atol=0.03)
    assert torch.allclose(shares(Sampling(2.0, seed=5)), (scores / 2).softmax(0), atol=0.03)
    assert torch.allclose(shares(Sampling(top_k=2))[:2], scores[:2].softmax(0), atol=0.03)
    # The likeliest three together are the first that reach 0.95.
    assert torch.allclose(shares(Sampling(top_p=0.95))[:3], scores[:3].softmax(0), atol=0.03)
    assert shares(Sampling(top_p=0.95))[3:].sum() == 0
    for temperature in (1e-6, 1e-38, 1e-300):
        assert shares(Sampling(temperature)).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("keys", [1, 7, 65])
def test_attention_by_group_is_that_of_sdpa(keys: int) -> None:
    torch.manual_seed(keys)
    layer = small().model.layers[0].self_attn
    query = torch.randn(2, 4, 1, 8)
    key, value = torch.randn(2, 2, 2, keys, 8)
    wanted, _ = sdpa_attention_forward(layer, query, key, value, None, scaling=0.3)
    found, _ = attention.attend(layer, query, key, value, None, scaling=0.3)
    assert found.shape == wanted.shape == (2, 1, 4, 8)
    assert torch.allclose(found, wanted, atol=1e-6)
