"""Choices: with their context read once for all, or with each, likelihoods are the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from compress.eval.answers import ask
from compress.eval.items import Item, as_asked, items
from compress.eval.likelihood import Row, scored, spaced
from compress.eval.multiple_choice import can_share, scored_items, shared_tokens
from compress.eval.own import named
from compress.qtensor import QuantSpec
from compress.runtime.loader import load
from tests.unit.test_eval_likelihood import make_tokenizer, one_by_one
from tests.unit.test_runtime import quantized

ITEMS = [
    [([1, 5, 9, 7, 3, 8, 2], 5), ([1, 5, 9, 7, 3, 4], 5), ([1, 5, 9, 7, 3, 6, 6, 6, 9], 5)],
    [([*range(40, 58), 2, 3], 18), ([*range(40, 58), 4], 18)],
    [([7, 7, 7, 8], 3), ([7, 7, 9, 9, 9], 2)],  # a token across the end of the prompt
    [([1, 2, 3, 4], 2)],  # nothing to share with
    [([1, 2], 1), ([1, 3], 1)],  # one token of context, which predicts the choices
    [([*range(39, 60), 2], 21), ([*range(39, 60), 2, 9, 9], 21)],
]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},  # beside whole layers; logits through a tanh
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learned positions
    "bloom": {"n_layer": 2, "n_head": 4},  # ALiBi
    "mamba": {},
}


@cache
def random_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).eval()


def whole(model: PreTrainedModel, row: Row) -> float:
    """The log-likelihood of one text alone, all of it read at once."""
    tokens, start = row
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    scores = logits.double().log_softmax(-1)
    return sum(scores[i - 1, tokens[i]].item() for i in range(start, len(tokens)))


def check(model: PreTrainedModel, every: list[list[Row]], batch_size: int, close: float) -> None:
    found = scored_items(model, every, batch_size=batch_size)
    assert [len(of_item) for of_item in found] == [len(rows) for rows in every]
    for rows, of_item in zip(every, found, strict=True):
        wanted = [whole(model, row) for row in rows]
        assert [one.total for one in of_item] == pytest.approx(wanted, abs=close)
        assert [one.tokens for one in of_item] == [len(tokens) - start for tokens, start in rows]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_likelihoods_are_those_of_whole_texts(family: str, batch_size: int) -> None:
    model = random_model(family)
    assert can_share(model) == (family != "mamba")
    check(model, ITEMS, batch_size, 1e-4)


@st.composite
def an_item(draw: st.DrawFn) -> list[Row]:
    """Choices of one context; some of them take its last token into their first."""
    token = st.integers(2, 127)
    context = draw(st.lists(token, min_size=2, max_size=12))
    rows = []
    for choice in draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=5)):
        across = draw(st.booleans())
        rows.append(([*(context[:-1] if across else context), *choice], len(context) - across))
    return rows


@settings(max_examples=40)
@given(
    every=st.lists(an_item(), min_size=1, max_size=7),
    batch_size=st.integers(1, 9),
    family=st.sampled_from(["llama", "mistral"]),
)
def test_batches_of_any_shape_give_the_same(
    every: list[list[Row]], batch_size: int, family: str
) -> None:
    check(random_model(family), every, batch_size, 1e-4)


@pytest.mark.parametrize("spec", [QuantSpec(4, 16), QuantSpec(8, activation_bits=8)], ids=str)
def test_a_quantized_model_through_our_kernels_gives_the_same(
    spec: QuantSpec, tmp_path: Path
) -> None:
    random_model("llama").save_pretrained(tmp_path / "dense")
    quantized(tmp_path / "dense", tmp_path / "quantized", spec)
    model = load(tmp_path / "quantized", dtype=torch.float32)
    # An activation between two integers may fall to the other side by its last bits.
    check(model, ITEMS, 4, 0.02 if spec.activation_bits else 1e-4)


def test_picks_are_those_of_whole_texts() -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 261}
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=256, eos_token_id=257)).eval()
    tokenizer, task = make_tokenizer(bos=True), named(["commonsense"])[0]
    its = items(task, 6)
    answers = ask(model, tokenizer, task, its, batch_size=4)
    for item, answer in zip(its, answers, strict=True):
        prompt = as_asked(task, item, tokenizer)
        wanted = [one_by_one(model, tokenizer, prompt, spaced(prompt, c)) for c in item.choices]
        assert answer.likelihoods == pytest.approx(wanted, abs=1e-4)
        assert answer.text == item.choices[wanted.index(max(wanted))]
    assert len({item.choices.index(a.text) for item, a in zip(its, answers, strict=True)}) > 1


def test_likelihoods_are_in_the_order_of_the_choices() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 261})).eval()
    tokenizer = make_tokenizer(bos=True)
    (task,) = named(["commonsense"])
    its = [
        Item("en", "The sky is", ("blue",), ("blue", "very green")),
        Item("zh", "首都是", ("北京",), ("北京", "上海", "广州")),
    ]
    found = [answer.likelihoods for answer in ask(model, tokenizer, task, its, batch_size=4)]
    assert [len(of_item) for of_item in found] == [2, 3]
    wanted = one_by_one(model, tokenizer, "The sky is", " very green")
    assert found[0][1] == pytest.approx(wanted, rel=1e-4)
    assert found[1][0] == pytest.approx(one_by_one(model, tokenizer, "首都是", "北京"), rel=1e-4)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[dict[str, int]]:
    """Positions that go into the model's embedding and into its head, padding with them."""
    seen = {"read": 0, "head": 0}

    def count(name: str, shape: torch.Size) -> None:
        seen[name] += shape[0] * shape[1]

    hooks = [
        model.get_input_embeddings().register_forward_hook(lambda m, i, o: count("read", o.shape)),
        model.get_output_embeddings().register_forward_hook(lambda m, i, o: count("head", o.shape)),
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def test_a_context_is_read_once_and_the_head_predicts_choices_alone() -> None:
    model = random_model("llama")
    every = [
        [([*range(2, 2 + context), choice, 9, 9], context) for choice in (60, 61, 62, 63)]
        for context in (10, 12, 30)
    ]
    with counted(model) as seen:
        scored_items(model, every, batch_size=4)
    # Contexts of 10 and 12 tokens are read together but for the last; that of 30 waits for others
    # of its length. What is left of a context comes with each choice, of which 2 of 3 are read.
    assert seen["read"] == (2 * 9 + 4 * 3 + 4 * 5) + (29 + 4 * 3)
    assert seen["head"] == (2 + 4 * 3 + 4 * 3) + (1 + 4 * 3)
    with counted(model) as seen:
        scored(model, [row for rows in every for row in rows], batch_size=4)
    assert seen == {"read": 4 * (12 + 14 + 32), "head": 3 * 4 * 3}


def test_what_is_shared_ends_before_the_token_that_predicts_a_choice() -> None:
    assert [shared_tokens(rows) for rows in ITEMS] == [4, 17, 1, 0, 0, 20]


def test_rope_that_turns_by_the_length_of_the_text_is_read_whole() -> None:
    long = {"original_max_position_embeddings": 64, "factor": 2.0, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for rope in ({"rope_type": "dynamic"}, {"rope_type": "longrope", **factors}, None):
        config = LlamaConfig(**SIZES, rope_parameters=rope and {**long, **rope})
        assert can_share(LlamaForCausalLM(config)) == (rope is None)


def test_a_cache_in_8_bit_is_read_as_decoding_fills_it() -> None:
    model = random_model("llama")
    long = [[([*range(2, 72), choice, 3], 70) for choice in (80, 90)]]
    ((first, second),) = scored_items(model, long, batch_size=2, kv_cache="kv8")
    assert [first, second] == scored(model, long[0], batch_size=2, kv_cache="kv8")
    assert abs(first.total - whole(model, long[0][0])) > 1e-4  # the first 64 are stored in 8 bit
