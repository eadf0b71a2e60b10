"""Likelihoods of choices: batched and padded, or one by one and by hand, they are the same."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compress.eval.answers import Answer, ask, fitting, score, total
from compress.eval.items import Item, as_asked, items
from compress.eval.likelihood import encode, pieces, scored, spaced
from compress.eval.own import named
from compress.eval.tasks import Task

CHAT = "{{ bos_token }}[{{ messages[0]['content'] }}]"
PAIRS = [
    ("The sky is", " blue"),
    ("The sky is", " full of a great many stars tonight"),
    ("q", " a"),
    ("中国的首都是", "北京"),
    ("A rather long prompt that goes on for quite some while", " ends"),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
    )
    return LlamaForCausalLM(config).eval()


def make_tokenizer(*, bos: bool, chat: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, and two merges, so that a token can lie across the end of a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    vocabulary |= {"st": 258, "es": 259, "est": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("s", "t"), ("e", "st")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT if chat else None
    return fast


def one_by_one(model, tokenizer, prompt, continuation):
    """The sum of log P over the continuation's tokens, each predicted from all before it."""
    start = len(tokenizer(prompt).input_ids)
    ids = tokenizer(prompt + continuation).input_ids
    total = 0.0
    for position in range(start, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:position]])).logits[0, -1]
        total += logits.double().log_softmax(-1)[ids[position]].item()
    return total


def log_likelihoods(model, tokenizer, pairs, batch_size):
    rows = [encode(prompt, continuation, tokenizer) for prompt, continuation in pairs]
    return [one.total for one in scored(model, rows, batch_size=batch_size)]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_batches_equal_a_loop_without_padding(model, bos, batch_size):
    tokenizer = make_tokenizer(bos=bos)
    found = log_likelihoods(model, tokenizer, PAIRS, batch_size=batch_size)
    expected = [one_by_one(model, tokenizer, *pair) for pair in PAIRS]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(found)) == len(PAIRS)


def test_likelihoods_of_single_tokens_are_the_softmax(model):
    tokenizer = make_tokenizer(bos=True)
    letters = [chr(i) for i in range(33, 127)]
    found = log_likelihoods(model, tokenizer, [("ab", c) for c in letters], batch_size=16)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("ab").input_ids])).logits[0, -1]
    ids = [tokenizer(c).input_ids[-1] for c in letters]
    assert torch.tensor(found).exp().sum().item() == pytest.approx(
        logits.softmax(-1)[ids].sum().item(), rel=1e-4
    )


def test_bos_is_context_and_is_never_scored():
    ids, start = encode("ab", " c", make_tokenizer(bos=True))
    assert (ids[0], start) == (256, 3)
    ids, start = encode("ab", " c", make_tokenizer(bos=False))
    assert start == 2


def test_bos_of_a_chat_template_stays_single():
    ids, start = encode("<s>ab", " c", make_tokenizer(bos=True))
    assert (ids.count(256), start) == (1, 3)


def test_a_token_across_the_border_belongs_to_the_continuation():
    ids, start = encode("be", "st", make_tokenizer(bos=False))
    assert ids[1:] == [260]
    assert start == 1


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="wanted tokens in both"):
        encode("", "a", make_tokenizer(bos=False))


def test_a_forward_that_leaves_no_logits_out_gives_the_same(model):
    class Own(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask, use_cache):
            return super().forward(input_ids, attention_mask, use_cache=use_cache)

    own, tokenizer = Own(model.config).eval(), make_tokenizer(bos=True)
    own.load_state_dict(model.state_dict())
    wanted = log_likelihoods(model, tokenizer, PAIRS, batch_size=3)
    assert log_likelihoods(own, tokenizer, PAIRS, batch_size=3) == pytest.approx(wanted, rel=1e-5)


def test_no_space_is_added_where_one_stands():
    assert spaced("Answer:", "yes") == " yes"
    assert spaced("Answer: ", "yes") == spaced("Answer:\n", "yes") == "yes"
    assert spaced("答案：", "是") == "是"


def test_a_likelihood_that_is_no_number_is_no_probability():
    assert total("likelihood")(np.array([-2.0, 2.0])) == pytest.approx(100 / math.e)
    assert total("likelihood")(np.array([np.nan, 2.0])) == 0.0


def choice_task(*metrics):
    return replace(named(["knowledge"])[0], metrics=metrics)


def test_accuracy_is_by_likelihood_and_normalized_accuracy_by_character():
    item = Item("x", "", ("bb",), ("a", "bb"))
    answer = Answer("x", "", (-3.0, -4.0))  # 3 and 2 nats a character
    rows = score(choice_task("accuracy", "normalized_accuracy"), [item], [answer])
    assert rows["accuracy"].tolist() == [[0.0, 1.0]]
    assert rows["normalized_accuracy"].tolist() == [[1.0, 1.0]]


def test_a_cloze_is_right_where_greedy_decoding_would_write_it(model):
    tokenizer, task = make_tokenizer(bos=True), named(["cloze"])[0]
    ids = tokenizer("The sky is").input_ids
    with torch.no_grad():
        for _ in range(3):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    (right,) = scored(model, [(ids, len(ids) - 3)], batch_size=1)
    assert (right.greedy, right.tokens, right.likeliest) == (True, 3, tuple(ids[-3:]))
    wrong = [*ids[:-1], (ids[-1] + 1) % 256]
    assert not scored(model, [(wrong, len(ids) - 3)], batch_size=1)[0].greedy
    item = Item("x", "The sky is", ("blue",))
    (answer,) = ask(model, tokenizer, task, [item], batch_size=1)
    assert not answer.greedy
    assert answer.tokens == len(" blue")
    rows = score(task, [item], [answer])
    assert rows["accuracy"].tolist() == [[0.0, 1.0]]
    expected = 100 * math.exp(one_by_one(model, tokenizer, "The sky is", " blue") / 5)
    assert total("likelihood")(rows["likelihood"][0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("window", [2, 7, 100])
def test_a_text_is_read_in_windows_that_score_every_token_once(model, window):
    tokenizer = make_tokenizer(bos=True)
    ids = tokenizer("A text of thirty-one characters.").input_ids
    rows = pieces("A text of thirty-one characters.", tokenizer, window)
    assert all(len(row) == min(window, len(ids)) for row, _ in rows)
    assert all(start == 1 for _, start in rows[:-1])
    assert [token for row, start in rows for token in row[start:]] == ids[1:]
    assert rows[0][0][0] == 256
    task = Task("t", "perplexity", {"en": "{text}"}, ("likelihood",), Path(), window=window)
    its = [Item("x", "A text of thirty-one characters.")]
    (answer,) = ask(model, tokenizer, task, its, batch_size=4)
    assert answer.tokens == len(ids) - 1
    if window == 100:
        assert answer.likelihoods[0] == pytest.approx(
            one_by_one(model, tokenizer, "", "A text of thirty-one characters."), rel=1e-4
        )


def test_the_likeliest_choice_is_the_answer(model):
    task, its = named(["commonsense"])[0], items(named(["commonsense"])[0], 5)
    tokenizer = make_tokenizer(bos=True)
    found = ask(model, tokenizer, task, its, batch_size=4)
    for item, answer in zip(its, found, strict=True):
        assert answer.text == item.choices[answer.likelihoods.index(max(answer.likelihoods))]
    assert score(task, its, found)["accuracy"].shape == (5, 2)


def test_the_chat_template_is_used_for_what_is_written_and_not_for_choices():
    task = named(["translation"])[0]
    item = Item("x", "Hello")
    assert as_asked(task, item, make_tokenizer(bos=False)) == "Hello"
    assert as_asked(task, item, make_tokenizer(bos=False, chat=True)) == "<s>[Hello]"
    choice = named(["knowledge"])[0]
    assert as_asked(choice, item, make_tokenizer(bos=True, chat=True)) == "Hello"


def test_an_empty_prompt_becomes_at_least_one_token():
    task = named(["boundary"])[0]
    assert as_asked(task, Item("x", ""), make_tokenizer(bos=False)) == "</s>"
    assert as_asked(task, Item("x", ""), make_tokenizer(bos=True)) == ""


def test_items_that_need_a_longer_context_are_left_out():
    task = named(["boundary"])[0]
    tokenizer = make_tokenizer(bos=True)
    short, long = Item("short", "a" * 9), Item("long", "a" * 10)
    room = 1 + 9 + task.max_new_tokens
    assert fitting(task, [short, long], tokenizer, room) == [short]


def test_boundary_answers_are_scored_by_their_rules():
    task = named(["boundary"])[0]
    item = Item("x", "", rules=({"rule": "not_empty"},))
    rows = score(task, [item, item], [Answer("x", "yes"), Answer("x", "")])
    assert rows["accuracy"].tolist() == [[1.0, 1.0], [0.0, 1.0]]
