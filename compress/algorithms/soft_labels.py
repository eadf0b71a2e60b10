"""What the teacher says of each token, kept small: its k likeliest tokens and the rest as one.

Hinton et al. 2015 (arXiv:1503.02531); the remaining mass as one more class keeps the divergence
a true one, which top-k alone is not.
"""

import torch
from torch import Tensor

LEAST_MASS = 1e-6


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [..., V] the k likeliest tokens of each position: ids int32 [..., k], their
    probabilities float16 [..., k], and the remaining mass float16 [...].

    The mass is kept by itself: 1 - the sum of rounded probabilities is off by up to 0.0005, where
    the mass itself is often less.
    """
    probabilities = logits.float().softmax(-1)
    kept = probabilities.topk(min(k, logits.shape[-1]), dim=-1)
    rest = (1 - kept.values.double().sum(-1)).clamp_min(0)
    return kept.indices.to(torch.int32), kept.values.half(), rest.half()


def teacher_log_probabilities(probabilities: Tensor, rest: Tensor) -> Tensor:
    """Log-probabilities [..., k + 1] of the kept tokens and the rest, in float32, that sum to 1.

    probabilities [..., k] and rest [...] are those of `top_k`. A mass below LEAST_MASS, to which
    float16 rounds it or below which the student's cannot be told from 0, counts as that.
    """
    classes = torch.cat([probabilities.float(), rest.float().unsqueeze(-1)], -1)
    return classes.clamp_min(LEAST_MASS).log().log_softmax(-1)


def student_log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [..., k + 1] that logits [..., V] give to the tokens `ids` [..., k] and to
    all others as one, in float32.

    Merging the rest into one class never raises a divergence (the log sum inequality), so that
    what is trained on is a lower bound of the full one.
    """
    kept = logits.float().log_softmax(-1).gather(-1, ids.long())
    mass = kept.exp().sum(-1, keepdim=True).clamp_max(1 - LEAST_MASS)
    return torch.cat([kept, torch.log1p(-mass)], -1)
