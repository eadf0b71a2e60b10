"""A short training run: warm-up and cosine, the best measured step kept, resumable at any step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import processes
from compress.log import logger, progress
from compress.training.choosing import Right, falls, score, words
from compress.training.optimizer import adamw, set_rates
from compress.training.sharding import collected, collected_state, cut_like, load_state, whole

KEEP_EVERY = 10  # steps between two states on disk

Groups = list[tuple[float, dict[str, nn.Parameter]]]
"""Learning rates, each with the parameters that learn at it by name."""


@dataclass(frozen=True)
class Schedule:
    """steps in all; the learning rate rises over `warmup` of them and falls as a cosine to a tenth.
    The model is measured `measures` times; after `patience` of them in a row that are no better
    than the best, training ends. Gradients are cut at norm `clip`.
    """

    steps: int
    warmup: float = 0.1
    measures: int = 4
    patience: int | None = None
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """The share of the learning rate at `step`, counted from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def measured_after(self, step: int) -> bool:
        """Whether the model is measured once `step` steps are done."""
        every = max(1, self.steps // self.measures)
        return step == self.steps or (step % every == 0 and self.steps - step >= every)

    def gives_up(self, history: "History") -> bool:
        """Whether the last `patience` measures were all no better than one before them."""
        since = sum(point["step"] > history.best_step for point in history.curve)
        return self.patience is not None and since >= self.patience


@dataclass
class History:
    """The measured curve, points of {step, value}, and the best of them; step 0 is the start.

    Where tasks are asked a point has their `tasks`, scores from 0 to 100 by name, and `falls`, see
    `choosing.falls`; answers: those at the start.
    """

    curve: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    answers: Right = field(default_factory=dict)

    def add(self, step: int, value: float, answers: Right) -> bool:
        """Put a point on the curve; whether it is the best: the lowest of those at which no task
        has fallen.
        """
        point: dict[str, Any] = {"step": step, "value": value}
        if not self.curve:
            self.answers = answers
        if answers:
            point["tasks"] = {name: score(right) for name, right in answers.items()}
            point["falls"] = falls(self.answers, answers)
        lowest = next((p["value"] for p in self.curve if p["step"] == self.best_step), None)
        is_best = lowest is None or (value < lowest and not point.get("falls"))
        if is_best:
            self.best_step = step
        self.curve.append(point)
        return is_best


def relative_groups(rate: float, parameters: dict[str, nn.Parameter]) -> Groups:
    """A group for each parameter, its learning rate `rate` times the parameter's mean size.

    Adam's steps have the size of the learning rate whatever the gradient, and scales of 8 and of
    4 bit, of wide and of narrow layers, lie orders of magnitude apart.
    """
    means = {name: float(whole(p.detach().abs().mean())) for name, p in parameters.items()}
    return [(rate * means[name], {name: p}) for name, p in parameters.items()]


def train(
    groups: Groups,
    loss_of: Callable[[int], Tensor],
    measure: Callable[[], float],
    schedule: Schedule,
    work: Path,
    *,
    what: str,
    dtype: torch.dtype,
    ask: Callable[[], Right] | None = None,
    optimizer: str = "adamw",
) -> History:
    """Train `groups` and leave the best step in them.

    loss_of(step): the loss of that step, depending on nothing but the step and the parameters.
    measure(): the held-out figure, lower is better, taken with the parameters rounded to `dtype`
    as they will be stored. ask(): which items of tasks the model answers rightly then; a step at
    which a task has fallen is not the best, see compress/training/choosing.py. optimizer: one of
    OPTIMIZERS. Killed at any step, the same call ends with the same bytes. Raises OSError where the
    disk is full; the state before stays.

    Of several processes each calls this with the same parameters and a loss whose sum over them is
    that of the step; all end with the same parameters. The history's tensors are the leader's.
    """
    parameters = {name: p for _, group in groups for name, p in group.items()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    adam = adamw([(rate, list(group.values())) for rate, group in groups], optimizer)
    file = work / f"{what}.state"
    start, history = _restore(file, parameters, adam)

    def judge() -> tuple[float, Right]:
        return measure(), ask() if ask else {}

    if start == 0:
        _note(history, 0, parameters, judge, dtype)
    for step in progress(
        range(start, schedule.steps), what, "step", total=schedule.steps, done=start
    ):
        if schedule.gives_up(history):
            break
        set_rates(adam, [rate * schedule.rate(step) for rate, _ in groups])
        loss_of(step).backward()
        processes.sum_gradients(parameters.values())
        nn.utils.clip_grad_norm_(parameters.values(), schedule.clip)
        adam.step()
        adam.zero_grad(set_to_none=True)  # their room is the measure's
        if schedule.measured_after(step + 1):
            _note(history, step + 1, parameters, judge, dtype)
        if (step + 1) % KEEP_EVERY == 0 or step + 1 == schedule.steps:
            _keep(file, step + 1, parameters, adam, history)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(history.best[name])
            history.best[name] = collected(history.best[name])
    return history


@torch.no_grad()
def _note(
    history: History,
    step: int,
    parameters: dict[str, nn.Parameter],
    judge: Callable[[], tuple[float, Right]],
    dtype: torch.dtype,
) -> None:
    """Measure the model as it would be stored; remember it where it is the best so far."""
    exact = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.copy_(parameter.to(dtype))
    value, answers = processes.agreed(judge())
    if history.add(step, value, answers):
        history.best = {}  # let go before there are others
        history.best = {n: p.detach().to(dtype, copy=True) for n, p in parameters.items()}
    if answers:
        _say(history.curve[-1])
    for name, parameter in parameters.items():
        parameter.copy_(exact[name])


def _say(point: dict[str, Any]) -> None:
    scores = ", ".join(f"{name} {value:.1f}" for name, value in point["tasks"].items())
    logger.info(f"  step {point['step']}: held-out KL {point['value']:.4f}, {scores}")
    for fall in point["falls"]:
        logger.info(f"  step {point['step']}: {words(fall)}: not kept")


def _keep(
    file: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    history: History,
) -> None:
    state = {
        "step": step,
        "parameters": {name: collected(p.detach()) for name, p in parameters.items()},
        "optimizer": collected_state(optimizer),
        "curve": history.curve,
        "best_step": history.best_step,
        "answers": history.answers,
        "best": {name: collected(best) for name, best in history.best.items()},
    }
    if not processes.leads():
        return
    aside = file.with_suffix(".tmp")
    try:
        with aside.open("wb") as opened:
            torch.save(state, opened)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        # torch ends a write that failed with one of its own that says nothing of the disk.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(file)) from error
        raise
    aside.rename(file)


def _restore(
    file: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, History]:
    if not file.exists():
        return 0, History()
    # Mapped where each of many processes takes a part of it.
    state = torch.load(file, weights_only=True, map_location="cpu", mmap=processes.sharded())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(cut_like(state["parameters"][name], parameter))
    load_state(optimizer, state["optimizer"])
    best = {name: cut_like(best, parameters[name]) for name, best in state["best"].items()}
    answers = state.get("answers", {})  # absent from a state written before tasks were asked
    return state["step"], History(state["curve"], state["best_step"], best, answers)
