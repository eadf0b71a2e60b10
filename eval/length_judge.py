"""All by which a model is judged on a long window: perplexities and retrieval."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.eval.length import read, sliding_windows
from compress.eval.length_needles import retrieve
from compress.text.windows import leading_ids
from compress.training.long_window import arithmetic


@dataclass(frozen=True)
class LengthJudge:
    """What models are measured on, the same for all.

    ids: windows [n, T] of the new length. window: tokens of the old one. filler: tokens in which
    numbers are hidden, `keys` of them at each of `depths` and `lengths`; 0 keys: none. precision:
    of the arithmetic.
    """

    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    window: int
    filler: Sequence[int]
    lengths: Sequence[int]
    depths: Sequence[float]
    keys: int
    seed: int
    precision: torch.dtype = torch.float32

    def perplexities(self, model: PreTrainedModel) -> dict[str, Any]:
        """`eval.length.Reading` as plain data."""
        with arithmetic(model, self.precision):
            return asdict(read(model, self.ids, self.window, leading_ids(self.tokenizer)))

    def loss(self, model: PreTrainedModel) -> float:
        """The mean loss of long and of short windows, in nats: neither may pay for the other."""
        found = self.perplexities(model)
        return (math.log(found["long"]) + math.log(found["short"])) / 2

    def judge(self, model: PreTrainedModel) -> dict[str, Any]:
        """`ppl`, as above, and `retrieval`, as from `eval.length_needles.retrieve`, or None."""
        found = None
        if self.keys:
            where = (self.filler, self.lengths, self.depths, self.keys, self.seed)
            with arithmetic(model, self.precision):
                found = retrieve(model, self.tokenizer, *where)
        return {"ppl": self.perplexities(model), "retrieval": found}


def length_judge(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    window: int,
    longer: int,
    windows: int,
    lengths: Sequence[int],
    keys: int,
    depths: int,
    seed: int,
    description: str,
    precision: torch.dtype = torch.float32,
) -> LengthJudge:
    """A judge of windows of `longer` tokens, all from `text`; raises UserError where it is short.

    Numbers are hidden in texts of `lengths` tokens, at `depths` depths from beginning to end.
    """
    return LengthJudge(
        tokenizer,
        sliding_windows(text, tokenizer, windows, longer, description),
        window,
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
        lengths,
        [row / max(1, depths - 1) for row in range(depths)],
        keys,
        seed,
        precision,
    )
