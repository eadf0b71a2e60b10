"""A model's answers to a task, and what they score."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.eval import likelihood, multiple_choice, rules, statistics
from compress.eval.items import Item, as_asked
from compress.eval.likelihood import Row, Scored, spaced
from compress.eval.metrics import Rows, metric
from compress.eval.tasks import RIGHT_OR_WRONG, Task


@dataclass(frozen=True)
class Answer:
    """What a model said.

    text: what it wrote; of a choice, the one that it found likeliest by the task's first metric; of
    a cloze, the likeliest tokens in the place of the right ones; of a text that was read, nothing.
    likelihoods: log-likelihoods in nats: of each choice, of the continuation, of the text.
    tokens: of the continuation or text. greedy: whether the continuation is the likeliest.
    """

    id: str
    text: str = ""
    likelihoods: tuple[float, ...] = ()
    tokens: int = 0
    greedy: bool = False


def fitting(
    task: Task, items: list[Item], tokenizer: PreTrainedTokenizerBase, context: int
) -> list[Item]:
    """The items that a model with a context of this many tokens can be asked and can answer."""
    if task.kind == "perplexity":  # read in windows
        return items

    def needed(item: Item) -> int:
        answers = item.choices or (item.references if task.kind == "cloze" else ())
        longest = max((_tokens(a, tokenizer) for a in answers), default=task.max_new_tokens)
        return _tokens(as_asked(task, item, tokenizer), tokenizer) + longest

    return [item for item in items if needed(item) <= context]


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(text, verbose=False).input_ids)


@dataclass(frozen=True)
class Asked:
    """A model with what it takes to ask it; `kv_cache` as in compress.runtime.cache."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    kv_cache: str = "16"

    @property
    def options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "kv_cache": self.kv_cache}


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
    who = Asked(model, tokenizer, batch_size, kv_cache)
    match task.kind:
        case "choice":
            return _choose(who, task, items)
        case "cloze":
            return _fill(who, task, items)
        case "perplexity":
            return _read(who, task, items)
    return _write(who, task, items)


def encoded(task: Task, items: list[Item], tokenizer: PreTrainedTokenizerBase) -> list[list[Row]]:
    """For each item of a choice or a cloze, its prompt with each of its choices, or with the
    continuation.
    """
    found = []
    for item in items:
        prompt = as_asked(task, item, tokenizer)
        answers = item.choices or item.references
        found.append([likelihood.encode(prompt, spaced(prompt, a), tokenizer) for a in answers])
    return found


def right(task: Task, items: list[Item], scored: list[list[Scored]]) -> list[bool]:
    """Whether each item of a choice or a cloze is answered rightly, by the task's first metric, one
    by which answers are right or wrong. scored: how the model found what `encoded` gave.
    """
    answers = [
        Answer(item.id, "", tuple(one.total for one in ones), greedy=ones[0].greedy)
        for item, ones in zip(items, scored, strict=True)
    ]
    return [bool(row[0]) for row in _rows(task.metrics[0], task, items, answers)]


def _choose(who: Asked, task: Task, items: list[Item]) -> list[Answer]:
    rows = encoded(task, items, who.tokenizer)
    every = multiple_choice.scored_items(who.model, rows, **who.options)
    found = [tuple(one.total for one in of_item) for of_item in every]
    return [
        Answer(item.id, _picked(task.metrics[0], item, row), row)
        for item, row in zip(items, found, strict=True)
    ]


def _picked(name: str, item: Item, likelihoods: tuple[float, ...]) -> str:
    """The likeliest choice; by `normalized_accuracy`, by nats a character.

    As lm-evaluation-harness's acc_norm: long choices are not at a loss, and unlike tokens,
    characters mean the same to any tokenizer. Nothing where a likelihood is not a number.
    """
    if any(map(isnan, likelihoods)):
        return ""
    lengths = [len(choice) if name == "normalized_accuracy" else 1 for choice in item.choices]
    scores = [total / length for total, length in zip(likelihoods, lengths, strict=True)]
    return item.choices[scores.index(max(scores))]


def _fill(who: Asked, task: Task, items: list[Item]) -> list[Answer]:
    rows = [row for (row,) in encoded(task, items, who.tokenizer)]
    return [
        Answer(
            item.id,
            str(who.tokenizer.decode(one.likeliest)).strip(),
            (one.total,),
            one.tokens,
            one.greedy,
        )
        for item, one in zip(items, likelihood.scored(who.model, rows, **who.options), strict=True)
    ]


def _read(who: Asked, task: Task, items: list[Item]) -> list[Answer]:
    rows = [likelihood.pieces(item.prompt, who.tokenizer, task.window) for item in items]
    every = [row for pieces in rows for row in pieces]
    found = iter(likelihood.scored(who.model, every, **who.options))
    answers = []
    for item, pieces in zip(items, rows, strict=True):
        of_item = [next(found) for _ in pieces]
        total = sum(one.total for one in of_item)
        answers.append(Answer(item.id, "", (total,), sum(one.tokens for one in of_item)))
    return answers


def _write(who: Asked, task: Task, items: list[Item]) -> list[Answer]:
    from compress.runtime.generate import generate

    prompts = [as_asked(task, item, who.tokenizer) for item in items]
    # Prompts of like length together, so that little of a batch is padding.
    order = sorted(range(len(prompts)), key=lambda i: _tokens(prompts[i], who.tokenizer))
    texts = generate(
        who.model,
        who.tokenizer,
        [prompts[i] for i in order],
        max_new_tokens=task.max_new_tokens,
        **who.options,
    )
    written = dict(zip(order, texts, strict=True))
    return [Answer(item.id, _trimmed(task, written[i])) for i, item in enumerate(items)]


def _trimmed(task: Task, text: str) -> str:
    # An answer cut at its longest may end inside a character of several tokens.
    text = text.strip().rstrip("\ufffd")
    return text.partition("\n")[0].strip() if task.first_line else text


def score(task: Task, items: list[Item], answers: list[Answer]) -> dict[str, Rows]:
    """By metric, what each answer adds to the score: rows [n, S] (see eval/metrics.py)."""
    return {name: _rows(name, task, items, answers) for name in task.metrics}


def _rows(name: str, task: Task, items: list[Item], answers: list[Answer]) -> Rows:
    pairs = list(zip(items, answers, strict=True))
    if name == "likelihood":
        return np.array([[a.likelihoods[0], a.tokens] for a in answers], dtype=np.float64)
    if task.kind == "choice":
        right = [_picked(name, i, a.likelihoods) in i.references for i, a in pairs]
    elif task.kind == "cloze":
        right = [answer.greedy and not isnan(answer.likelihoods[0]) for answer in answers]
    elif task.kind == "rules":
        right = [not rules.broken(item.rules, answer.text) for item, answer in pairs]
    else:
        accepted = [item.entities if name == "entities" else item.references for item in items]
        return metric(name).rows([answer.text for answer in answers], accepted)
    return np.array([[float(is_right), 1.0] for is_right in right])


def total(name: str) -> Callable[[Rows], float]:
    """What a sum of rows [S] by the metric `name` comes to, on the scale 0 to 100."""
    match name:
        case "likelihood":
            return _token_probability
        case "normalized_accuracy":
            return metric("accuracy").total
    return metric(name).total


def _token_probability(summed: Rows) -> float:
    """The geometric mean of the probability of a token, in percent: 100 over the perplexity.

    0 where a likelihood is not a number: a model that gives none finds nothing likely.
    """
    mean = summed[0] / summed[1]
    return 0.0 if isnan(mean) else 100 * exp(mean)


def each(name: str, rows: Rows) -> NDArray[np.float64]:
    """The score of every item by itself, [n], by the metric `name` from its rows [n, S]."""
    of = total(name)
    return np.array([of(row) for row in rows])


def compare(
    task: Task, items: list[Item], before: list[Answer], after: list[Answer], *, seed: int
) -> list[dict[str, Any]]:
    """A record for each of the task's metrics: both scores, the paired interval, the flips; and how
    many answers of each model have a likelihood that is not a number, which counts as wrong.
    """
    not_numbers = {
        when: sum(any(map(isnan, answer.likelihoods)) for answer in answers)
        for when, answers in (("before", before), ("after", after))
    }
    rows = [score(task, items, answers) for answers in (before, after)]
    records = []
    for name in task.metrics:
        of = total(name)
        old, new = (by_metric[name] for by_metric in rows)
        before_score, after_score = of(old.sum(0)), of(new.sum(0))
        difference = after_score - before_score
        low, high = statistics.score_interval(old, new, of, seed=seed)
        gained, lost = statistics.flips(each(name, old), each(name, new))
        records.append(
            {
                "name": task.name,
                "metric": name,
                "n": len(items),
                "before": before_score,
                "after": after_score,
                "ci95": [low, high],
                "gained": gained,
                "lost": lost,
                "p": statistics.mcnemar(gained, lost),
                "smallest_loss": _smallest_loss(name, old, gained, high - difference),
                "not_numbers": not_numbers,
            }
        )
    return records


def _smallest_loss(name: str, before: Rows, gained: int, reach: float) -> float | None:
    """The smallest loss, in points, that these items could have shown, from the original's rows.

    Of right and wrong answers by McNemar's test, of graded ones by the reach of their interval
    above the difference. None where it is more than the original scores.
    """
    if name in RIGHT_OR_WRONG:
        return statistics.smallest_loss(len(before), gained, int(before[:, 0].sum()))
    return statistics.smallest_reach(len(before), total(name)(before.sum(0)), reach)
