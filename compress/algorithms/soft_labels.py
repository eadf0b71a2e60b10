"""What the teacher says of each token, kept small: its k likeliest tokens and the rest as one.

Hinton et al. 2015 (arXiv:1503.02531); the remaining mass as one more class keeps the divergence
a true one, which top-k alone is not.
"""

import torch
from torch import Tensor

LEAST_MASS = 1e-6


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each position: ids int32 and probabilities float16, [..., k].

    What they leave to 1 is the remaining mass.
    """
    probabilities = logits.float().softmax(-1)
    kept = probabilities.topk(min(k, logits.shape[-1]), dim=-1)
    return kept.indices.to(torch.int32), kept.values.half()


def kl_top_k(logits: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
    """KL(teacher || student) in nats a token, averaged, over k tokens and the remaining mass.

    logits: the student's, [..., V]. ids, probabilities: from `top_k`, [..., k]. Merging the rest
    into one class never raises a divergence, so this is a lower bound of the full one.
    """
    teacher = probabilities.float()
    rest = (1 - teacher.sum(-1)).clamp_min(LEAST_MASS)
    student = logits.float().log_softmax(-1).gather(-1, ids.long())
    student_rest = torch.log1p(-student.exp().sum(-1).clamp_max(1 - LEAST_MASS))
    inside = torch.xlogy(teacher, teacher) - teacher * student
    return (inside.sum(-1) + rest * (rest.log() - student_rest)).mean()
