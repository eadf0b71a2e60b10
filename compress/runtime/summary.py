"""Texts longer than the model's window, read in parts: a summary of each, then the answer from
these (hierarchical merging, Chang et al., BooookScore, 2024).
"""

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from compress.errors import UserError

TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around a prompt, a default system message included."""
SENTENCE_END = re.compile(r"[.!?]\s|[。！？\n]")
PART = """\
{text}

This is part {number} of {count} of a longer text. Summarize it in a few sentences. \
Keep names, numbers and dates, and all that bears on this: {question}"""
WHOLE = """\
{text}

{question}"""
SUMMARIES = """\
{text}

These are summaries of the parts of a text, in their order. {question}"""

Ask = Callable[[list[str], int], list[str]]
"""Prompts, and the most tokens that each answer may have, to answers."""


@dataclass(frozen=True)
class Summary:
    """The answer, and what it was made from: the summaries of each round, in order; none where
    the text fits as it is.
    """

    answer: str
    rounds: list[list[str]]


def in_parts(text: str, tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """`text` in parts of at most `size` tokens, each ending with a sentence where there is one in
    its latter half. Put together they are the text.
    """
    spans = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    ).offset_mapping
    starts = [start for start, _ in spans]
    parts, begin, first = [], 0, 0
    while first + size < len(spans):
        end = starts[first + size]
        half = starts[first + size // 2]
        ends = [match.end() for match in SENTENCE_END.finditer(text, half, end)]
        end = ends[-1] if ends else end
        parts.append(text[begin:end])
        begin, first = end, max(first + 1, bisect.bisect_left(starts, end))
    return [*parts, text[begin:]]


def summarize(
    text: str,
    question: str,
    ask: Ask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    window: int,
    summary_tokens: int,
    answer_tokens: int,
) -> Summary:
    """The answer to `question` on a text of any length, by a model of `window` tokens.

    A text that fits is read as it is. Others are read in two stages; where the summaries of a very
    long one do not fit together, these are summarized again. Raises UserError for a window that
    leaves no room beside the question, or so little that summaries are no shorter than what they
    are of.
    """
    beside = len(tokenizer(PART + question, verbose=False).input_ids) + TEMPLATE_TOKENS
    part, last = (window - beside - made for made in (summary_tokens, answer_tokens))
    if part <= summary_tokens or last <= summary_tokens:
        raise UserError(
            f"window={window}: the question and the prompt around it take {beside} tokens, a "
            f"summary {summary_tokens} and the answer {answer_tokens}; wanted a longer window, or "
            "fewer summary_tokens and answer_tokens"
        )
    rounds: list[list[str]] = []
    size = len(tokenizer(text, verbose=False).input_ids)
    while size > last:
        parts = in_parts(text, tokenizer, part)
        prompts = [
            PART.format(text=one.strip(), number=number, count=len(parts), question=question)
            for number, one in enumerate(parts, 1)
        ]
        rounds.append([answer.strip() for answer in ask(prompts, summary_tokens)])
        text, before = "\n\n".join(rounds[-1]), size
        size = len(tokenizer(text, verbose=False).input_ids)
        if size > last and size >= before:
            raise UserError(
                f"window={window}: the summaries of {before} tokens have {size}, so no round of "
                "them would fit; wanted a longer window, or fewer summary_tokens"
            )
    final = (SUMMARIES if rounds else WHOLE).format(text=text, question=question)
    (answer,) = ask([final], answer_tokens)
    return Summary(answer.strip(), rounds)
