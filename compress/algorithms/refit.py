"""A linear fitted again by least squares, so that it makes up for what was cut out behind it.

ReplaceMe (Shopkhoev et al. 2025, arXiv:2505.02819) merges into one linear what best stands for the
blocks that are left out; here the linear's own weight is what is fitted, held to what it was.
"""

import torch
from torch import Tensor

DAMPINGS = 0.01, 0.1, 1.0
"""By which a channel is held to its weight, relative to its own mean square."""


class Sums:
    """What a linear gets and lacks, summed over tokens: all that its new weight depends on.

    Of inputs a [t, K] and of what its outputs should be above what they are, e [t, N]:
    gram = sum of a a^T [K, K], cross = sum of e a^T [N, K], float32.
    """

    def __init__(self, weight: Tensor) -> None:
        n, k = weight.shape
        self.gram = torch.zeros(k, k, device=weight.device)
        self.cross = torch.zeros(n, k, device=weight.device)

    def add(self, inputs: Tensor, lacking: Tensor, weights: Tensor) -> None:
        """Count tokens [..., K], [..., N], each as often as its weight [..., 1] says."""
        a, e, w = (tensor.float().flatten(0, -2) for tensor in (inputs, lacking, weights))
        weighted = a * w
        self.gram += weighted.T @ a
        self.cross += e.T @ weighted

    def gain(self, moved: Tensor) -> float:
        """By how much less is lacking, in squares, where the weight moves by `moved` [N, K]."""
        return float(2 * (self.cross * moved).sum() - (moved @ self.gram * moved).sum())


def refit(weight: Tensor, seen: Sums, unseen: Sums) -> Tensor:
    """The weight [N, K], float32, whose outputs lack least of what was `seen`, in weighted mean
    square, by that of DAMPINGS which also lacks least of what was `unseen`; as it was, where all
    lack more there.
    """
    tried = [_moved(seen, damping) for damping in DAMPINGS]
    best = max(tried, key=unseen.gain)
    return weight.float() + best if unseen.gain(best) > 0 else weight.float()


def _moved(sums: Sums, damping: float) -> Tensor:
    """By how much the weight moves. Each input channel is held to what it was by `damping` times
    its own mean square, so that its scale changes nothing (Marquardt 1963); one that was never seen
    stays.
    """
    gram = sums.gram.double()
    own = gram.diagonal()
    gram.diagonal().add_(damping * own + torch.where(own > 0, 0.0, 1.0))
    factor = torch.linalg.cholesky(gram)
    return torch.cholesky_solve(sums.cross.double().T, factor).T.float()
