"""The assignment of formats to layers: exact on small cases, never over, monotone."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.algorithms.budget import Option, assign

OPTION = st.builds(Option, st.integers(1, 40), st.floats(0, 1))
GROUPS = st.lists(st.lists(OPTION, min_size=1, max_size=4), min_size=1, max_size=5)


def size(groups: list[list[Option]], chosen: list[int]) -> int:
    return sum(group[i].size for group, i in zip(groups, chosen, strict=True))


def cost(groups: list[list[Option]], chosen: list[int]) -> float:
    return sum(group[i].cost for group, i in zip(groups, chosen, strict=True))


def brute(groups: list[list[Option]], budget: int) -> float:
    every = itertools.product(*(range(len(group)) for group in groups))
    return min(cost(groups, list(c)) for c in every if size(groups, list(c)) <= budget)


def smallest(groups: list[list[Option]]) -> int:
    return sum(min(option.size for option in group) for group in groups)


@given(GROUPS, st.integers(0, 120))
def test_equals_the_best_of_all_combinations(groups: list[list[Option]], room: int) -> None:
    budget = smallest(groups) + room
    chosen = assign(groups, budget)
    assert size(groups, chosen) <= budget
    assert cost(groups, chosen) == pytest.approx(brute(groups, budget))


@given(GROUPS, st.integers(0, 60), st.integers(0, 60), st.sampled_from([2, 5, 1000]))
def test_more_room_never_costs_more(
    groups: list[list[Option]], room: int, more: int, states: int
) -> None:
    budget = smallest(groups) + room
    tight, wide = assign(groups, budget, states), assign(groups, budget + more, states)
    assert size(groups, tight) <= budget
    assert size(groups, wide) <= budget + more
    assert cost(groups, wide) <= cost(groups, tight) + 1e-12


def test_what_cannot_fit_is_said_with_the_least_that_can() -> None:
    groups = [[Option(5, 1.0), Option(9, 0.0)], [Option(7, 0.5)]]
    assert assign(groups, 12) == [0, 0]
    with pytest.raises(ValueError, match="the smallest choice takes 12 bytes, and 11 are there"):
        assign(groups, 11)


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_no_number_is_refused_by_its_place(cost: float) -> None:
    with pytest.raises(ValueError, match=f"group 1, option 0: its cost is {cost}"):
        assign([[Option(1, 0.5)], [Option(1, cost), Option(2, 0.0)]], 10)


def test_of_equal_costs_the_smaller_is_taken() -> None:
    assert assign([[Option(9, 0.1), Option(4, 0.1), Option(12, 0.1)]], 100) == [1]


def model_of(count: int) -> list[list[Option]]:
    """Groups as a model has them: errors fall by 4 a bit, and differ a hundredfold by layer."""
    draw = random.Random(3)
    groups = []
    for _ in range(count):
        weights, scale = draw.randrange(500_000, 3_000_000), draw.lognormvariate(0, 1.5)
        costs = [scale * 4**-bits * draw.uniform(0.8, 1.2) for bits in (4.25, 4.5, 8.03)]
        sizes = [int(weights * bits / 8) for bits in (4.25, 4.5, 8.03, 16)]
        groups.append([Option(s, c) for s, c in zip(sizes, [*costs, 0.0], strict=True)])
    return groups


@pytest.mark.parametrize("share", [0.27, 0.3, 0.5, 0.9])
def test_few_states_cost_no_more_than_a_slightly_smaller_budget(share: float) -> None:
    groups, states = model_of(24), 1 << 8
    whole = sum(group[3].size for group in groups)
    budget, parts = int(share * whole), len(groups) * (whole - smallest(groups)) // states
    coarse = assign(groups, budget, states)
    assert size(groups, coarse) <= budget
    exact = assign(groups, budget)
    assert cost(groups, exact) <= cost(groups, coarse)
    if budget - parts > smallest(groups):
        assert cost(groups, coarse) <= cost(groups, assign(groups, budget - parts)) + 1e-12


def test_beats_every_uniform_choice_of_the_same_size() -> None:
    groups = model_of(24)
    for number in range(3):
        uniform = [number] * len(groups)
        mixed = assign(groups, size(groups, uniform))
        assert size(groups, mixed) <= size(groups, uniform)
        assert cost(groups, mixed) < cost(groups, uniform) or number == 0
