"""Tasks that a model is asked while it learns: choices and clozes, by likelihood."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from compress import heldout
from compress.errors import UserError
from compress.eval.items import Item
from compress.eval.likelihood import Row, of_logits
from compress.eval.multiple_choice import scored_items
from compress.eval.own import named
from compress.eval.tasks import RIGHT_OR_WRONG, TASKS, Task
from compress.model import BlockModel
from compress.source import shortest_window
from compress.stage import Run
from compress.training.choosing import Right, score

BY_LIKELIHOOD = ("choice", "cloze")
BATCH = 8
"""Contexts at a time, then answers at a time."""


def by_likelihood(names: list[str]) -> list[Task]:
    """The tasks that distill.tasks names, each with one metric, by which answers are right or
    wrong. Raises UserError for one that there is not, and for one that is not asked by likelihood.
    """
    tasks = named(names, "distill.tasks")
    for task in tasks:
        if task.kind not in BY_LIKELIHOOD:
            why = (
                "whose answers are not right or wrong"
                if task.kind == "perplexity"
                else "which takes too long at each measure, as the model has to write"
            )
            bundled = ", ".join(known.name for known in TASKS if known.kind in BY_LIKELIHOOD)
            raise UserError(
                f"distill.tasks: {task.name} is of kind {task.kind}, {why}; wanted kind choice or "
                f"cloze: {bundled}, or a .yaml of your own"
            )
    return [replace(task, metrics=(_metric(task),)) for task in tasks]


def _metric(task: Task) -> str:
    return next((name for name in task.metrics if name in RIGHT_OR_WRONG), "accuracy")


@dataclass(frozen=True)
class Asked:
    """A task with its items; rows: of each, the tokens of its prompt with each of its answers."""

    task: Task
    items: list[Item]
    rows: list[list[Row]]


def prepared(tasks: list[Task], limit: int, run: Run) -> list[Asked]:
    """The tasks with their first `limit` items, less those that do not fit the model's context."""
    # Here, since `evaluate` alone takes seconds to import.
    from compress.eval.answers import encoded
    from compress.eval.judge import questions

    trust = run.config.model.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(run.original, trust_remote_code=trust)
    context = shortest_window((run.original, run.artifacts["quantized"]), trust)
    asked, _ = questions(tasks, limit, tokenizer, context)
    return [Asked(task, items, encoded(task, items, tokenizer)) for task, items in asked]


def right(asked: list[Asked], model: PreTrainedModel) -> Right:
    """Which items the model answers rightly."""
    from compress.eval import answers

    return {
        one.task.name: answers.right(
            one.task, one.items, scored_items(model, one.rows, batch_size=BATCH)
        )
        for one in asked
    }


@torch.no_grad()
def scores(asked: list[Asked], folder: Path, run: Run) -> dict[str, float]:
    """By task, the share of items, 0 to 100, that the model in `folder` answers rightly, in
    float32, read from disk a block at a time.
    """
    from compress.eval import answers

    trust = run.config.model.trust_remote_code
    model = BlockModel(folder, device=run.config.device, trust_remote_code=trust)
    found = {}
    for one in asked:
        texts = (torch.tensor(tokens[:-1]) for rows in one.rows for tokens, _ in rows)
        scored = of_logits(one.rows, heldout.block_logits(model, texts))
        found[one.task.name] = score(answers.right(one.task, one.items, scored))
    return found
