"""Token windows out of documents: texts joined and cut, conversations by the chat template."""

from array import array
from dataclasses import dataclass

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.errors import UserError
from compress.log import logger
from compress.text.documents import Document

BLOCK = 4_000_000  # characters tokenized at once, for which the tokenizer takes about 0.6 GB


@dataclass(frozen=True)
class Windows:
    """Token windows: `ids` and `mask` [n, T] int64 (mask 0 where padded, on the right).

    template_tokens: those that the chat template added. description: words for the source.
    available: windows that the documents would give. short: documents of less than a window:
    conversations, which are padded; texts, by their characters, which are joined with others.
    cut: conversations of more than a window, whose rest is left out. dropped: documents with
    nothing in them.
    """

    ids: Tensor
    mask: Tensor
    template_tokens: int = 0
    description: str = ""
    available: int = 0
    short: int = 0
    cut: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.mask.sum())


def draw(
    docs: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    length: int,
    seed: int,
    description: str,
) -> Windows:
    """`count` windows of `length` tokens, picked by `seed`, in the order of the text.

    Texts are joined and cut into windows with no padding, each led by BOS where the tokenizer
    itself puts one. Conversations get a window each, cut at `length` and padded on the right.
    Fewer windows than asked for are taken with a word; none is an error.
    """
    if docs and isinstance(docs[0], list):
        return _chat_windows(docs, tokenizer, count, length, seed, description)
    start = leading_ids(tokenizer)
    ids = _token_ids("\n\n".join(str(d) for d in docs), tokenizer)
    body = length - len(start)
    available = len(ids) // body
    if available == 0:
        raise UserError(
            f"{description}: {len(ids)} tokens; wanted at least one window of {length}: "
            "give more text, or a smaller data.length"
        )
    chosen = _choose(available, count, seed, description)
    rows = [start + ids[i * body : (i + 1) * body].tolist() for i in chosen]
    tensor = torch.tensor(rows, dtype=torch.int64)
    sizes = [len(str(d)) for d in docs if str(d).strip()]
    window = body * sum(sizes) / len(ids)  # characters
    return Windows(
        tensor,
        torch.ones_like(tensor),
        0,
        description,
        available=available,
        short=sum(size < window for size in sizes),
        dropped=len(docs) - len(sizes),
    )


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> "array[int]":
    ids = array("i")
    for first in range(0, len(text), BLOCK):
        block = text[first : first + BLOCK]
        ids.extend(tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"])
    return ids


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """BOS, where the tokenizer puts it before a text by itself."""
    ids = list(tokenizer("a")["input_ids"])
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []


def _choose(available: int, count: int, seed: int, description: str) -> list[int]:
    if available < count:
        logger.warning(f"{description}: {available} windows, fewer than the {count} asked for")
        return list(range(available))
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return sorted(order[:count].tolist())


def _chat_windows(
    docs: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    length: int,
    seed: int,
    description: str,
) -> Windows:
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template for data.messages; give plain text by data.field"
        )
    chosen = _choose(len(docs), count, seed, description)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rows: list[list[int]] = []
    template_tokens = cut = 0
    for index in chosen:
        messages = docs[index]
        try:
            rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as error:
            raise UserError(
                f"{description}: conversation {index + 1} does not fit the model's chat template: "
                f"{error}"
            ) from error
        tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        if not tokens:
            continue
        spoken = tokenizer([m["content"] for m in messages], add_special_tokens=False)  # type: ignore[index]
        added = max(0, len(tokens) - sum(map(len, spoken["input_ids"])))
        rows.append(tokens[:length])
        # Of a conversation that is cut the template is taken to lose as large a part as the rest.
        template_tokens += round(added * len(rows[-1]) / len(tokens))
        cut += len(tokens) > length
    if not rows:
        raise UserError(
            f"{description}: no token in its conversations; wanted text to calibrate on"
        )
    ids = torch.full((len(rows), length), pad or 0, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    return Windows(
        ids,
        mask,
        template_tokens,
        description,
        available=len(docs),
        short=sum(len(tokens) < length for tokens in rows),
        cut=cut,
        dropped=len(chosen) - len(rows),
    )
