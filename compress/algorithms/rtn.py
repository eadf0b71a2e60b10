"""Round to nearest, with a searched clip: the ground that every other algorithm stands on."""

import torch
from torch import Tensor

from compress.qtensor import QTensor, QuantSpec, quantize

CLIPS = tuple(1.0 - 0.05 * step for step in range(11))  # 1.00, 0.95, ... 0.50
SMALLEST_SCALE = 1e-8
WEIGHTS = 1 << 21
"""Weights whose clips are searched at a time: 8 MB in float32, of which a few copies are held."""


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


def search_clip(weight: Tensor, inputs: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The clip [N, G] of each group that least disturbs the layer's output on `inputs` [R, K].

    The error of a group is |X_g (W_g - Q(W_g))|^2, summed over the rows of `inputs`: the objective
    of AWQ's clip search (Lin et al. 2023, arXiv:2306.00978), over CLIPS. Cutting the few largest
    weights of a group buys finer steps for all the others.
    """
    groups = spec.groups(weight.shape[1])
    rows = inputs.float().reshape(len(inputs), groups, -1)
    parts = weight.split(max(1, WEIGHTS // weight.shape[1]))
    return torch.cat([_search(part.float(), rows, spec, dtype) for part in parts])


def _search(weight: Tensor, rows: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The best clips [n, G] of some output channels [n, K] on inputs [R, G, g]."""
    groups = rows.shape[1]
    best = torch.ones(len(weight), groups, device=weight.device)
    least = torch.full_like(best, torch.inf)
    for clip in CLIPS:
        error = weight - rtn(weight, spec, dtype, clip).dequantize()
        loss = _group_errors(error.unflatten(1, (groups, -1)), rows)
        better = loss < least
        best[better], least[better] = clip, loss[better]
    return best


def _group_errors(error: Tensor, rows: Tensor) -> Tensor:
    """|X_g E_g|^2 of every output channel and group, [N, G], from [N, G, g] and [R, G, g]."""
    by_group, rows_by_group = error.transpose(0, 1), rows.transpose(0, 1)
    if rows_by_group.shape[1] < rows_by_group.shape[2]:
        return (by_group @ rows_by_group.transpose(1, 2)).square().sum(-1).T
    # More rows than channels a group: through X^T X, which does not grow with the rows.
    gram = rows_by_group.transpose(1, 2) @ rows_by_group
    return ((by_group @ gram) * by_group).sum(-1).T
