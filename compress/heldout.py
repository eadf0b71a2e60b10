"""How far a model has moved from the original, on text held out from everything it learned from.

The original's log-probabilities are computed once, in float32, when its blocks are in memory for
calibration; every stage that changes weights is measured against them.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

FILE = "heldout.safetensors"


@dataclass(frozen=True)
class Distance:
    """kl: KL(original || model), nats a token. top1: share of tokens with the same first choice.
    ppl: the model's perplexity on the text.
    """

    kl: float
    top1: float
    ppl: float

    def asdict(self) -> dict[str, float]:
        return asdict(self)


def save(folder: Path, ids: Tensor, mask: Tensor, logprobs: Tensor) -> None:
    """Keep token ids and mask [n, T], padded on the right, and the original's log-probabilities
    [n, T, V], in float16.

    That is enough: at a log-probability of -8 its step is 0.008, and the steps average out.
    """
    save_file({"ids": ids, "tokens": mask.sum(1), "logprobs": logprobs}, folder / FILE)


def _windows(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids [t] and log-probabilities [t, V] of one window after the other, no padding."""
    with safe_open(folder / FILE, framework="pt") as file:
        logprobs = file.get_slice("logprobs")
        tokens = file.get_tensor("tokens").tolist()
        for index, row in enumerate(file.get_tensor("ids")):
            yield row[: tokens[index]], logprobs[index, : tokens[index]]


@torch.no_grad()
def distance(model: PreTrainedModel, folder: Path) -> Distance:
    """The distance of `model` to the original, whose log-probabilities are in `folder`."""
    kl, same, loss, tokens, predicted = 0.0, 0, 0.0, 0, 0
    for row, reference in _windows(folder):
        logits = model(row.unsqueeze(0).to(model.device), use_cache=False).logits[0]
        found, wanted = logits.float().log_softmax(-1).cpu(), reference.float().log_softmax(-1)
        kl += float((wanted.exp() * (wanted - found)).sum())
        same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        loss += float(torch.nn.functional.nll_loss(found[:-1], row[1:], reduction="sum"))
        tokens, predicted = tokens + len(row), predicted + len(row) - 1
    return Distance(kl / tokens, same / tokens, float(torch.tensor(loss / predicted).exp()))
