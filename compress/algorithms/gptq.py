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
TOGETHER = 1024
"""Output channels, or rows of a Hessian, that are worked on at a time: 45 MB at K = 11008."""
SOLVED = 256
"""Triangular matrices of fewer than twice as many rows are inverted whole, not by halves."""
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

    With the channels in reverse, H = U U^T for an upper U, and the factor of H^-1 = U^-T U^-1 is
    U^-1: one Cholesky and one triangular inverse instead of two and a whole inverse.

    `hessian` is used up: two matrices of its size are in memory, and a quarter of one while the
    triangle is inverted. At K = 11008 each takes 485 MB.
    """
    hessian = hessian.float()
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    mean = float(diagonal.mean().clamp_min(1e-12))
    diagonal = diagonal[order]
    _reorder(hessian, order.flip(0))
    lower = torch.empty_like(hessian).mT  # by columns, so that LAPACK works in place
    failed = torch.empty((), dtype=torch.int32, device=hessian.device)
    damping = DAMPING
    while damping <= MOST_DAMPING:
        hessian.diagonal().copy_(diagonal.flip(0) + damping * mean)
        torch.linalg.cholesky_ex(hessian, out=(lower, failed))
        if not failed:
            _invert_lower(lower)
            if bool(torch.isfinite(torch.stack(lower.mT.aminmax())).all()):
                return Factor(_reversed(lower, hessian), order, damping)
        damping *= 10
    raise ValueError(f"Hessian not positive definite with damping {MOST_DAMPING}")


def _invert_lower(lower: Tensor) -> None:
    """Put the inverse of a lower triangular matrix [K, K] in its place.

    By halves, which leaves all but the smallest of the work to products of large matrices, and
    needs a quarter of the matrix beside it, and some slices.
    """
    half = len(lower) // 2
    if half < SOLVED:
        one = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, one, upper=False))
        return
    first, across, second = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    for part in across.split(TOGETHER, dim=1):
        part.copy_(torch.linalg.solve_triangular(second, part, upper=False).neg_())
    for part in across.split(TOGETHER):
        part.copy_(torch.linalg.solve_triangular(first, part, upper=False, left=False))
    _invert_lower(first)
    _invert_lower(second)


def _reversed(matrix: Tensor, out: Tensor) -> Tensor:
    """The rows and columns of `matrix` [K, K] from last to first, in `out`."""
    first = 0
    for rows in reversed(matrix.split(TOGETHER)):
        out[first : first + len(rows)] = rows.flip(0, 1)
        first += len(rows)
    return out


def _reorder(matrix: Tensor, order: Tensor) -> None:
    """Put the rows and columns of `matrix` [K, K] in `order`, in place."""
    for rows in matrix.split(TOGETHER):
        rows.copy_(rows[:, order])
    for columns in matrix.split(TOGETHER, dim=1):
        columns.copy_(columns[order])


def gptq(
    weight: Tensor,
    found: Factor,
    spec: QuantSpec,
    dtype: torch.dtype,
    clip: Tensor | float = 1.0,
) -> QTensor:
    """Round `weight` [N, K] so that |X (W - Q)^T|^2 is small, X being what `found` was made from.

    clip: a number, or [N, G], see `rtn.search_clip`. Scales are stored in `dtype`, and every
    error is that of the stored scale.
    """
    scales = stored_scales(weight, spec, dtype, clip)
    # A GPU has room for all, and would wait for the start of a kernel at each column of each part.
    together = TOGETHER if weight.device.type == "cpu" else len(weight)
    parts = zip(weight.split(together), scales.split(together), strict=True)
    ints = torch.cat([_by_columns(part, scale, found, spec) for part, scale in parts])
    return QTensor(ints, scales, spec)


def _by_columns(weight: Tensor, scales: Tensor, found: Factor, spec: QuantSpec) -> Tensor:
    """Integers [n, K] of some output channels."""
    n, k = weight.shape
    # Transposed, so that a column of the weight is a run of memory: docs/log.md has times.
    rest = weight.float().T[found.order]
    each = scales.float().T.contiguous()
    group = (found.order // (k // scales.shape[1])).tolist()
    ints = torch.empty(k, n, dtype=torch.int8, device=weight.device)
    for first in range(0, k, BLOCK):
        last = min(first + BLOCK, k)
        upper, block = found.upper[first:last, first:last], rest[first:last]
        errors = torch.empty_like(block)
        for column, value in enumerate(block):
            scale = each[group[first + column]]
            rounded = torch.round(value / scale).clamp_(spec.qmin, spec.qmax)
            ints[first + column] = rounded
            errors[column] = (value - rounded * scale) / upper[column, column]
            block[column + 1 :] -= upper[column, column + 1 :].unsqueeze(1) * errors[column]
        rest[last:] -= found.upper[first:last, last:].T @ errors
    return ints[torch.argsort(found.order)].T
