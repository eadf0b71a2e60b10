"""How differently the compressed model goes on along what the original wrote: KL by answer.

A score can stay while the distributions behind an answer part, and a word can change where two were
as likely; this tells the one from the other. Shapes: a answer tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPast

from compress.eval.items import Item, as_asked
from compress.eval.judge import Judge
from compress.log import logger, progress
from compress.machine import release_memory
from compress.model import find_blocks
from compress.runtime.cache import all_logits
from compress.runtime.generate import encode
from compress.runtime.loader import load

Row = tuple[list[int], list[int]]
"""Tokens of a prompt as it was asked, and of an answer."""
CHOSEN = ("choice", "cloze", "perplexity")
"""Kinds of task to which nothing is written."""
MOST = 64
"""Answers of a task that are read: of a large one of a user's own, all would take as long as asking
it did."""


def divergences(
    judge: Judge, dense: Path, checkpoint: Path, outputs: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], float]:
    """By task and id, the mean KL(original || compressed) in nats a token along the original's
    answer and to the token after it, of what both wrote differently: of at most MOST answers of a
    task, spread over those that differ.

    Each model is loaded once more, the original as it is served.
    """
    wrote = {(o["task"], o["id"]): o["before"] for o in outputs if o["before"] != o["after"]}
    rows = {
        (task.name, item.id): _row(
            judge.tokenizer, as_asked(task, item, judge.tokenizer), wrote[task.name, item.id]
        )
        for task, items in judge.asked
        if task.kind not in CHOSEN
        for item in _spread([item for item in items if (task.name, item.id) in wrote])
    }
    if not rows:
        return {}
    logger.info(f"  reading {len(rows)} written answers that differ for the KL along them")
    options: dict[str, Any] = {"device": judge.device, "trust_remote_code": judge.trust_remote_code}
    original = load(dense, dtype=None, **options)
    states = _states(original, list(rows.values()))
    logits = head_alone(original)
    release_memory()
    model = load(checkpoint, dtype=None, **options)
    found = {
        key: _divergence(model, row, logits(hidden), judge.kv_cache)
        for (key, row), hidden in zip(
            rows.items(), progress(states, "compressed", "answer"), strict=True
        )
    }
    del original, logits, model
    release_memory()
    return found


def _spread(items: Sequence[Item]) -> list[Item]:
    """At most MOST of `items`, at equal distances."""
    count = min(MOST, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def head_alone(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """From last hidden states [a, H] to logits [a, V] as the model's own forward makes them, with
    the scale or cap that it may have. Its blocks are let go.
    """
    _, blocks = find_blocks(model)
    del blocks[:]

    @torch.inference_mode()
    def logits(hidden: Tensor) -> Tensor:
        hidden = hidden.unsqueeze(0).to(model.device)
        instead = BaseModelOutputWithPast(last_hidden_state=hidden)
        model.base_model.forward = lambda *_, **__: instead
        return model(torch.zeros_like(hidden[..., 0], dtype=torch.int64), use_cache=False).logits[0]

    return logits


def _row(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Row:
    asked, _ = encode(tokenizer, [prompt], 0)
    return asked[0].tolist(), tokenizer(answer, add_special_tokens=False, verbose=False).input_ids


@torch.inference_mode()
def _states(model: PreTrainedModel, rows: Sequence[Row]) -> list[Tensor]:
    """The last hidden states from which each token of an answer, and the one after it, are
    predicted: [a + 1, H] of each row. The logits of all would take V / H times the memory.
    """
    return [
        model.base_model(
            input_ids=torch.tensor([prompt + answer], device=model.device), use_cache=False
        )
        .last_hidden_state[0, len(prompt) - 1 :]
        .cpu()
        for prompt, answer in progress(rows, "original", "answer")
    ]


@torch.inference_mode()
def _divergence(model: PreTrainedModel, row: Row, expected: Tensor, kv_cache: str) -> float:
    """Mean KL to the logits `expected` [a + 1, V]."""
    prompt, answer = row
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = all_logits(model, ids, kv_cache)[0, len(prompt) - 1 :]
    p, q = (x.float().log_softmax(-1) for x in (expected.to(model.device), logits))
    return float((p.exp() * (p - q)).sum(-1).mean())
