"""How a student learns from its teacher's soft labels: the loss of some windows, and all steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from compress import processes
from compress.algorithms.divergence import forward_kl, jensen_shannon, reverse_kl, soften
from compress.algorithms.soft_labels import student_log_probabilities
from compress.model import storage_dtype
from compress.stage import Run
from compress.training import long_window
from compress.training.choosing import Right
from compress.training.labels import NOTHING, Batch, Labels
from compress.training.long_window import before_head, checkpointing
from compress.training.loop import Groups, History, Schedule, train

LOSSES = ("kl", "reverse_kl", "jensen_shannon")


@dataclass(frozen=True)
class Objective:
    """divergence: one of LOSSES, of distributions at this temperature; beta: the teacher's share in
    Jensen-Shannon's mixture. hard: the share of cross-entropy with the text itself.
    """

    divergence: str
    beta: float = 0.5
    temperature: float = 1.0
    hard: float = 0.0

    def of(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss in nats, summed over the real positions of logits [B, T, V]."""
        real = batch.mask.bool()
        soft = self._divergence(logits[real], batch.kept[real], batch.teacher[real]) * real.sum()
        if self.hard == 0:
            return soft
        tokens = batch.follows.flatten()
        hard = F.cross_entropy(
            logits.float().flatten(0, 1), tokens, ignore_index=NOTHING, reduction="sum"
        )
        return (1 - self.hard) * soft + self.hard * hard

    def _divergence(self, logits: Tensor, kept: Tensor, teacher: Tensor) -> Tensor:
        p = soften(teacher, self.temperature)
        q = soften(student_log_probabilities(logits, kept), self.temperature)
        if self.divergence == "jensen_shannon":
            return jensen_shannon(p, q, self.beta)
        return {"kl": forward_kl, "reverse_kl": reverse_kl}[self.divergence](p, q)


def loss(
    model: PreTrainedModel,
    batch: Batch,
    objective: Objective,
    *,
    precision: torch.dtype = torch.float32,
    recompute: bool = False,
) -> Tensor:
    """The mean loss in nats over the real positions of a batch.

    precision: of the arithmetic, in bfloat16 but for norms, softmax and the residual stream.
    recompute: keep the input of each block alone, and the logits of a part of the positions, and
    make the rest again on the way back: less memory for a third more time.

    Windows are padded on the right, where no real token looks, so that no mask is needed.
    """
    length = int(batch.mask.sum(1).max())  # so that no part is padding alone
    batch, real = batch.part(slice(length)).to(model.device), batch.mask.sum()
    with long_window.arithmetic(model, precision):
        if not recompute:
            made = before_head(model, batch.ids)
            return objective.of(long_window.logits(model, made, slice(length)), batch) / real
        with checkpointing(model):
            made = before_head(model, batch.ids)
        return by_parts(model, made, batch, objective) / real


def by_parts(
    model: PreTrainedModel, made: ModelOutput, batch: Batch, objective: Objective
) -> Tensor:
    """The loss in nats, summed over the real positions of a batch of which `model` has `made` what
    its head reads (`long_window.before_head`); logits of a part of the positions at a time, which
    are made again on the way back.
    """

    def part(positions: slice) -> Tensor:
        logits = long_window.logits(model, made, positions)
        return objective.of(logits, batch.part(positions))

    length, size = batch.ids.shape[1], long_window.CHUNK
    parts = [slice(first, first + size) for first in range(0, length, size)]
    return torch.stack([checkpoint(part, p, use_reentrant=False) for p in parts]).sum()


def order(count: int, epochs: int, seed: int) -> Tensor:
    """Numbers of `count` windows [epochs * count] as they are learned from: each once an epoch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])


class Course(Protocol):
    """What a stage whose student learns from labels is told of it; the words are in `Distill`."""

    name: ClassVar[str]
    epochs: int
    precision: str
    recompute: bool
    measures: int
    patience: int


def teach(
    model: PreTrainedModel,
    groups: Groups,
    made: Labels,
    batch: int,
    objective: Objective,
    course: Course,
    measure: Callable[[], float],
    run: Run,
    ask: Callable[[], Right] | None = None,
    optimizer: str = "adamw",
) -> History:
    """Train `groups` of `model` on `batch` windows of `made` a step, of which several processes
    each take a share; measured, asked, kept and resumed as by `train`.
    """
    rows = order(len(made), course.epochs, run.config.seed)

    def loss_of(step: int) -> Tensor:
        windows = made.batch(processes.share(rows[step * batch : (step + 1) * batch]))
        mean = loss(
            model,
            windows,
            objective,
            precision=getattr(torch, course.precision),
            recompute=course.recompute,
        )
        return mean * processes.weight(int(windows.mask.sum()))

    steps = course.epochs * (len(made) // batch)
    return train(
        groups,
        loss_of,
        measure,
        Schedule(steps, measures=course.measures, patience=course.patience),
        run.work,
        what=course.name,
        dtype=storage_dtype(model.config, run.config.model.dtype),
        ask=ask,
        optimizer=optimizer,
    )


def figures(history: History, made: Labels, batch: int, weights: int) -> dict[str, Any]:
    """What `teach` took, for the manifest. weights: that a token is multiplied with."""
    steps = history.curve[-1]["step"]
    step_tokens = made.figures["tokens"] * batch // len(made)
    return {
        "labels": made.figures,
        "steps": steps,
        "best_step": history.best_step,
        "tokens": steps * step_tokens,
        "flops": 6 * weights * steps * step_tokens,
        "curve": [
            {
                "step": p["step"],
                "tokens": p["step"] * step_tokens,
                "kl": p["value"],
                **{key: p[key] for key in ("tasks", "falls") if key in p},
            }
            for p in history.curve
        ],
    }
