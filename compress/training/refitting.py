"""A cut model fitted to the original, block by block and in closed form, before it learns.

Every block that stays is to leave the hidden states that the next one that stays was used to: those
of the original, past the blocks between them. What attention and MLP write to the residual stream
is fitted to that, on the states that the blocks fitted before it give.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.algorithms.refit import Sums, refit
from compress.log import progress
from compress.model import BlockModel
from compress.text.windows import Windows
from compress.training.cutting import ATTENTION_OUT, MLP_OUT
from compress.training.importance import rows_of

ADDS = (
    *("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "seed_oss"),
    *("gemma", "phi3", "olmo", "glm", "cohere", "cohere2"),
)
"""Kinds of block that add what these two linears give to the residual stream as it is, or times
the config's residual_multiplier; in others a norm lies between.
"""
CHECKED = 4
"""Of so many windows one is not fitted to, but chooses how far to go."""


@torch.no_grad()
def refitted(
    original: BlockModel,
    student: BlockModel,
    kept: Sequence[int],
    windows: Windows,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Weights of `student`, which is `original` cut to the blocks `kept`, by their stored names,
    rounded to `dtype`; none for kinds of block that are not in ADDS.

    One block of each model is in memory at a time, four hidden states of all windows (16 n T H
    bytes in float32) and the sums of one linear, twice. Tokens count by the inverse square of the
    hidden state that is wanted, whose direction alone the next norm reads.
    """
    if original.config.model_type not in ADDS:
        return {}
    factor = _factor(original)
    rows = rows_of(original, windows)
    hidden = [original.embed(row) for row in rows]
    ends, _ = _passed(original, range(kept[0]), rows, hidden)
    found: dict[str, Tensor] = {}
    for number in progress(range(len(kept)), "fit", "block", total=len(kept)):
        until = kept[number + 1] if number + 1 < len(kept) else len(original)
        ends, middles = _passed(original, range(kept[number], until), rows, ends)
        with student.block(number) as block:
            for name, targets in ((ATTENTION_OUT, middles), (MLP_OUT, ends)):
                linear = block.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                sums = Sums(linear.weight), Sums(linear.weight)
                passes = _lacking(student, number, name, block, rows, hidden, targets)
                for place, (inputs, lacking) in enumerate(passes):
                    weights = 1 / ends[place].float().square().mean(-1, keepdim=True)
                    sums[place % CHECKED == 1].add(inputs, lacking / factor, weights)
                fitted = refit(linear.weight, *sums).to(dtype)
                linear.weight.copy_(fitted)
                found[f"{student.block_name(number)}.{name}.weight"] = fitted.cpu()
            hidden = [
                block(states, **student.calls(row)[number])
                for states, row in zip(hidden, rows, strict=True)
            ]
    return found


def _lacking(
    student: BlockModel,
    number: int,
    name: str,
    block: nn.Module,
    rows: Sequence[Tensor],
    hidden: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each window what goes into the linear `name` of a block [1, t, K], and what the residual
    stream behind it lacks [1, t, H].
    """
    factor = _factor(student)
    for states, row, target in zip(hidden, rows, targets, strict=True):
        with _watched(block.get_submodule(name)) as seen:
            behind = block(states, **student.calls(row)[number])
        if name == ATTENTION_OUT:
            behind = states + factor * seen["outputs"]
        yield seen["inputs"], target - behind


def _passed(
    model: BlockModel, blocks: range, rows: Sequence[Tensor], hidden: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states past `blocks`, and past the attention of the first of them alone."""
    factor = _factor(model)
    hidden, middles = list(hidden), []
    for index in blocks:
        with model.block(index) as block:
            for place, (states, row) in enumerate(zip(hidden, rows, strict=True)):
                with _watched(block.get_submodule(ATTENTION_OUT)) as seen:
                    hidden[place] = block(states, **model.calls(row)[index])
                if index == blocks.start:
                    middles.append(states + factor * seen["outputs"])
    return hidden, middles


def _factor(model: BlockModel) -> float:
    """By what its blocks multiply what they add to the residual stream."""
    return getattr(model.config, "residual_multiplier", 1.0)


@contextmanager
def _watched(linear: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The `inputs` and `outputs` of a linear, once it was called."""
    seen: dict[str, Tensor] = {}

    def note(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen.update(inputs=inputs[0], outputs=outputs)

    handle = linear.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
