"""Texts longer than the window, read in parts."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress.errors import UserError
from compress.runtime.summary import in_parts, summarize
from compress.summarize import main

SENTENCES = [f"On day {i} the dog went out to see the cat number {i}. " for i in range(60)]
TEXT = "".join(SENTENCES)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def length(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("size", [30, 100, 333, 10_000])
def test_parts_are_whole_sentences_and_together_the_text(
    tokenizer: PreTrainedTokenizerBase, size: int
) -> None:
    parts = in_parts(TEXT, tokenizer, size)
    assert "".join(parts) == TEXT
    assert len(parts) >= length(tokenizer, TEXT) / size
    for part in parts:
        assert length(tokenizer, part) <= size + 1  # a seam may cut a token in two
        if size > 2 * length(tokenizer, SENTENCES[0]):
            assert part.endswith(". ")


@pytest.mark.parametrize("text", ["a" * 500, "", "x. " * 3, "早上好。今天天气很好。" * 20])
def test_texts_without_sentences_are_cut_all_the_same(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    parts = in_parts(text, tokenizer, 25)
    assert "".join(parts) == text
    assert all(length(tokenizer, part) <= 26 for part in parts)


class Model:
    """Answers with the last `words` words before the instruction, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.prompts: list[str] = []

    def __call__(self, prompts: list[str], tokens: int) -> list[str]:
        self.asked.append((len(prompts), tokens))
        self.prompts += prompts
        return [" ".join(prompt.partition("\n\n")[0].split()[-5:]) for prompt in prompts]


def test_two_stages_then_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    model = Model()
    limits = {"window": 700, "summary_tokens": 40, "answer_tokens": 60}
    found = summarize(TEXT, "Which cat came last?", model, tokenizer, **limits)
    (summaries,) = found.rounds
    assert len(summaries) > 1
    assert model.asked == [(len(summaries), 40), (1, 60)]
    assert "the cat number 59." in summaries[-1]
    assert "\n\n".join(summaries) in model.prompts[-1]
    assert all("Which cat came last?" in prompt for prompt in model.prompts)
    assert "part 1 of" in model.prompts[0]
    for prompt in model.prompts:
        assert length(tokenizer, prompt) + 60 <= 700


def test_a_text_that_fits_is_read_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    model = Model()
    limits = {"window": 700, "summary_tokens": 40, "answer_tokens": 60}
    found = summarize(SENTENCES[0], "Which cat?", model, tokenizer, **limits)
    assert found.rounds == []
    assert model.prompts == [f"{SENTENCES[0]}\n\nWhich cat?"]
    assert model.asked == [(1, 60)]


def test_summaries_that_do_not_fit_are_summarized_again(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = Model()
    limits = {"window": 260, "summary_tokens": 30, "answer_tokens": 30}
    found = summarize(TEXT * 4, "Why?", model, tokenizer, **limits)
    assert len(found.rounds) > 1
    assert len(found.rounds[1]) < len(found.rounds[0])
    with pytest.raises(UserError, match="window=150: the question and the prompt around it take"):
        summarize(TEXT, "Why?", model, tokenizer, window=150, summary_tokens=30, answer_tokens=30)


def test_summaries_that_are_no_shorter_than_the_text_end_in_one_line(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def echo(prompts: list[str], tokens: int) -> list[str]:
        return [prompt.partition("\n\n")[0] for prompt in prompts]

    with pytest.raises(UserError, match=r"window=260: the summaries of \d+ tokens have \d+, so no"):
        summarize(TEXT, "Why?", echo, tokenizer, window=260, summary_tokens=30, answer_tokens=30)


def test_the_command_answers_and_counts_its_parts(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    words = [f"checkpoint={tiny_model}", f"file={file}", "device=cpu"]
    main([*words, "question=Why?", "summary_tokens=16", "answer_tokens=4", "batch_size=4"])
    assert re.fullmatch(r"compress: \d+ parts(, then \d+ parts)*; \d+ s\n", capsys.readouterr().err)
    with pytest.raises(UserError, match="summary_tokens is 4; wanted at least 16"):
        main([*words, "summary_tokens=4"])
    with pytest.raises(UserError, match="cannot be read as text"):
        main([words[0], f"file={tmp_path}"])
    with pytest.raises(UserError, match=r"window=100000: .* holds \d+ tokens; wanted at most"):
        main([*words, "window=100000"])
