"""What goes first: lazily found removals, and the importance of channels and groups."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from compress.algorithms.prune import (
    channel_importance,
    group_importance,
    lazy_greedy,
    most_important,
)

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=3, max_size=9, unique=True)


@given(WEIGHTS, st.data())
def test_lazily_found_removals_are_those_of_trying_all(
    weights: list[float], data: st.DataObject
) -> None:
    """Where every block costs more the more are gone."""
    count = data.draw(st.integers(0, len(weights) - 1))
    pairs = data.draw(st.lists(st.floats(0, 3), min_size=81, max_size=81))

    def cost(removed: tuple[int, ...]) -> float:
        together = sum(pairs[9 * a + b] for a in removed for b in removed if a < b)
        return sum(weights[block] for block in removed) + together

    wanted: list[tuple[int, ...]] = [()]
    for _ in range(count):
        left = [b for b in range(len(weights)) if b not in wanted[-1]]
        wanted.append(min((tuple(sorted((*wanted[-1], b))) for b in left), key=cost))
    found = lazy_greedy(range(len(weights)), count, cost)
    for step, removal in enumerate(found, 1):
        assert tuple(sorted(r.block for r in found[:step])) == wanted[step]
        assert removal.cost == cost(wanted[step])


def test_blocks_that_are_never_the_cheapest_are_tried_once() -> None:
    tried: list[tuple[int, ...]] = []

    def cost(removed: tuple[int, ...]) -> float:
        tried.append(removed)
        return sum(10.0**block for block in removed)

    assert [removal.block for removal in lazy_greedy(range(6), 3, cost)] == [0, 1, 2]
    assert len(tried) == 6 + 2
    assert sorted(tried[6:]) == [(0, 1), (0, 1, 2)]


def test_a_channel_s_importance_is_what_the_output_loses_with_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 6, generator=generator), torch.randn(4, 6, generator=generator)
    found = channel_importance(x.square().mean(0), weight)
    for channel in range(6):
        without = x.clone()
        without[:, channel] = 0
        lost = (F.linear(x, weight) - F.linear(without, weight)).square().sum(1).mean()
        torch.testing.assert_close(found[channel], lost)
    groups = group_importance(x.square().mean(0), weight, 2)
    torch.testing.assert_close(groups, torch.stack([found[:3].sum(), found[3:].sum()]))


def test_the_most_important_come_in_their_own_order() -> None:
    assert most_important(torch.tensor([0.1, 5.0, 0.3, 4.0, 0.2]), 3) == [1, 2, 3]
