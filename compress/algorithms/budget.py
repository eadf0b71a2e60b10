"""Which format for which layer, so that the whole fits a budget and is disturbed least.

A multiple-choice knapsack (Kellerer, Pferschy and Pisinger 2004, Knapsack Problems, chapter 11): of
each group of layers one option is taken, their sizes together are at most the budget, and the sum
of their costs is least. That costs add up is an assumption: it holds to first order in small
disturbances, and says nothing of errors that cancel or feed each other from layer to layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STATES = 1 << 16
"""Partial choices that are kept from one group to the next."""


@dataclass(frozen=True)
class Option:
    """One format for one group of layers. size: in bytes. cost: KL alone, in nats a token."""

    size: int
    cost: float


def assign(options: Sequence[Sequence[Option]], budget: int, states: int = STATES) -> list[int]:
    """For each group the number of the option to take: the least cost in all, in `budget` bytes.

    By dynamic programming over the groups, keeping of all partial choices those that no other beats
    in both size and cost: exact while these are at most `states`. Above, the range of sizes is cut
    into as many equal parts, and the best of each goes on, with the size that it has; so the result
    is never over the budget, and with G groups it costs no more than the best of a budget smaller
    by G parts. Nothing but the last step looks at the budget, and a larger one never costs more.

    Raises ValueError where the smallest options together are over the budget, and for a cost that
    is not finite, by its group and option.
    """
    for number, group in enumerate(options):
        for place, option in enumerate(group):
            if not math.isfinite(option.cost):
                raise ValueError(f"group {number}, option {place}: its cost is {option.cost}")
    least = sum(min(option.size for option in group) for group in options)
    if least > budget:
        raise ValueError(f"the smallest choice takes {least} bytes, and {budget} are there")
    sizes, costs = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for group in options:
        added = np.array([option.size for option in group], np.int64)
        worse = np.array([option.cost for option in group], np.float64)
        all_sizes = (sizes[:, None] + added).ravel()
        all_costs = (costs[:, None] + worse).ravel()
        kept = _unbeaten(all_sizes, all_costs, states)
        sizes, costs = all_sizes[kept], all_costs[kept]
        steps.append((kept // len(group), kept % len(group)))
    state = int(np.searchsorted(sizes, budget, side="right")) - 1
    chosen = []
    for came_from, took in reversed(steps):
        chosen.append(int(took[state]))
        state = int(came_from[state])
    return chosen[::-1]


def _unbeaten(sizes: NDArray[np.int64], costs: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Numbers of the entries that cost less than all smaller ones, by size; at most `most` + 1."""
    order = np.lexsort((costs, sizes))
    ordered = costs[order]
    before = np.minimum.accumulate(np.concatenate([[np.inf], ordered[:-1]]))
    order = order[ordered < before]
    if len(order) <= most:
        return order
    span = sizes[order[-1]] - sizes[order[0]]
    part = (sizes[order] - sizes[order[0]]) * most // (span + 1)
    best_of_part = np.append(part[1:] != part[:-1], True)  # costs fall: the last of each
    best_of_part[0] = True  # the smallest of all always goes on, or a tight budget would fail
    return order[best_of_part]
