"""GPTQ: round a column at a time, and let the columns to come make up for each error.

Frantar et al. 2022 (arXiv:2210.17323), with static activation order: columns are taken from the
most to the least active, while groups and their scales stay those of the original order, so that
engines need no group index.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.algorithms.rtn import stored_scales
from compress.qtensor import QTensor, QuantSpec

BLOCK = 128
DAMPING = 0.01
MOST_DAMPING = 10.0


@dataclass(frozen=True)
class Factor:
    """Upper Cholesky factor [K, K] of the inverse Hessian, its columns in `order` [K].

    damping: what was added to the diagonal, as a share of its mean.
    """

    upper: Tensor
    order: Tensor
    damping: float


def factor(hessian: Tensor) -> Factor:
    """Factor a Hessian X^T X [K, K] once for all the weights that read the same inputs.

    A channel that was never active counts as any other. The damping grows tenfold until the
    factorization succeeds. Raises ValueError where it does not at MOST_DAMPING.
    """
    hessian = hessian.float()
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    sorted_hessian = hessian[order][:, order]
    mean = float(diagonal.mean().clamp_min(1e-12))
    damping = DAMPING
    while damping <= MOST_DAMPING:
        damped = sorted_hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return Factor(upper, order, damping)
        damping *= 10
    raise ValueError(f"Hessian not positive definite with damping {MOST_DAMPING}")


def gptq(
    weight: Tensor,
    found: Factor,
    spec: QuantSpec,
    dtype: torch.dtype,
    clip: Tensor | float = 1.0,
) -> tuple[QTensor, Tensor]:
    """Round `weight` [N, K] so that |X (W - Q)^T|^2 is small, X being what `found` was made from.

    clip: a number, or [N, G], see `rtn.search_clip`. Scales are stored in `dtype`, and every
    error is that of the stored scale. Returns, beside the rounded weight, what each weight had
    become when its turn came, [N, K]: the rounded weight is that, rounded to nearest.
    """
    n, k = weight.shape
    scales = stored_scales(weight, spec, dtype, clip)
    each = scales.float().repeat_interleave(k // scales.shape[1], dim=1)[:, found.order]
    rest = weight.float()[:, found.order].clone()
    before, ints = torch.empty_like(rest), torch.empty_like(rest)
    for first in range(0, k, BLOCK):
        last = min(first + BLOCK, k)
        upper = found.upper[first:last, first:last]
        errors = torch.empty(n, last - first, device=weight.device)
        for column in range(last - first):
            value, scale = rest[:, first + column].clone(), each[:, first + column]
            before[:, first + column] = value
            rounded = torch.round(value / scale).clamp_(spec.qmin, spec.qmax)
            ints[:, first + column] = rounded
            error = (value - rounded * scale) / upper[column, column]
            rest[:, first + column : last] -= error.unsqueeze(1) * upper[column, column:]
            errors[:, column] = error
        rest[:, last:] -= errors @ found.upper[first:last, last:]
    back = torch.argsort(found.order)
    return QTensor(ints[:, back].to(torch.int8), scales, spec), before[:, back]
