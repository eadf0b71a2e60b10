"""How the quantized model of the stage distill learns: what, at which rates, in which processes."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from compress import heldout, processes
from compress.stage import Run
from compress.training.asking import Asked, right
from compress.training.labels import Labels
from compress.training.loop import Groups, History, relative_groups
from compress.training.sharding import shard
from compress.training.student import Objective, teach
from compress.training.trainable import (
    ATTENTION_INPUTS,
    Adapters,
    adapters_of,
    as_stored,
    fewest_bits,
    latents,
    load_exact,
    make_trainable,
    norms_and,
    scales,
    unrounded,
)

if TYPE_CHECKING:
    from compress.stages.distill import Distill


@dataclass(frozen=True)
class Rates:
    """Learning rates: of scales relative to their mean size in each layer, of the rest as it is."""

    scales: float
    rest: float


RATES = {4: Rates(5e-4, 5e-5), 8: Rates(5e-5, 5e-6)}
"""By the fewest bits of a layer: what is coarse has more to win, and what is fine more to lose."""


@dataclass(frozen=True)
class Learned:
    """tensors: of the best step, as they are stored. count: of the values that learned. unrounded:
    the best step's held-out KL before adapters are rounded with the integers, if there are any.
    """

    history: History
    tensors: dict[str, Tensor]
    count: int
    unrounded: float | None


def learn(settings: "Distill", run: Run, made: Labels, batch: int, asked: list[Asked]) -> Learned:
    """Train on `batch` windows of `made` a step, of which several processes take a share each.
    asked: tasks whose answers are taken at each measure, too.
    """
    processes.refuse_fewer("distill.batch", batch)
    model = _student(settings, run)
    groups = _groups(settings, model)
    objective = Objective(settings.loss, settings.beta, settings.temperature, settings.hard)

    def measure() -> float:
        return heldout.distance_of(model, run.artifacts["statistics"]).kl

    ask = partial(right, asked, model) if asked else None
    kind = settings.optimizer
    history = teach(model, groups, made, batch, objective, settings, measure, run, ask, kind)
    with unrounded(model):
        before_rounding = measure() if settings.train == "adapters" else None
    return Learned(
        history,
        as_stored(model, history.best) if processes.leads() else {},
        sum(p.numel() for _, group in groups for p in group.values()),
        before_rounding,
    )


def served_kl(run: Run, folder: Path) -> float:
    """The held-out KL of the model in `folder`, loaded from disk and run by the kernels."""
    statistics = run.artifacts["statistics"]
    if processes.sharded():  # too large to be loaded whole
        trust = run.config.model.trust_remote_code
        return heldout.distance(
            folder, statistics, device=run.config.device, trust_remote_code=trust
        ).kl
    return heldout.distance_of(load_exact(folder, run.config), statistics).kl


def _student(settings: "Distill", run: Run) -> PreTrainedModel:
    """The quantized model as it learns; cut over the processes where that was asked for, which load
    it one after another, into the memory of one.
    """
    if not processes.sharded():
        return _trainable(settings, run, run.config.device)
    for turn in range(processes.count()):
        if turn == processes.rank():
            model = shard(_trainable(settings, run, "cpu"), run.config.device)
        processes.wait()
    return model


def _trainable(settings: "Distill", run: Run, device: str) -> PreTrainedModel:
    model = load_exact(run.artifacts["quantized"], run.config, device=device)
    if settings.train == "adapters":
        return make_trainable(model, adapters=Adapters(settings.rank, settings.alpha))
    return make_trainable(model, latent=settings.train == "latent")


def _groups(settings: "Distill", model: PreTrainedModel) -> Groups:
    """What learns, each with its learning rate."""
    default = RATES[fewest_bits(model)]
    groups = relative_groups(settings.scale_rate or default.scales, scales(model))
    groups.append((settings.rate or default.rest, norms_and(ATTENTION_INPUTS, model)))
    if settings.train == "latent":
        groups.append((settings.latent_rate, latents(model)))
    if settings.train == "adapters":
        groups.append((settings.adapter_rate, adapters_of(model)))
    return groups
