"""Which step of a training is kept: none at which a task has fallen by more than chance.

Right: by task, whether each of its items was answered rightly, in their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from compress.eval.statistics import mcnemar

Right = dict[str, list[bool]]

LEVEL = 0.05
"""Of McNemar's exact test, two-sided, on the items whose answer changed since the start."""


def score(right: Sequence[bool]) -> float:
    """The share of right answers, 0 to 100."""
    return 100 * (sum(right) / len(right))


def falls(start: Mapping[str, Sequence[bool]], now: Right) -> list[dict[str, Any]]:
    """The tasks that lost more answers since the start than they gained, and more than chance: for
    each its name (`task`), its scores `before` and `after`, 0 to 100, and the test's `p`.
    """
    found = []
    for name, after in now.items():
        before = start[name]
        changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        lost = sum(old for old, _ in changed)
        gained = len(changed) - lost
        p = mcnemar(gained, lost)
        if lost > gained and p <= LEVEL:
            found.append({"task": name, "before": score(before), "after": score(after), "p": p})
    return found


def words(fall: Mapping[str, Any]) -> str:
    """`knowledge fell from 56.1 to 41.2 (p 0.01)`."""
    before, after, p = fall["before"], fall["after"], fall["p"]
    return f"{fall['task']} fell from {before:.1f} to {after:.1f} (p {p:.2g})"
