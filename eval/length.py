"""How well a model reads a long window: perplexity by position, and in windows of the old length.

Shapes: n windows of T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import UserError
from compress.text.windows import leading_ids
from compress.training.long_window import losses

PARTS = 8
"""Equal parts of a window over which the perplexity is given."""


@dataclass(frozen=True)
class Reading:
    """Perplexities of the same tokens. long: read in whole windows; by_position: over each of
    PARTS equal parts of these. short: read in windows of the old length.
    """

    long: float
    by_position: list[float]
    short: float


def sliding_windows(
    text: str, tokenizer: PreTrainedTokenizerBase, count: int, length: int, description: str
) -> Tensor:
    """`count` windows [n, T] of `length` tokens from all over `text`, each led by BOS where the
    tokenizer puts one: at equal distances, overlapping where the text is shorter than all of them.

    Raises UserError where it is shorter than one.
    """
    start = leading_ids(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    body = length - len(start)
    room = len(ids) - body
    if room < 0:
        raise UserError(
            f"{description}: {len(ids)} tokens; wanted at least one window of {length}: give "
            "longer text by data.path or data.heldout, or a smaller extend.factor"
        )
    count = min(count, room + 1)
    firsts = [room * i // max(1, count - 1) for i in range(count)]
    return torch.tensor([start + ids[first : first + body] for first in firsts])


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, window: int, bos: Sequence[int] = ()) -> Reading:
    """The perplexities of windows `ids` [n, T], whole and in windows of `window` tokens.

    bos: what every window begins with, the short ones too.
    """
    long = torch.cat([losses(model, row.to(model.device)) for row in ids.split(1)])
    short = torch.cat(
        [losses(model, row.to(model.device)).flatten() for row in _cut(ids, window, list(bos))]
    )
    parts = [float(part.mean().exp()) for part in long.mean(0).tensor_split(PARTS)]
    return Reading(math.exp(float(long.mean())), parts, math.exp(float(short.mean())))


def _cut(ids: Tensor, window: int, bos: list[int]) -> list[Tensor]:
    """The tokens of `ids` [n, T] in rows [1, window], each led by `bos`; a shorter rest is left."""
    body, rows = window - len(bos), []
    for row in ids[:, len(bos) :]:
        pieces = row[: len(row) - len(row) % body].split(body)
        rows += [torch.cat([torch.tensor(bos, dtype=row.dtype), p]).unsqueeze(0) for p in pieces]
    return rows
