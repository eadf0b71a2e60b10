"""The requests of a load: prompts, answers' lengths and moments of arrival, all by one seed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from compress.errors import UserError
from compress.model_path import home
from compress.runtime.generate import encode

SHORTEST = 2
"""Tokens of an answer that has a time between two of them."""


@dataclass(frozen=True)
class Lengths:
    """Tokens by a lognormal distribution, as lengths of real requests roughly are."""

    median: int
    sigma: float


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts, and of answers."""

    prompt: Lengths
    answer: Lengths


MIXES = {
    "chat": Mix(Lengths(100, 0.9), Lengths(60, 1.0)),
    "summarize": Mix(Lengths(600, 0.5), Lengths(50, 0.5)),
    "write": Mix(Lengths(40, 0.6), Lengths(250, 0.7)),
}
"""Made-up mixes, for a first look: short questions, long texts to shorten, long texts to write."""


@dataclass(frozen=True)
class LoadRequest:
    """Token ids of a prompt, and the exact number of tokens to answer with.

    cut: whether one of both was longer and did not fit.
    """

    prompt: list[int]
    new_tokens: int
    cut: bool = False


def requests(
    workload: str, number: int, tokenizer: PreTrainedTokenizerBase, context: int, seed: int
) -> list[LoadRequest]:
    """`number` requests of a named mix, each cut to fit into `context` tokens, or of a JSONL file.

    Raises UserError for a name that is none of MIXES and no file, and for a line of the file that
    does not say both lengths or does not fit, or where no answer has SHORTEST tokens.
    """
    draw = np.random.default_rng(seed)
    vocabulary = len(tokenizer)
    if workload in MIXES:
        mix = MIXES[workload]
        lengths = [(_drawn(mix.prompt, draw), _drawn(mix.answer, draw)) for _ in range(number)]
        made = [LoadRequest(_words(n, vocabulary, draw), new) for n, new in lengths]
        return [_fitted(request, context) for request in made]
    path = home(workload)
    lines = _lines(path, workload)
    chosen = draw.permutation(np.resize(np.arange(len(lines)), number))
    found = [
        _read(f"{path}, line {lines[i][0]}", lines[i][1], tokenizer, context, draw)
        for i in chosen.tolist()
    ]
    if all(request.new_tokens < SHORTEST for request in found):
        raise UserError(
            f"{path}: all answers have one token; wanted one of {SHORTEST} at least, for the time "
            "from one token to the next"
        )
    return found


def arrivals(number: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests come in a Poisson process of `rate` a second, the first at 0."""
    gaps = np.random.default_rng(seed + 1).exponential(1 / rate, number - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def _drawn(lengths: Lengths, draw: np.random.Generator) -> int:
    return max(SHORTEST, round(draw.lognormal(np.log(lengths.median), lengths.sigma)))


def _words(tokens: int, vocabulary: int, draw: np.random.Generator) -> list[int]:
    """Random tokens: the time does not depend on which."""
    return [int(token) for token in draw.integers(vocabulary, size=tokens)]


def _lines(path: Path, workload: str) -> list[tuple[int, str]]:
    """The lines of the file that are not empty, each with its number."""
    if not path.is_file():
        raise UserError(
            f"workload={workload}: no such file; wanted a JSONL file, or {', '.join(MIXES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error}); wanted a JSONL file") from error
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: no requests in it")
    return lines


def _fitted(request: LoadRequest, context: int) -> LoadRequest:
    """As it is where it fits; else an answer leaves at least half of the context to the prompt."""
    if len(request.prompt) + request.new_tokens <= context:
        return request
    new = min(request.new_tokens, context // 2)
    return LoadRequest(request.prompt[: context - new], new, cut=True)


def _read(
    where: str,
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    draw: np.random.Generator,
) -> LoadRequest:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: no JSON: {error}") from error
    row = row if isinstance(row, dict) else {}
    try:
        prompt, answer = _prompt(row, tokenizer, draw), _answer(row, tokenizer)
    except TemplateError as error:
        raise UserError(f"{where}: the chat template refuses it: {error}") from error
    if not prompt or not answer:
        raise UserError(
            f"{where}: wanted prompt (text) or prompt_tokens (a number), and answer (text) or "
            "new_tokens (a number); or messages that end with the answer"
        )
    if len(prompt) + answer > context:
        raise UserError(
            f"{where}: the prompt has {len(prompt)} tokens and the answer {answer}; wanted at most "
            f"{context} together, the model's context or kv_tokens where that is less"
        )
    return LoadRequest(prompt, answer)


def _prompt(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, draw: np.random.Generator
) -> list[int]:
    if isinstance(tokens := row.get("prompt_tokens"), int):
        return _words(max(0, tokens), len(tokenizer), draw)
    text = row.get("prompt")
    if turns := _turns(row):
        asked = turns[:-1]
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        else:
            text = "\n".join(turn["content"] for turn in asked)
    return encode(tokenizer, [text], 0)[0][0].tolist() if isinstance(text, str) and text else []


def _answer(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    if isinstance(tokens := row.get("new_tokens"), int):
        return max(0, tokens)
    turns = _turns(row)
    text = turns[-1]["content"] if turns else row.get("answer")
    if not isinstance(text, str):
        return 0
    # Of an empty answer the token that ended it.
    return max(1, len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))


def _turns(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The turns of a conversation that ends with the assistant's; none where it is not one."""
    turns = row.get("messages")
    if not isinstance(turns, list) or len(turns) < 2:
        return []
    sound = all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in turns)
    return turns if sound and turns[-1].get("role") == "assistant" else []
