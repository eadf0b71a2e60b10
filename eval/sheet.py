"""Outputs side by side, for a person to read: what the averages leave out."""

import random
from collections.abc import Callable
from math import inf, isnan
from typing import Any

from compress.eval import checks, rules
from compress.eval.answers import Answer, each, score
from compress.eval.items import Item
from compress.eval.tasks import Task
from compress.eval.text import units

PROMPT = 1000  # characters of a prompt that are shown


def side_by_side(
    task: Task, items: list[Item], before: list[Answer], after: list[Answer]
) -> list[dict[str, Any]]:
    """A record an item: the prompt, what is right, both answers and both scores (0 to 100).

    None of texts that were only read.
    """
    if task.kind == "perplexity":
        return []
    name = task.metrics[0]
    scores = [each(name, score(task, items, answers)[name]).tolist() for answers in (before, after)]
    return [
        {
            "task": task.name,
            "id": item.id,
            "prompt": _shown(item.prompt),
            "references": list(item.references),
            "before": old.text,
            "after": new.text,
            "metric": name,
            "score_before": old_score,
            "score_after": new_score,
            "broken_before": rules.broken(item.rules, old.text),
            "broken_after": rules.broken(item.rules, new.text),
        }
        for item, old, new, old_score, new_score in zip(items, before, after, *scores, strict=True)
    ]


def drift(task: Task, before: list[Answer], after: list[Answer]) -> list[dict[str, Any]]:
    """How what was written changed, whether right or not; a record, or none of what is not written.

    same: answers equal to the letter. length: mean words (Chinese: characters) an answer. loops:
    answers that repeat themselves.
    """
    if task.kind in ("choice", "cloze", "perplexity"):
        return []
    sides = {"before": [a.text for a in before], "after": [a.text for a in after]}
    return [
        {
            "name": task.name,
            "n": len(before),
            "same": sum(old == new for old, new in zip(*sides.values(), strict=True)),
            "length": {
                when: sum(len(units(text)) for text in texts) / len(texts)
                for when, texts in sides.items()
            },
            "loops": {
                when: sum(checks.loops(text) for text in texts) for when, texts in sides.items()
            },
        }
    ]


def _shown(prompt: str) -> str:
    """The prompt, or the two ends of one too long to read."""
    if len(prompt) <= PROMPT:
        return prompt
    cut = len(prompt) - PROMPT
    return f"{prompt[: PROMPT // 2]}\n[… {cut} characters …]\n{prompt[-PROMPT // 2 :]}"


def select(records: list[dict[str, Any]], count: int, *, seed: int) -> list[dict[str, Any]]:
    """What to show: every boundary case that failed, then `count` more, each with the reason why.

    A quarter of the `count` are those whose score changed most, a quarter those along whose answer
    the KL is largest (`kl`, see eval/written.py), and the others are drawn by chance.
    """
    failed = [r for r in records if r["task"] == "boundary" and _is_broken(r)]
    rest = [r for r in records if r not in failed]
    changed = _largest([r for r in rest if _difference(r)], _difference, count // 4)
    rest = [r for r in rest if r not in changed]
    parted = _largest([r for r in rest if r.get("kl") is not None], _divergence, count // 4)
    rest = [r for r in rest if r not in parted]
    left = min(count - len(changed) - len(parted), len(rest))
    return [
        {"why": why, **record}
        for why, chosen in (
            ("boundary case failed", failed),
            ("largest difference", changed),
            ("largest KL", parted),
            ("drawn by chance", random.Random(seed).sample(rest, left)),
        )
        for record in chosen
    ]


def _largest(
    records: list[dict[str, Any]], by: Callable[[dict[str, Any]], float], count: int
) -> list[dict[str, Any]]:
    return sorted(records, key=by, reverse=True)[:count]


def _is_broken(record: dict[str, Any]) -> bool:
    return bool(record["broken_before"] or record["broken_after"])


def _difference(record: dict[str, Any]) -> float:
    return abs(record["score_after"] - record["score_before"])


def _divergence(record: dict[str, Any]) -> float:
    """One that is not a number is the worst."""
    return inf if isnan(record["kl"]) else record["kl"]
