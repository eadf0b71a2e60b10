"""Retrieval from a long text: numbers hidden in it at some depth, and asked for at its end.

Passkey retrieval (Mohtashami and Jaggi 2023, arXiv:2305.16300) hides one number. With several
needles in the same text (as in RULER, Hsieh et al. 2024, arXiv:2404.06654) the right one has to be
told from the others. What greedy decoding would write is read off one forward pass: an answer
counts where each of its tokens is the likeliest after those before it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.eval.likelihood import encode
from compress.text.windows import leading_ids
from compress.training.long_window import before_head, logits

DIGITS = 5
LEAST_FILLER = 0.5
"""Share of a text that must be filler: below, depth and length say little."""


@dataclass(frozen=True)
class Wording:
    """The sentences around a number. opening: before the text. question: `needle` up to its key."""

    opening: str
    needle: str
    question: str
    things: tuple[str, ...]


ASKED = Wording(
    "Remember the numbers in this text.\n\n",
    "\nThe number of the {thing} is {key}.\n",
    "\nThe number of the {thing} is",
    ("house", "boat", "shop", "train", "garden", "school", "bridge", "tower", "farm", "mill"),
)
"""What models are measured by."""

TAUGHT = Wording(
    "Somewhere below there are codes.\n\n",
    "\nTake note: to open the {thing} you need {key}.\n",
    "\nTo open the {thing} you need",
    ("door", "box", "gate", "car", "safe", "chest", "desk", "room", "bag", "book"),
)
"""What a fine-tune is taught by: other words, so that it is not the measure that is learned."""


@dataclass(frozen=True)
class Hidden:
    """A text with needles. ids: its tokens [T], the questions with their right answers at the end.
    answers: where in it each answer's tokens are, in the order of the depths.
    """

    ids: Tensor
    answers: list[slice]


def hide(
    tokenizer: PreTrainedTokenizerBase,
    filler: Sequence[int],
    length: int,
    depths: Sequence[float],
    wording: Wording,
    seed: int,
) -> Hidden | None:
    """`length` tokens of `filler`, from a place that `seed` picks and over again where they are too
    few, with a needle at each of `depths`, 0 (the beginning) to 1.

    All are asked for at the end, one after the other in another order than they came in. None where
    less than LEAST_FILLER of the text would be filler.
    """
    draw = random.Random(seed)
    things = draw.sample(wording.things, len(depths))
    keys = [str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in depths]
    asked = draw.sample(range(len(depths)), len(depths))
    opening = leading_ids(tokenizer) + _ids(tokenizer, wording.opening)
    needles = [
        _ids(tokenizer, wording.needle.format(thing=thing, key=key))
        for thing, key in zip(things, keys, strict=True)
    ]
    ends = [_question(tokenizer, wording.question.format(thing=things[i]), keys[i]) for i in asked]
    room = length - len(opening) - sum(map(len, needles)) - sum(len(ids) for ids, _ in ends)
    if room < LEAST_FILLER * length:
        return None
    first = draw.randrange(len(filler))
    around = [filler[(first + i) % len(filler)] for i in range(room)]
    ids, done = list(opening), 0
    for depth, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0]):
        cut = round(depth * room)
        ids += [*around[done:cut], *needle]
        done = cut
    ids += around[done:]
    answers: dict[int, slice] = {}
    for number, (question, start) in zip(asked, ends, strict=True):
        answers[number] = slice(len(ids) + start, len(ids) + len(question))
        ids += question
    return Hidden(torch.tensor(ids), [answers[i] for i in range(len(depths))])


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _question(tokenizer: PreTrainedTokenizerBase, question: str, key: str) -> tuple[list[int], int]:
    """The tokens of question and answer without BOS, and where the answer begins."""
    ids, start = encode(question, f" {key}", tokenizer)
    bos = len(leading_ids(tokenizer))
    return ids[bos:], start - bos


@torch.no_grad()
def find(model: PreTrainedModel, text: Hidden) -> list[tuple[bool, float]]:
    """Of each needle whether greedy decoding would write it, and the mean log-likelihood of its
    tokens in nats.
    """
    ids = text.ids.unsqueeze(0).to(model.device)
    made = before_head(model, ids)
    found = []
    for span in text.answers:
        wanted = ids[0, span]
        before = slice(span.start - 1, span.stop - 1)
        chances = logits(model, made, before)[0].log_softmax(-1)
        right = bool((chances.argmax(-1) == wanted).all())
        found.append((right, float(chances.gather(1, wanted.unsqueeze(1)).mean())))
    return found


Found = dict[tuple[int, int], list[tuple[bool, float]]]
"""What `find` gave, by row of depth and length in tokens."""


@dataclass(frozen=True)
class Grid:
    """Retrieval by depth (rows) and length (columns). exact: share of the keys that were written
    whole. chance: of one token of a key, by the geometric mean. None: no text of that length.
    """

    exact: list[list[float | None]]
    chance: list[list[float | None]]

    @property
    def mean(self) -> float | None:
        """The share of all keys; None where none was asked for."""
        known = [value for row in self.exact for value in row if value is not None]
        return sum(known) / len(known) if known else None


def retrieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    filler: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float],
    keys: int,
    seed: int,
) -> dict[str, Any]:
    """Passkey and multi-needle retrieval, `keys` at each of `depths` and `lengths` (in tokens).

    passkey: one needle a text. needles: one at each of the depths, in the same text.
    """
    one: Found = {}
    many: Found = {}
    for length in lengths:
        for number in range(keys):
            for row, depth in enumerate(depths):
                text = hide(tokenizer, filler, length, [depth], ASKED, seed + 97 * number + row)
                one.setdefault((row, length), []).extend(find(model, text) if text else [])
            text = hide(tokenizer, filler, length, depths, ASKED, seed + 97 * number + 53)
            for row, result in enumerate(find(model, text) if text else []):
                many.setdefault((row, length), []).append(result)

    def grid(found: Found) -> dict[str, Any]:
        cells = [[found.get((row, length), []) for length in lengths] for row in range(len(depths))]
        made = Grid(
            [[_mean([right for right, _ in cell]) for cell in row] for row in cells],
            [[_chance([chance for _, chance in cell]) for cell in row] for row in cells],
        )
        return {**asdict(made), "mean": made.mean}

    about = {"lengths": list(lengths), "depths": list(depths), "keys": keys}
    return {**about, "passkey": grid(one), "needles": grid(many)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _chance(likelihoods: Sequence[float]) -> float | None:
    return math.exp(sum(likelihoods) / len(likelihoods)) if likelihoods else None
