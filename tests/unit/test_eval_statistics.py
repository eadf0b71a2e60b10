"""Intervals cover what they should, and p-values equal binomial tails counted by hand."""

import numpy as np
import pytest

from compress.eval.statistics import (
    flips,
    largest_loss,
    mcnemar,
    mean_interval,
    paired_interval,
    smallest_loss,
    smallest_reach,
)


def mean(summed):
    return summed[0] / summed[1]


def rows(values):
    return np.column_stack([values, np.ones(len(values))])


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (1, 1, 1.0),
        (0, 5, 2 / 32),
        (5, 0, 2 / 32),
        (1, 6, 2 * (1 + 7) / 128),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (3, 4, 1.0),
    ],
)
def test_mcnemar_is_twice_the_binomial_tail(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p)


@pytest.mark.parametrize(
    ("items", "before", "reach", "points"),
    [(5, 40.0, 4.0, None), (6, 40.0, 4.0, 4.0), (6, 3.0, 4.0, None), (6, 40.0, 0.0, None)],
)
def test_grades_of_fewer_items_than_the_exact_test_needs_show_no_loss(items, before, reach, points):
    assert smallest_reach(items, before, reach) == points


@pytest.mark.parametrize(
    ("items", "gained", "right", "points"),
    [
        (100, 0, 50, 6.0),  # 6 lost of 6 changed: 2 / 2^6 = 0.03; of 5, 0.06
        (50, 0, 50, 12.0),
        (100, 1, 8, 7.0),  # 8 of 9: 2 * (1 + 9) / 2^9 = 0.04
        (100, 1, 7, None),  # those 8 are more than were right
        (100, 0, 0, None),
        (5, 0, 5, None),
        (10, 4, 6, None),
    ],
)
def test_the_smallest_loss_is_the_first_that_mcnemar_calls(items, gained, right, points):
    found = smallest_loss(items, gained, right)
    assert found == (None if points is None else pytest.approx(points))
    if points:
        lost = round(gained + points * items / 100)
        assert mcnemar(gained, lost) <= 0.05 < mcnemar(gained, lost - 1)


@pytest.mark.parametrize(
    ("items", "gained", "lost", "points"),
    [
        (98, 0, 0, 3.694),  # 1 - 0.025^(1 / 98)
        (98, 6, 0, 1.414),
        (98, 6, 1, 3.275),  # 5.55, the bound of 1 of 98 lost, less 2.28, that of 6 gained
        (10, 2, 0, 28.328),
        (10, 4, 1, 32.347),
        (10, 0, 10, 100.0),
        (10, 10, 0, 0.0),
        (10000, 500, 500, 0.864),
    ],
)
def test_the_largest_loss_by_the_bounds_of_clopper_and_pearson(items, gained, lost, points):
    assert largest_loss(items, gained, lost) == pytest.approx(points, abs=1e-3)


def test_the_largest_loss_grows_with_what_is_lost_and_falls_with_what_is_gained():
    items = 12
    found = {
        (gained, lost): largest_loss(items, gained, lost)
        for gained in range(items + 1)
        for lost in range(items + 1 - gained)
    }
    for (gained, lost), loss in found.items():
        assert loss >= max(0.0, 100 * (lost - gained) / items)
        assert loss >= found.get((gained + 1, lost), 0.0)
        assert loss <= found.get((gained, lost + 1), 100.0)


def test_the_largest_loss_is_missed_at_most_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for gain, loss in ((0.0, 0.05), (0.1, 0.1), (0.05, 0.3), (0.02, 0.03)):
        draws = rng.multinomial(40, [gain, loss, 1 - gain - loss], size=300)
        missed = sum(largest_loss(40, g, n) < 100 * (loss - gain) for g, n, _ in draws.tolist())
        assert missed <= 0.05 * 300


def test_mcnemar_of_thousands_does_not_underflow():
    assert 0 < mcnemar(1000, 1200) < 1e-4


def test_flips_count_each_way():
    before, after = np.array([0.0, 1, 1, 0, 0.5]), np.array([1.0, 0, 0, 0, 0.75])
    assert flips(before, after) == (2, 2)


def test_interval_of_no_difference_is_a_point():
    same = rows(np.arange(10.0))
    assert paired_interval(same, same, mean, seed=0) == (0.0, 0.0)


def test_interval_of_a_constant_difference_is_a_point():
    values = np.arange(10.0)
    low, high = paired_interval(rows(values), rows(values + 0.5), mean, seed=0)
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_interval_is_the_same_for_the_same_seed():
    rng = np.random.default_rng(1)
    before, after = rows(rng.random(30)), rows(rng.random(30))
    one, two = (paired_interval(before, after, mean, seed=3) for _ in range(2))
    assert one == two
    assert one != paired_interval(before, after, mean, seed=4)


def test_interval_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth, covered = 0.3, 0
    for seed in range(200):
        shared = rng.normal(size=40)
        before = shared + rng.normal(scale=0.5, size=40)
        after = shared + truth + rng.normal(scale=0.5, size=40)
        low, high = paired_interval(rows(before), rows(after), mean, seed=seed, resamples=300)
        covered += low <= truth <= high
    # 95% of 200 is 190, with a standard deviation of 3; few items make it narrow by a few percent.
    assert 178 <= covered <= 198


def test_pairing_takes_away_what_both_share():
    rng = np.random.default_rng(0)
    shared = rng.normal(scale=10, size=50)
    low, high = paired_interval(rows(shared), rows(shared + 0.1), mean, seed=0)
    assert high - low < 1e-9
    low, high = mean_interval(shared, seed=0)
    assert 2 < high - low < 8


def test_different_items_are_refused():
    with pytest.raises(ValueError, match="wanted the same items"):
        paired_interval(rows(np.ones(3)), rows(np.ones(4)), mean, seed=0)
