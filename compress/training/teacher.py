"""The model that labels, read from its folder one block at a time.

One that runs behind a server instead: compress/training/endpoint.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from compress import source
from compress.algorithms.soft_labels import top_k
from compress.errors import UserError
from compress.model import BlockModel, linear_shapes
from compress.runtime.configs import first_line
from compress.stage import Run

TOGETHER = 2  # windows that go through a block together

Label = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Of windows ids and mask [B, T] (mask: 0 where padded) what the teacher says after each token:
tokens int32 [B, T, k], their probabilities float16 [B, T, k], the remaining mass float16 [B, T].
"""


@dataclass(frozen=True)
class Teacher:
    """The model that labels: its folder, and how it runs.

    vocabulary: tokens, from the first, that are more than padding of its output. k: likeliest
    tokens that are kept. dtype: of its arithmetic; its weights are read one block at a time.
    """

    folder: Path
    vocabulary: int
    k: int
    dtype: torch.dtype
    device: str
    trust_remote_code: bool = False

    @property
    def kept(self) -> int:
        """How many tokens are kept of each distribution."""
        return min(self.k, self.vocabulary)

    def identity(self) -> dict[str, Any]:
        """All that its labels depend on, but the text."""
        return {
            "teacher": source.fingerprint(self.folder),
            "vocabulary": self.vocabulary,
            "top_k": self.k,
            "dtype": str(self.dtype),
        }

    def flops(self, tokens: int) -> int:
        """Operations to label so many tokens, attention's own left out."""
        return 2 * linear_weights(self.folder, self.trust_remote_code) * tokens

    def opened(self) -> Label:
        """What labels windows, with the folder's files open."""
        model = BlockModel(
            self.folder,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )

        @torch.no_grad()
        def label(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            batches = [
                (i.to(model.device), m.to(model.device))
                for i, m in zip(ids.split(TOGETHER), mask.split(TOGETHER), strict=True)
            ]
            hidden = [model.embed(i, m) for i, m in batches]
            for index in range(len(model)):
                with model.block(index) as block:
                    for number, (i, m) in enumerate(batches):
                        hidden[number] = block(hidden[number], **model.calls(i, m)[index])
            kept = [
                top_k(model.logits(h[row : row + 1])[..., : self.vocabulary], self.k)
                for h in hidden
                for row in range(len(h))
            ]
            tokens, probabilities, rest = zip(*kept, strict=True)
            return torch.cat(tokens).cpu(), torch.cat(probabilities).cpu(), torch.cat(rest).cpu()

        return label


def original(run: Run, top_k: int, dtype: torch.dtype) -> Teacher:
    """The run's original as its teacher."""
    trust = run.config.model.trust_remote_code
    own = AutoConfig.from_pretrained(run.original, trust_remote_code=trust).get_text_config()
    return Teacher(run.original, own.vocab_size, top_k, dtype, run.config.device, trust)


def linear_weights(folder: Path, trust_remote_code: bool) -> int:
    """Weights that a token is multiplied with: of the linears in the blocks, and of the head."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    inside = sum(n * k for n, k in linear_shapes(config, trust_remote_code).values())
    return inside + text.vocab_size * text.hidden_size


def shared_vocabulary(
    folder: Path, model: Path, trust_remote_code: bool, *, option: str = "distill.teacher"
) -> int:
    """How many token ids two models share: all that their tokenizer knows, without the rows by
    which an output layer is padded. option: by which `folder` was given beside `model`. Raises
    UserError where their tokenizers differ, or that of `folder` cannot be read.
    """
    try:
        one, other = (
            AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code).get_vocab()
            for place in (folder, model)
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{option}={folder}: no tokenizer that loads ({first_line(error)}); copy the "
            "files of the model's own there, if they are the same"
        ) from error
    if one != other:
        tokens = sorted(one.keys() | other.keys(), key=lambda t: one.get(t, len(one)))
        token = next(t for t in tokens if one.get(t) != other.get(t))
        raise UserError(
            f"{option}={folder}: another vocabulary, of {len(one)} tokens where the model "
            f"has {len(other)}; {token!r} is number {one.get(token)} and {other.get(token)}; "
            f"wanted one with the model's own tokenizer, or {option}=null"
        )
    return max(one.values()) + 1
