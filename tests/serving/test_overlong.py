"""Prompts that are too long: cut by a rule, and said so."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress import serve
from compress.errors import ConfigError
from compress.runtime.server.answers import begin
from compress.runtime.server.errors import Refusal
from compress.runtime.server.overlong import Message, cut, cut_chat
from compress.runtime.server.protocol import Completion
from tests.serving.asking import number
from tests.serving.conftest import NAME, Running, running

STORY = "One day, Tom went out to play with his red ball. " * 8
ROOM = 40


@pytest.mark.parametrize(
    ("rule", "most", "kept"),
    [
        ("start", 4, [6, 7, 8, 9]),
        ("end", 4, [0, 1, 2, 3]),
        ("middle", 4, [0, 1, 8, 9]),
        ("middle", 5, [0, 1, 2, 8, 9]),
        ("middle", 1, [0]),
        ("start", 1, [9]),
        ("start", 10, list(range(10))),
        ("middle", 12, list(range(10))),
    ],
)
def test_what_is_cut(rule: str, most: int, kept: list[int]) -> None:
    assert cut(range(10), most, rule) == kept


@pytest.fixture(scope="module")
def tokenizer(stories260k: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(stories260k)


def chat(*contents: str) -> list[Message]:
    return [{"role": "user", "content": content} for content in contents]


def test_of_a_conversation_the_longest_message_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    def encode(messages: Sequence[Message]) -> list[int]:
        text = " ".join(f"<{message['content']}>" for message in messages)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    system, question = "Tell of Lily.", "What did Tom do?"
    long, whole = chat(system, STORY, question), chat(system, question)
    for rule in ("start", "middle", "end"):
        ids = cut_chat(long, encode(long), encode, tokenizer, 80, rule)
        text = tokenizer.decode(ids)
        assert 70 < len(ids) <= 80
        assert text.startswith(f"<{system}>")
        assert text.endswith(f"<{question}>")
        assert ("<One day, Tom" in text) == (rule != "start")
        assert ("red ball. >" in text) == (rule != "end")
    assert cut_chat(whole, encode(whole), encode, tokenizer, 80, "start") == encode(whole)
    with pytest.raises(Refusal, match="over 10 tokens without its longest message"):
        cut_chat(long, encode(long), encode, tokenizer, 10, "start")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    settings = serve.Options(
        checkpoint=str(folder),
        device="cpu",
        running=4,
        kv_tokens=512,
        prompt_tokens=ROOM,
        new_tokens=8,
        overlong="middle",
    )
    with running(settings) as here:
        yield here


def test_a_cut_prompt_is_answered_as_the_same_prompt_in_short(
    server: Running, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer(STORY).input_ids
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 8, "temperature": 0}
    completions = server.client.completions.with_raw_response
    found = completions.create(prompt=STORY, **asked)
    assert found.headers["X-Prompt-Tokens-Cut"] == str(len(ids) - ROOM)
    whole = found.parse()
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == ROOM
    same = completions.create(prompt=cut(ids, ROOM, "middle"), **asked)
    assert "X-Prompt-Tokens-Cut" not in same.headers
    assert same.parse().choices[0].text == whole.choices[0].text
    assert number(server, "prompt_tokens_cut_total") == len(ids) - ROOM
    with server.client.completions.with_streaming_response.create(
        prompt=STORY, stream=True, **asked
    ) as stream:
        assert stream.headers["X-Prompt-Tokens-Cut"] == str(len(ids) - ROOM)


def test_a_long_conversation_is_answered(server: Running) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Once upon a time"},
        {"role": "user", "content": STORY},
    ]
    answer = server.client.chat.completions.create(model=NAME, messages=messages, max_tokens=4)
    assert answer.usage is not None
    assert 30 < answer.usage.prompt_tokens <= ROOM


def test_more_tokens_than_may_be_asked_for_are_refused_before_anything_is_cut(
    server: Running,
) -> None:
    messages: list[Any] = [{"role": "user", "content": STORY}]
    with pytest.raises(openai.BadRequestError, match="max_tokens is 9; wanted at most 8"):
        server.client.chat.completions.create(model=NAME, messages=messages, max_tokens=9)


@pytest.mark.parametrize(
    ("given", "asked", "kept"),
    [(60, None, 60), (61, None, 48), (56, 8, 56), (57, 8, 56), (60, 4, 60), (61, 4, 60)],
)
def test_only_what_would_be_refused_is_cut(
    server: Running, given: int, asked: int | None, kept: int
) -> None:
    small = replace(server.served, context=64, prompt_tokens=60, new_tokens=30)
    answer = begin(small, Completion(model=NAME, prompt=[5] * given, max_tokens=asked))
    assert (len(answer.prompt), answer.cut) == (kept, given - kept)
    assert answer.most == (asked or min(30, 64 - kept))
    if answer.cut:
        with pytest.raises(Refusal):
            begin(
                replace(small, overlong="refuse"),
                Completion(model=NAME, prompt=[5] * given, max_tokens=asked),
            )


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlong is 'left'; wanted one of refuse, start"):
        serve.Options(checkpoint="x", overlong="left")
