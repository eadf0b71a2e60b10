"""Multiple choice by likelihood: how likely does the model find each continuation of the prompt?

Shapes: B texts a batch, T tokens of the longest, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.eval.text import has_cjk
from compress.log import progress
from compress.runtime.cache import all_logits


def encode(
    prompt: str, continuation: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], int]:
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
    model: PreTrainedModel,
    rows: list[tuple[list[int], int]],
    *,
    batch_size: int,
    kv_cache: str = "16",
) -> list[Scored]:
    """For each (token ids, start): how the model finds those from `start` on, after those before.

    Batches are padded on the right, where causal attention never looks, and masked. Token i is
    predicted by position i - 1.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    results: dict[int, Scored] = {}
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    for batch in progress(batches, "likelihoods", "batch"):
        ids, mask = _right_padded([rows[i][0] for i in batch])
        logits = all_logits(model, ids.to(model.device), kv_cache, mask.to(model.device))
        for row, i in enumerate(batch):
            tokens, start = rows[i]
            scores = logits[row, start - 1 : len(tokens) - 1].float().log_softmax(-1)
            wanted = torch.tensor(tokens[start:], device=model.device)
            total = float(scores.gather(1, wanted[:, None]).double().sum())
            likeliest = tuple(scores.argmax(-1).tolist())
            results[i] = Scored(total, len(wanted), likeliest, likeliest == tuple(tokens[start:]))
    return [results[i] for i in range(len(rows))]


def log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[str, str]],
    *,
    batch_size: int,
    kv_cache: str = "16",
) -> list[float]:
    """Log P(continuation | prompt) in nats, for each pair of texts, in their order."""
    rows = [encode(prompt, continuation, tokenizer) for prompt, continuation in pairs]
    return [one.total for one in scored(model, rows, batch_size=batch_size, kv_cache=kv_cache)]


def pieces(
    text: str, tokenizer: PreTrainedTokenizerBase, window: int
) -> list[tuple[list[int], int]]:
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


def _right_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both int64 [B, T]; the padding is token 0, which the mask hides."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids, mask


def spaced(prompt: str, choice: str) -> str:
    """A choice as it continues a prompt: after a space, unless white space stands there already.

    Chinese has no spaces.
    """
    return choice if has_cjk(choice) or prompt[-1:].isspace() else f" {choice}"


def of_choices(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[tuple[str, tuple[str, ...]]],
    *,
    batch_size: int,
    kv_cache: str = "16",
) -> list[list[float]]:
    """For each (prompt, choices): the log-likelihood of every choice, in nats."""
    pairs = [
        (prompt, spaced(prompt, choice)) for prompt, choices in questions for choice in choices
    ]
    found = iter(log_likelihoods(model, tokenizer, pairs, batch_size=batch_size, kv_cache=kv_cache))
    return [[next(found) for _ in choices] for _, choices in questions]
