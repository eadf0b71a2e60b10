"""How likely does the model find each continuation of a prompt?

Shapes: B texts a batch, T tokens of the longest, V vocabulary.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from compress.eval.text import has_cjk
from compress.log import progress
from compress.runtime.cache import all_logits

Row = tuple[list[int], int]
"""The token ids of a text, and at which of them, 1 or later, its continuation begins."""


def encode(prompt: str, continuation: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Token ids of prompt + continuation, and how many of them come before the continuation.

    The two are tokenized as one text, since that is how a model sees text, with the special tokens
    that the tokenizer adds in front, unless a chat template wrote BOS there already. The
    continuation begins at the first token that differs from those of the prompt alone.
    """
    bos = tokenizer.bos_token
    adds = not (bos and prompt.startswith(bos))
    alone = tokenizer(prompt, add_special_tokens=adds).input_ids
    ids = tokenizer(prompt + continuation, add_special_tokens=adds).input_ids
    # Tokenizers that end a text with a special token would have it in the prompt's middle.
    if alone and ids[-1] == alone[-1] == tokenizer.eos_token_id:
        alone, ids = alone[:-1], ids[:-1]
    pairs = enumerate(zip(alone, ids, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(ids)))
    if not 0 < start < len(ids):
        raise ValueError(f"prompt {prompt!r}, continuation {continuation!r}: wanted tokens in both")
    return ids, start


@dataclass(frozen=True)
class Scored:
    """How a model found a continuation.

    total: its log-likelihood, in nats, a sum over its tokens. tokens: how many these are.
    likeliest: the token that the model found likeliest in the place of each, given those before it.
    greedy: whether these are the continuation, so that greedy decoding would have written it.
    """

    total: float
    tokens: int
    likeliest: tuple[int, ...]
    greedy: bool


@torch.inference_mode()
def scored(
    model: PreTrainedModel, rows: list[Row], *, batch_size: int, kv_cache: str = "16"
) -> list[Scored]:
    """For each row: how the model finds its continuation, after the tokens before."""
    results: dict[int, Scored] = {}
    for batch in progress(by_length(rows, batch_size), "likelihoods", "batch"):
        of_batch = read(model, [rows[i] for i in batch], kv_cache=kv_cache)
        results |= zip(batch, of_batch, strict=True)
    return [results[i] for i in range(len(rows))]


def by_length(rows: list[Row], batch_size: int) -> list[list[int]]:
    """Indices of the rows in batches of like length, so that little of a batch is padding."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def read(
    model: PreTrainedModel,
    rows: list[Row],
    *,
    kv_cache: str = "16",
    context: Cache | None = None,
    length: int = 0,
) -> list[Scored]:
    """How the model finds the continuation of each row, in one batch.

    context: a cache of the first `length` tokens of the rows, which takes up what follows. Rows
    are padded on the right, where causal attention never looks, and masked. Token i is predicted by
    position i - 1: the last token is not read, and there are logits from the first `start` on only.
    """
    ids, mask = _right_padded([ids[length:-1] for ids, _ in rows], length)
    ids, mask = ids.to(model.device), mask.to(model.device)
    first = min(start for _, start in rows) - 1
    if kv_cache != "16":
        logits = all_logits(model, ids, kv_cache, mask)[:, first:]
    else:
        kept = {"use_cache": False} if context is None else {"use_cache": True, "cache": context}
        asked = {"input_ids": ids, "attention_mask": mask, **kept}
        logits = last_logits(model, mask.shape[1] - first, asked)
    return [
        _of_continuation(of_row[start - 1 - first : len(tokens) - 1 - first], tokens[start:])
        for of_row, (tokens, start) in zip(logits, rows, strict=True)
    ]


def last_logits(model: PreTrainedModel, count: int, asked: dict[str, Any]) -> Tensor:
    """Logits [B, count, V] of the last positions of what the model is `asked`.

    The head computes no others, unless the model's forward cannot leave them out.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        asked = {**asked, "logits_to_keep": count}
    return model(**asked).logits[:, -count:]


def of_logits(rows: list[list[Row]], logits: Iterable[Tensor]) -> list[list[Scored]]:
    """The same for the rows of each item, by the logits [t, V] of one row after the other, each
    read alone and without its last token.
    """
    each = iter(logits)
    return [
        [_of_continuation(next(each)[start - 1 :], tokens[start:]) for tokens, start in of_item]
        for of_item in rows
    ]


def _right_padded(rows: list[list[int]], before: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] and mask [B, `before` + T], both int64.

    The padding is token 0, which the mask hides; all that is `before` the rows is seen.
    """
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros(len(rows), before + ids.shape[1], dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : before + len(row)] = 1
    return ids, mask


def _of_continuation(logits: Tensor, tokens: list[int]) -> Scored:
    """How likely `tokens` are, by the logits [T, V] of the positions that predict them."""
    scores = logits.float().log_softmax(-1)
    wanted = torch.tensor(tokens, device=logits.device)
    total = float(scores.gather(1, wanted[:, None]).double().sum())
    likeliest = tuple(scores.argmax(-1).tolist())
    return Scored(total, len(tokens), likeliest, likeliest == tuple(tokens))


def pieces(text: str, tokenizer: PreTrainedTokenizerBase, window: int) -> list[Row]:
    """`text` as rows for `scored` of at most `window` tokens, in which every token is scored once.

    The first token follows a beginning-of-sequence token (where there is none, the end-of-sequence
    token); each further piece, the last token of the one before; what is left at the end, as much
    as fits a window (lm-evaluation-harness's rolling likelihood with a context of one token).
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = [first, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
    rows = []
    for scored_before in range(1, len(ids), window - 1):
        end = min(scored_before + window - 1, len(ids))
        begin = max(0, end - window)
        rows.append((ids[begin:end], scored_before - begin))
    return rows


def spaced(prompt: str, choice: str) -> str:
    """A choice as it continues a prompt: after a space, unless white space stands there already.

    Chinese has no spaces.
    """
    return choice if has_cjk(choice) or prompt[-1:].isspace() else f" {choice}"
