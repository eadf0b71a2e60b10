"""A fine-tune for a longer window: on pieces of long documents, and on numbers hidden in them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress import processes
from compress.algorithms.rope import skipping
from compress.errors import UserError
from compress.eval.length_needles import TAUGHT, hide
from compress.text.windows import Windows, leading_ids
from compress.training.labels import Labels
from compress.training.long_window import arithmetic, before_head, checkpointing, losses
from compress.training.loop import History, Schedule, train
from compress.training.student import Objective, by_parts
from compress.training.trainable import ROTATED, norms_and

LEAST = 16
"""Tokens of a piece: a shorter end of a document is left out."""


@dataclass(frozen=True)
class Piece:
    """A run of tokens `ids` [t] that attends to nothing else. answer: where the tokens are whose
    loss counts; None: all but the first. row: of the soft labels that it learns, whose first t
    tokens are these; None: it learns the text. near: whether it stays at the first positions, else
    it is spread over the window's.
    """

    ids: Tensor
    answer: slice | None = None
    row: int | None = None
    near: bool = False


def batches(
    docs: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    steps: int,
    batch: int,
    length: int,
    passkey: float,
    seed: int,
    labelled: bool = False,
    near: float = 0.0,
) -> list[list[Piece]]:
    """What each of `steps` steps learns from: `batch` windows of up to `length` tokens.

    Documents are taken from the longest on, as many as are needed, and cut into pieces of `length`;
    of shorter ones several fill a window, each a piece of its own. In `passkey` of the windows a
    number is hidden and asked for at the end; of the others `near` stay at the first positions. If
    `labelled`, what hides no number has a row of the soft labels, the same where a piece of text is
    taken again, as all are where there is less.
    Raises UserError where there is none, and where `length` leaves no room to hide a number in.
    """
    draw = random.Random(seed)
    long, filler = _pieces(docs, tokenizer, length, steps * batch * length)
    if not long:
        raise UserError(f"extend: no document of {LEAST} tokens to train on; give longer text")
    draw.shuffle(long)
    following = cycle(enumerate(long))
    hidden = set(draw.sample(range(steps * batch), round(passkey * steps * batch)))
    plain = sorted(set(range(steps * batch)) - hidden)
    close = set(draw.sample(plain, round(near * len(plain))))
    rows: dict[int, int] = {}
    windows = []
    for number in range(steps * batch):
        if number in hidden:
            text = hide(tokenizer, filler, length, [draw.random()], TAUGHT, draw.randrange(1 << 30))
            if text is None:
                raise UserError(
                    f"extend.passkey: a training window of {length} tokens has no room to hide a "
                    "number in; wanted a larger extend.length, or extend.passkey=0"
                )
            windows.append([Piece(text.ids, text.answers[0])])
            continue
        window: list[Piece] = []
        room = length
        while not window or room >= LEAST:
            which, ids = next(following)
            row = rows.setdefault(which, len(rows)) if labelled else None
            window.append(Piece(ids[:room], row=row, near=number in close))
            room -= len(window[-1].ids)
        windows.append(window)
    return [
        [piece for window in windows[first : first + batch] for piece in window]
        for first in range(0, len(windows), batch)
    ]


def _pieces(
    docs: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, wanted: int
) -> tuple[list[Tensor], list[int]]:
    """At least `wanted` tokens as pieces, from the longest documents; their tokens in a row too."""
    start = leading_ids(tokenizer)
    body = length - len(start)
    pieces: list[Tensor] = []
    row: list[int] = []
    for doc in sorted(docs, key=len, reverse=True):
        if len(row) >= wanted:
            break
        ids = tokenizer(doc, add_special_tokens=False, verbose=False).input_ids
        row += ids
        cut = [start + ids[first : first + body] for first in range(0, len(ids), body)]
        pieces += [torch.tensor(piece) for piece in cut if len(piece) >= LEAST]
    return pieces, row


def to_label(steps: Sequence[Sequence[Piece]]) -> Windows | None:
    """The rows of the soft labels, [n, T] for a teacher, padded to the longest of them; None where
    no piece has one.
    """
    longest: dict[int, Tensor] = {}
    for piece in (piece for batch in steps for piece in batch):
        if piece.row is not None and len(piece.ids) > len(longest.get(piece.row, ())):
            longest[piece.row] = piece.ids
    if not longest:
        return None
    ids = torch.zeros((len(longest), max(map(len, longest.values()))), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, piece_ids in longest.items():
        ids[row, : len(piece_ids)], mask[row, : len(piece_ids)] = piece_ids, 1
    return Windows(ids, mask)


def loss_of(
    model: PreTrainedModel,
    pieces: Sequence[Piece],
    window: int,
    generator: torch.Generator,
    labels: Labels | None = None,
) -> Tensor:
    """The mean loss in nats of a batch, each piece weighing as many tokens as it has.

    Pieces shorter than `window` tokens are spread over its positions (`rope.skipping`). Of several
    processes each gives the part of its share of the pieces; they draw positions alike.

    A piece with a row of `labels` is told what the original, which read it at the first positions,
    makes of it: there the loss is KL(original || model). For pieces that are spread that is the
    short-to-long part of LongReD (Dong et al. 2025, arXiv:2502.07365), whose training on long text
    and loss on hidden states are left out.
    """
    tokens = sum(len(piece.ids) for piece in pieces)
    total = torch.zeros((), device=model.device)
    placed = [(piece, _positions(piece, window, generator)) for piece in pieces]
    for piece, positions in processes.share(placed):
        if piece.row is not None:
            assert labels is not None
            total = total + _divergence(model, piece, labels, positions) / tokens
            continue
        found = losses(model, piece.ids.unsqueeze(0).to(model.device), positions)[0]
        if piece.answer is not None:
            found = found[piece.answer.start - 1 : piece.answer.stop - 1]
        total = total + found.mean() * (len(piece.ids) / tokens)
    return total


def _divergence(
    model: PreTrainedModel, piece: Piece, labels: Labels, positions: Tensor | None
) -> Tensor:
    """KL in nats from the piece's labels, summed over its tokens."""
    batch = labels.batch(torch.tensor([piece.row])).part(slice(len(piece.ids))).to(model.device)
    made = before_head(model, batch.ids, positions)
    return by_parts(model, made, batch, Objective("kl"))


def _positions(piece: Piece, window: int, generator: torch.Generator) -> Tensor | None:
    """Of a piece's tokens; None: one after the other from 0 on."""
    length = len(piece.ids)
    return skipping(length, window, generator) if length < window and not piece.near else None


def fine_tune(
    model: PreTrainedModel,
    steps: Sequence[Sequence[Piece]],
    window: int,
    measure: Callable[[], float],
    *,
    rate: float,
    measures: int,
    work: Path,
    seed: int,
    dtype: torch.dtype,
    precision: torch.dtype = torch.float32,
    labels: Labels | None = None,
) -> History:
    """Train norms, Q and K (and V where it is in one matrix with them) on a list of batches; the
    step with the lowest `measure()` is left in the model. As `training.train`, also in resuming.
    precision: of the arithmetic; what is trained stays in float32. labels: the rows that pieces
    have.
    """

    def loss(step: int) -> Tensor:
        with checkpointing(model), arithmetic(model, precision):
            generator = torch.Generator().manual_seed(seed + step)
            return loss_of(model, steps[step], window, generator, labels)

    return train(
        [(rate, norms_and(ROTATED, model))],
        loss,
        measure,
        Schedule(len(steps), measures=measures),
        work,
        what="extend",
        dtype=dtype,
    )
