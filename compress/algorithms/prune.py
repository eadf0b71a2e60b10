"""Which blocks, MLP channels and KV groups a model misses least.

Blocks are left out one after the other by what the model then says (SLEB, Song et al. 2024,
arXiv:2402.09025), channels and groups by how much of the residual stream they make (Minitron,
Muralidharan et al. 2024, arXiv:2407.14679, and FLAP, An et al. 2024, arXiv:2312.11983).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Removal:
    """A block that was left out, and the cost of all that were left out by then."""

    block: int
    cost: float


def lazy_greedy(
    blocks: Sequence[int], count: int, cost_of: Callable[[tuple[int, ...]], float]
) -> list[Removal]:
    """`count` of `blocks` to leave out, each time the one without which the cost is least.

    cost_of(blocks left out, in order): lower is better. What a block costs grows as others are
    left out before it, so its last known cost stands for it until it is the least of all (Minoux
    1978, Accelerated greedy algorithms): where that holds, the choice is that of trying all blocks
    each time, and of SmolLM2's 30 blocks 10 are found by 147 trials in place of 255.
    """
    known = [(cost_of((block,)), block, 0) for block in blocks]
    heapq.heapify(known)
    removed: list[Removal] = []
    while len(removed) < count:
        cost, block, when = heapq.heappop(known)
        if when == len(removed):
            removed.append(Removal(block, cost))
            continue
        others = (*(removal.block for removal in removed), block)
        heapq.heappush(known, (cost_of(tuple(sorted(others))), block, len(removed)))
    return removed


def channel_importance(mean_square: Tensor, weight: Tensor) -> Tensor:
    """Of each input channel of a linear [K]: the mean square of what it adds to the output.

    mean_square [K]: of the channel's values. weight [N, K].
    """
    return mean_square * weight.float().square().sum(0)


def group_importance(mean_square: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Of each KV group [G] (its query heads together): the same for the output projection, its
    channels [K] counted as if they were independent.
    """
    return channel_importance(mean_square, weight).view(groups, -1).sum(1)


def most_important(importance: Tensor, count: int) -> list[int]:
    """The numbers of the `count` largest, in their order."""
    return sorted(importance.topk(count).indices.tolist())
