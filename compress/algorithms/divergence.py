"""Divergences of a student from its teacher, in nats a position, averaged over positions.

p, q: log-probabilities [..., C] of the teacher and of the student over the same classes. All are
0 where the two agree and above 0 elsewhere. A temperature is applied before, by `soften`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def soften(log_probabilities: Tensor, temperature: float) -> Tensor:
    """The distribution at a temperature: above 1 flatter, below 1 sharper (Hinton et al. 2015,
    arXiv:1503.02531). Where some classes are merged it acts on what is merged.
    """
    return (log_probabilities / temperature).log_softmax(-1)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(teacher || student): the student covers all that the teacher may say."""
    return _mean(F.kl_div(q, p, log_target=True, reduction="none"))


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(student || teacher): the student avoids what the teacher would not say (MiniLLM, Gu et
    al. 2024, arXiv:2306.08543).
    """
    return _mean(F.kl_div(p, q, log_target=True, reduction="none"))


def jensen_shannon(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence, 0 < beta < 1 the teacher's share of the mixture m:
    beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    Agarwal et al. 2024 (GKD, arXiv:2306.13649), equation 1. Divided by beta it tends to the
    forward KL as beta does to 0, and by 1 - beta to the reverse KL as beta does to 1. It is at
    most the entropy of (beta, 1 - beta).
    """
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * forward_kl(p, mixture) + (1 - beta) * forward_kl(q, mixture)


def _mean(terms: Tensor) -> Tensor:
    """Terms [..., C] summed over classes and averaged over positions."""
    return terms.sum(-1).mean()
