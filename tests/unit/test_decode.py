"""Decoding one request: the tokens of `generate`, compiled or not, and what cannot be compiled."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from compress.errors import UserError
from compress.kernels.native import build
from compress.log import logger
from compress.qtensor import QuantSpec
from compress.runtime import decode
from compress.runtime.decode import Decoder, capacity
from compress.runtime.generate import answer, generate
from compress.runtime.loader import load
from tests.unit.test_runtime import quantized

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
PROMPT = torch.arange(3, 20)[None]


def written(decoder: Decoder, most: int = 24) -> list[int]:
    return [int(token) for token in decoder.tokens(PROMPT, most)]


@pytest.fixture
def told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", "compress")
    return caplog


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_answer_is_that_of_generate(stories260k: Path, dtype: torch.dtype) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    for prompt in ("Once upon a time", "Lily"):
        wanted = generate(
            load(stories260k, dtype=dtype), tokenizer, [prompt], max_new_tokens=40, batch_size=1
        )
        decoder = Decoder(load(stories260k, dtype=dtype))
        assert answer(decoder, tokenizer, prompt, 40) == wanted[0] != ""


def test_an_answer_ends_where_the_model_ends_it(stories260k: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    model = load(stories260k)
    whole = answer(Decoder(model), tokenizer, "Once upon a time", 20)
    third = tokenizer(whole, add_special_tokens=False).input_ids[3]
    model.generation_config.eos_token_id = [third]
    assert len(answer(Decoder(model), tokenizer, "Once upon a time", 20)) < len(whole)


def test_in_a_cache_of_fixed_size_as_in_one_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step traced whole, as for the compiler, but run by torch: building takes minutes."""
    monkeypatch.setattr(
        decode, "_compile", lambda step: torch.compile(step, backend="eager", fullgraph=True)
    )
    monkeypatch.setattr(decode, "compiler", lambda: "not called")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "dense")
    quantized(tmp_path / "dense", tmp_path / "quantized", QuantSpec(8, activation_bits=8))
    model = load(tmp_path / "quantized", dtype=torch.float32)
    decoder = Decoder(model, compile="auto")
    assert decoder.compiled
    assert written(decoder) == written(Decoder(model))
    assert decoder.compiled
    assert decoder.prepare(40) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_as_not_compiled(stories260k: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler here")
    model = load(stories260k, dtype=torch.float32)
    decoder = Decoder(model, compile="auto")
    assert decoder.prepare(100) > 0
    assert written(decoder, 60) == written(Decoder(model), 60)


def test_what_cannot_be_compiled_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    windowed = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    monkeypatch.setattr(decode, "compiler", lambda: "not called")
    for model, kind, why in (
        (llama, "kv8", "a KV cache of kv8 grows"),
        (windowed, "16", "layers with a window"),
    ):
        assert not Decoder(model, kv_cache=kind, compile="auto").compiled
        assert why in told.messages[-1]
    monkeypatch.setattr(decode, "compiler", lambda: None)
    decoder = Decoder(llama, compile="auto")
    assert not decoder.compiled
    assert "no C++ compiler" in told.messages[-1]
    assert len(written(decoder)) == 24
    with pytest.raises(UserError, match=r"^compile is 'on'; wanted one of off, auto$"):
        Decoder(llama, compile="on")


def test_a_compiler_that_fails_leaves_the_modules_as_they_are(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("inductor raised:\nno space left\nand a page of more")

    monkeypatch.setattr(decode, "_compile", lambda step: broken)
    monkeypatch.setattr(decode, "_why_not", lambda *_: None)
    decoder = Decoder(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), compile="auto")
    assert len(written(decoder)) == 24
    assert not decoder.compiled
    assert told.messages[-1].endswith("is not compiled: inductor raised: no space left")


def test_sizes_of_caches_are_few() -> None:
    sizes = [capacity(length) for length in (1, 256, 257, 512, 513, 5000)]
    assert sizes == [256, 256, 512, 512, 1024, 8192]
