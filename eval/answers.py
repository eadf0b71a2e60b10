"""A model's answers to a task, and what they score."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.eval import likelihood, rules, statistics
from compress.eval.metrics import Rows, metric
from compress.eval.tasks import Item, Task, as_asked


@dataclass(frozen=True)
class Answer:
    """What a model said: a text, or the choice it found likeliest.

    likelihoods: of a choice, the log-likelihood of each, in nats, or in nats a character.
    """

    id: str
    text: str
    likelihoods: tuple[float, ...] = ()


def fitting(
    task: Task, items: list[Item], tokenizer: PreTrainedTokenizerBase, context: int
) -> list[Item]:
    """The items that a model with a context of this many tokens can be asked and can answer."""

    def needed(item: Item) -> int:
        answers = [_tokens(choice, tokenizer) for choice in item.choices]
        prompt = _tokens(as_asked(task, item, tokenizer), tokenizer)
        return prompt + max(answers, default=task.max_new_tokens)

    return [item for item in items if needed(item) <= context]


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(text, verbose=False).input_ids)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    items: list[Item],
    *,
    batch_size: int,
    kv_cache: str = "16",
) -> list[Answer]:
    """The model's answers to `items`, in their order; `kv_cache` as in compress.runtime.cache."""
    prompts = [as_asked(task, item, tokenizer) for item in items]
    if task.kind == "choice":
        questions = [(p, item.choices) for p, item in zip(prompts, items, strict=True)]
        scores = likelihood.of_choices(
            model,
            tokenizer,
            questions,
            per_character=task.per_character,
            batch_size=batch_size,
            kv_cache=kv_cache,
        )
        return [
            Answer(item.id, item.choices[row.index(max(row))], tuple(row))
            for item, row in zip(items, scores, strict=True)
        ]
    from compress.runtime.generate import generate

    # Prompts of like length together, so that little of a batch is padding.
    order = sorted(range(len(prompts)), key=lambda i: _tokens(prompts[i], tokenizer))
    texts = generate(
        model,
        tokenizer,
        [prompts[i] for i in order],
        max_new_tokens=task.max_new_tokens,
        batch_size=batch_size,
        kv_cache=kv_cache,
    )
    written = dict(zip(order, texts, strict=True))
    return [Answer(item.id, _trimmed(task, written[i])) for i, item in enumerate(items)]


def _trimmed(task: Task, text: str) -> str:
    # An answer cut at its longest may end inside a character of several tokens.
    text = text.strip().rstrip("\ufffd")
    return text.partition("\n")[0].strip() if task.first_line else text


def score(task: Task, items: list[Item], answers: list[Answer]) -> dict[str, Rows]:
    """By metric, what each answer adds to the score: rows [n, S] (see eval/metrics.py)."""
    if task.kind == "boundary":
        found = [
            "broken" if rules.broken(item.rules, answer.text) else "kept"
            for item, answer in zip(items, answers, strict=True)
        ]
        return {name: metric(name).rows(found, [["kept"]] * len(items)) for name in task.metrics}
    texts, references = [a.text for a in answers], [item.references for item in items]
    return {name: metric(name).rows(texts, references) for name in task.metrics}


def each(name: str, rows: Rows) -> NDArray[np.float64]:
    """The score of every item by itself, [n], by the metric `name` from its rows [n, S]."""
    total = metric(name).total
    return np.array([total(row) for row in rows])


def compare(
    task: Task, items: list[Item], before: list[Answer], after: list[Answer], *, seed: int
) -> list[dict[str, Any]]:
    """A record for each of the task's metrics: both scores, the paired interval, the flips."""
    rows = [score(task, items, answers) for answers in (before, after)]
    records = []
    for name in task.metrics:
        total = metric(name).total
        old, new = (by_metric[name] for by_metric in rows)
        low, high = statistics.paired_interval(old, new, total, seed=seed)
        gained, lost = statistics.flips(each(name, old), each(name, new))
        records.append(
            {
                "name": task.name,
                "metric": name,
                "n": len(items),
                "before": total(old.sum(0)),
                "after": total(new.sum(0)),
                "ci95": [low, high],
                "gained": gained,
                "lost": lost,
                "p": statistics.mcnemar(gained, lost),
            }
        )
    return records
