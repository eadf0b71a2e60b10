"""Decoding one request: the tokens of `generate`, compiled or not, and what cannot be compiled."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from compress.errors import UserError
from compress.kernels import token
from compress.kernels.check import relative_error
from compress.kernels.native import build
from compress.log import logger
from compress.qtensor import QuantSpec
from compress.runtime import decode, token_step
from compress.runtime.cache import cache_for
from compress.runtime.decode import Decoder, capacity
from compress.runtime.fused import Int8Norm
from compress.runtime.generate import answer, generate
from compress.runtime.loader import load
from compress.runtime.token_step import Room, TokenStep
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


BLOCKS = {
    "llama": LlamaConfig(**SIZES, mlp_bias=True, attention_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}


@pytest.mark.parametrize("family", token_step.FAMILIES)
def test_a_token_without_modules_has_the_logits_of_the_modules(family: str) -> None:
    if not token.available():
        pytest.skip("no C++ compiler here")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BLOCKS[family], dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.5)
    decoder, cache = Decoder(model), cache_for(model, "16")
    assert token_step.why_not(model, cache) is None
    step, ids = TokenStep(model), PROMPT
    with torch.inference_mode():
        model(PROMPT, cache=cache, use_cache=True)
        room = Room.of(cache, PROMPT.shape[1] + 3)
        for new in ([[5]], [[90]], [[41]]):
            ids = torch.cat([ids, torch.tensor(new)], 1)
            # bf16 rounds to 2^-9 in each of some twenty steps.
            wanted = model(ids).logits[:, -1]
            assert relative_error(step.logits(ids[:, -1:], room), wanted) < 0.03
        with pytest.raises(RuntimeError, match="token 20 of a cache for 20"):
            step(ids[:, -1:], room)
    assert len(written(decoder)) == 24


@pytest.mark.parametrize(
    "spec", [QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 32)], ids=str
)
def test_a_token_without_modules_reads_quantized_weights(
    spec: QuantSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V is quantized and Q and K are not: these three are not one product, gate and up are."""
    if not token.available():
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr("tests.unit.test_runtime.KEPT", ("q_proj", "k_proj"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    model.save_pretrained(tmp_path / "dense")
    quantized(tmp_path / "dense", tmp_path / "quantized", spec)
    model = load(tmp_path / "quantized")
    decoder, cache = Decoder(model), cache_for(model, "16")
    assert decoder.step == "without modules"
    ids = torch.cat([PROMPT, torch.tensor([[5]])], 1)
    with torch.inference_mode():
        model(PROMPT, cache=cache, use_cache=True)
        found = TokenStep(model).logits(ids[:, -1:], Room.of(cache, 20))
        assert relative_error(found, model(ids).logits[:, -1]) < 0.03


class Calls(TorchDispatchMode):
    """Counts torch's operations by name, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("keeps_v", [True, False])
def test_a_block_is_few_calls(
    keeps_v: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q, K and V are one product, or two and what puts them side by side; gate and up are one."""
    if not token.available():
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(
        "tests.unit.test_runtime.KEPT", ("q_proj", "k_proj") + ("v_proj",) * keeps_v
    )
    LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(tmp_path / "dense")
    quantized(tmp_path / "dense", tmp_path / "quantized", QuantSpec(8, activation_bits=8))
    model = load(tmp_path / "quantized")
    Decoder(model)
    cache = cache_for(model, "16")
    with torch.inference_mode():
        model(PROMPT, cache=cache, use_cache=True)
        step, room = TokenStep(model), Room.of(cache, 20)
        with Calls() as calls:
            step.logits(torch.tensor([[5]]), room)
    blocks = SIZES["num_hidden_layers"]
    kind = "_amx" if build.has_amx() else ""
    names = (f"dense{kind}", f"w8a8{kind}", "attend", "swiglu", "rmsnorm")
    assert {name: calls.counted[name] for name in names} == {
        f"dense{kind}": blocks + 1,  # with the head
        f"w8a8{kind}": (3 if keeps_v else 4) * blocks,
        "attend": blocks,
        "swiglu": blocks,
        "rmsnorm": 2 * blocks + 1,
    }
    assert calls.counted["add"] == 2 * blocks
    assert calls.counted["cat"] - (not keeps_v) * blocks <= 1  # of the rotary tables


def test_what_has_no_step_without_modules() -> None:
    def why(config: PretrainedConfig, kind: str = "16", dtype: torch.dtype = torch.bfloat16) -> str:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return str(token_step.why_not(model, cache_for(model, kind)))

    assert "the model is torch.float32 on cpu" in why(BLOCKS["llama"], dtype=torch.float32)
    assert "KV cache is in 8 bit" in why(BLOCKS["llama"], "kv8")
    assert "layers with windows" in why(MistralConfig(**SIZES, sliding_window=8))
    assert "the model is a LlamaForCausalLM with gelu" in why(
        LlamaConfig(**SIZES, hidden_act="gelu")
    )
    # As compress.runtime.fused does for Triton, which may be interpreted on CPU.
    model = AutoModelForCausalLM.from_config(BLOCKS["qwen2"], dtype=torch.bfloat16)
    norm = model.model.layers[1].post_attention_layernorm
    model.model.layers[1].post_attention_layernorm = Int8Norm(norm.weight, norm.variance_epsilon)
    problem = token_step.why_not(model, cache_for(model, "16"))
    assert problem == "its blocks have modules of another kind: Int8Norm"


def test_several_prompts_are_refused() -> None:
    decoder = Decoder(LlamaForCausalLM(LlamaConfig(**SIZES)).eval())
    with pytest.raises(ValueError, match=r"^2 prompts; wanted one, or generate for batches$"):
        next(decoder.tokens(PROMPT.repeat(2, 1), 3))


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
        decode, "_compile", lambda step, _: torch.compile(step, backend="eager", fullgraph=True)
    )
    monkeypatch.setattr(decode, "compiler", lambda: "not called")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "dense")
    quantized(tmp_path / "dense", tmp_path / "quantized", QuantSpec(8, activation_bits=8))
    model = load(tmp_path / "quantized", dtype=torch.float32)
    decoder = Decoder(model, compile="auto")
    assert decoder.compiled
    wanted = written(Decoder(model))
    # The cache is the same for every request, and forgets the one before.
    assert list(decoder.tokens(PROMPT.flip(1), 30)) != wanted
    assert written(decoder) == written(decoder) == wanted
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

    monkeypatch.setattr(decode, "_compile", lambda step, _: broken)
    monkeypatch.setattr(decode, "_why_not", lambda *_: None)
    decoder = Decoder(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), compile="auto")
    assert len(written(decoder)) == 24
    assert not decoder.compiled
    assert told.messages[-1].endswith("is not compiled: inductor raised: no space left")


def test_sizes_of_caches_are_few() -> None:
    sizes = [capacity(length) for length in (1, 256, 257, 512, 513, 5000)]
    assert sizes == [256, 256, 512, 512, 1024, 8192]
