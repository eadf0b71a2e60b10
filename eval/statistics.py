"""Is a difference between two models more than chance? Paired, since both answer the same items.

Shapes: n items, S numbers an item (see eval/metrics.py), B resamples.
"""

from collections.abc import Callable
from math import comb, exp, lgamma, log, log1p

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]


def paired_interval(
    before: Rows,
    after: Rows,
    total: Callable[[Rows], float],
    *,
    seed: int,
    resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Bootstrap interval of total(after) - total(before), from rows [n, S] of the same n items.

    Items are resampled with replacement, the same ones for both models, and the percentiles of the
    difference are taken (Efron and Tibshirani, 1993, chapter 13; Koehn, 2004, for BLEU). With few
    items it is too narrow, and where no item differs it is [0, 0].
    """
    if before.shape != after.shape or not len(before):
        raise ValueError(
            f"rows {before.shape} and {after.shape}; wanted the same items, at least 1"
        )
    draws = np.random.default_rng(seed).integers(len(before), size=(resamples, len(before)))
    differences = [total(after[i].sum(0)) - total(before[i].sum(0)) for i in draws]
    return _percentiles(differences, level)


def score_interval(
    before: Rows, after: Rows, total: Callable[[Rows], float], *, seed: int
) -> tuple[float, float]:
    """`paired_interval` of scores from 0 to 100. One item, which resampling only repeats, leaves
    every difference possible.
    """
    if len(before) == 1:
        score = total(before[0])
        return -score, 100 - score
    return paired_interval(before, after, total, seed=seed)


def mean_interval(
    values: Rows, *, seed: int, resamples: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of the mean of `values` [n], by percentiles."""
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return _percentiles(values[draws].mean(1), level)


def _percentiles(values: list[float] | Rows, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def flips(before: Rows, after: Rows) -> tuple[int, int]:
    """(gained, lost): items whose score [n] rose, and items whose score fell.

    Equal averages can hide many changed answers (Dutta et al., 2024, arXiv:2407.09141).
    """
    return int((after > before).sum()), int((after < before).sum())


def smallest_loss(items: int, gained: int, right: int, level: float = 0.05) -> float | None:
    """The smallest loss, in points of 100, that so many items could have shown.

    As many answers lost as make McNemar's test call it more than chance, given that `gained` were
    gained; None where that is more than the original had `right`, which are all it can lose.
    """
    lost = gained
    while lost <= right:
        if mcnemar(gained, lost) <= level:
            return 100 * (lost - gained) / items
        lost += 1
    return None


def smallest_reach(items: int, before: float, reach: float) -> float | None:
    """The same of graded answers: the reach of their interval above the difference, by which that
    has to be below zero. None where nothing differs, and of so few items that McNemar's test calls
    it chance when all get worse.
    """
    return reach if mcnemar(0, items) <= 0.05 and 0 < reach <= before else None


def largest_loss(items: int, gained: int, lost: int, level: float = 0.95) -> float:
    """The largest loss, in points of 100, that so many answers gained and lost do not rule out.

    The upper bound of the share lost less the lower bound of the share gained (`_share_at_most`),
    each missed half as often as `level` allows, so that both hold at `level` whatever the truth
    (Bonferroni). Exact for any number of items, and cautious.
    """
    miss = (1 - level) / 2
    gained_at_least = 1 - _share_at_most(items, items - gained, miss)
    return 100 * max(0.0, _share_at_most(items, lost, miss) - gained_at_least)


def _share_at_most(items: int, found: int, miss: float) -> float:
    """The upper bound of a share of which `found` of `items` were found (Clopper and Pearson, 1934,
    Biometrika 26): with a larger one, so few are found less often than `miss`.
    """
    if found == items:
        return 1.0
    ways = [lgamma(items + 1) - lgamma(k + 1) - lgamma(items - k + 1) for k in range(found + 1)]
    low, high = found / items, 1.0
    for _ in range(40):
        share = (low + high) / 2
        chance = sum(
            exp(way + k * log(share) + (items - k) * log1p(-share)) for k, way in enumerate(ways)
        )
        low, high = (share, high) if chance > miss else (low, share)
    return high


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value of McNemar's test: were gains and losses equally likely?

    The binomial tail of `min(gained, lost)` out of `gained + lost` at 1/2, doubled; on graded
    scores it is the sign test.
    """
    changed = gained + lost
    tail = sum(comb(changed, k) for k in range(min(gained, lost) + 1))
    # Integers until the last step: 2 ** -changed underflows beyond a thousand items.
    return min(1.0, 2 * tail / 2**changed)
