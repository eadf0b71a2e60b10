"""Round to nearest, with a searched clip: the ground that every other algorithm stands on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.qtensor import QTensor, QuantSpec, quantize

CLIPS = tuple(1.0 - 0.05 * step for step in range(11))  # 1.00, 0.95, ... 0.50
SMALLEST_SCALE = 1e-8
WEIGHTS = 1 << 20
"""Weights that a search rounds at a time: 4 MB in float32, which a CPU's cache holds."""


def scales_for(weight: Tensor, spec: QuantSpec, clip: Tensor | float = 1.0) -> Tensor:
    """Scales [N, G] that put the largest weight of each group, times `clip`, on the last integer.

    weight: [N, K]. clip: a number, or [N, G].
    """
    n, k = weight.shape
    largest = weight.float().reshape(n, spec.groups(k), -1).abs().amax(-1)
    return (largest * clip / spec.qmax).clamp_min(SMALLEST_SCALE)


def stored_scales(
    weight: Tensor, spec: QuantSpec, dtype: torch.dtype, clip: Tensor | float = 1.0
) -> Tensor:
    """`scales_for` as they are stored in `dtype`; at 4 bit with a sign.

    There are 8 steps below zero and 7 above. A negative scale, where the largest weight of a group
    is positive, gives that weight the longer side (as AutoRound does, arXiv:2309.05516).
    """
    # A scale that the dtype cannot hold would be 0, and every weight NaN.
    scales = scales_for(weight, spec, clip).to(dtype).clamp_min(torch.finfo(dtype).tiny)
    if spec.bits > 4:  # one step in 128 more is nothing
        return scales
    lowest, highest = weight.reshape(len(weight), scales.shape[1], -1).aminmax(dim=-1)
    return torch.where(highest > -lowest, -scales, scales)


def rtn(weight: Tensor, spec: QuantSpec, dtype: torch.dtype, clip: Tensor | float = 1.0) -> QTensor:
    """Round `weight` [N, K] to the nearest integer times scale; scales are stored in `dtype`."""
    scales = stored_scales(weight, spec, dtype, clip)
    return QTensor(quantize(weight, scales, spec), scales, spec)


def rounded(weight: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """What `rtn` leaves of `weight` [N, K], in float32."""
    found = torch.empty(weight.shape, device=weight.device)
    for part, into in zip(_parts(weight), _parts(found), strict=True):
        into.copy_(rtn(part, spec, dtype).dequantize())
    return found


def _parts(weight: Tensor) -> Sequence[Tensor]:
    return weight.split(max(1, WEIGHTS // weight.shape[1]))


def search_clip(weight: Tensor, inputs: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The clip [N, G] of each group that least disturbs the layer's output on `inputs` [R, K].

    The error of a group is |X_g (W_g - Q(W_g))|^2, summed over the rows of `inputs`: the objective
    of AWQ's clip search (Lin et al. 2023, arXiv:2306.00978), over CLIPS. Cutting the few largest
    weights of a group buys finer steps for all the others.
    """
    groups = spec.groups(weight.shape[1])
    rows = inputs.float().reshape(len(inputs), groups, -1).transpose(0, 1)
    # More rows than channels a group: through X^T X, which does not grow with the rows.
    gram = rows.mT @ rows if rows.shape[1] >= rows.shape[2] else None
    return torch.cat([_search(p.float(), rows, gram, spec, dtype) for p in _parts(weight)])


def _search(
    weight: Tensor, rows: Tensor, gram: Tensor | None, spec: QuantSpec, dtype: torch.dtype
) -> Tensor:
    """The best clips [n, G] of some output channels [n, K] on inputs [G, R, g], or on their
    `gram` [G, g, g] where that is given.
    """
    groups = len(rows)
    best = torch.ones(len(weight), groups, device=weight.device)
    least = torch.full_like(best, torch.inf)
    for clip in CLIPS:
        error = weight - rtn(weight, spec, dtype, clip).dequantize()
        by_group = error.unflatten(1, (groups, -1)).transpose(0, 1)
        if gram is None:
            loss = (by_group @ rows.mT).square().sum(-1).T
        else:
            loss = ((by_group @ gram) * by_group).sum(-1).T
        best = torch.where(loss < least, clip, best)
        least = torch.fmin(least, loss)
    return best
