"""Move the difficulty of outlier channels from activations to weights, as far as it pays.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) where activations are quantized, the scaling of
AWQ (Lin et al. 2023, arXiv:2306.00978) where weights alone are; the strength is searched per layer
against the output error on calibration rows instead of being set once for the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.algorithms.rtn import rounded
from compress.kernels.w8a8.reference import quantize_per_token
from compress.qtensor import QuantSpec

STRENGTHS = tuple(0.1 * step for step in range(11))  # 0 (by the weights alone), 0.1, ... 1.0

LEAST_GAIN = 0.2

CHANNELS = 2048
"""Output channels of a weight that the search looks at, at most, spread evenly over all of them:
1835 of 11008."""


def smoothing_scales(
    activations: Tensor, largest: Tensor, strength: float, spec: QuantSpec
) -> Tensor:
    """Scales s [K] by which inputs are divided and weights multiplied, with geometric mean 1.

    activations: a size [K] of each input channel: relative to its token where activations are
    quantized (SmoothQuant takes the absolute maximum, which a few tokens of a thousandfold size
    decide alone), its mean absolute otherwise. largest: the largest weight [K] of each
    input channel, absolute.
    """
    size = activations.float().clamp_min(1e-5)
    if spec.activation_bits is not None:
        scales = size.pow(strength) / largest.clamp_min(1e-5).pow(1 - strength)
    else:
        scales = size.pow(strength)
    return scales / scales.log().mean().exp()


def search_strength(
    inputs: Tensor,
    activations: Tensor,
    weights: Sequence[Tensor],
    spec: QuantSpec,
    dtype: torch.dtype,
    *,
    tie: tuple[int, int] = (1, 1),
) -> tuple[Tensor, float | None]:
    """The scales [K] that least disturb the outputs of `weights` on `inputs` [R, K].

    Returns the scales and their strength; ones and None where nothing lowers the squared error
    by LEAST_GAIN: a small gain on a few rows is no gain on others.
    tie: (repeat, head) of grouped-query attention, see `tied`.
    """
    best, chosen = torch.ones_like(activations, dtype=torch.float32), None
    inputs, seen = inputs.float(), [w[:: -(-len(w) // CHANNELS)].float() for w in weights]
    outputs = [inputs @ w.T for w in seen]

    def loss_with(scales: Tensor) -> float:
        """|X W^T - Q(X / s) Q(s W)^T|^2, the squared error of the layers as they will be served."""
        served = fake_quantize(inputs / scales, spec)
        return sum(
            float((wanted - served @ rounded(w * scales, spec, dtype).T).square().sum())
            for wanted, w in zip(outputs, seen, strict=True)
        )

    largest = torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)
    least = (1 - LEAST_GAIN) * loss_with(best)
    for strength in STRENGTHS:
        scales = tied(smoothing_scales(activations, largest, strength, spec), *tie)
        loss = loss_with(scales)
        if loss < least:
            best, chosen, least = scales, strength, loss
    return best, chosen


def tied(scales: Tensor, repeat: int, head: int) -> Tensor:
    """Scales [K] made equal where `repeat` query heads read one value head of `head` channels."""
    if repeat == 1:
        return scales
    heads = scales.reshape(-1, repeat, head)
    return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)


def fake_quantize(inputs: Tensor, spec: QuantSpec) -> Tensor:
    """Inputs [R, K] as the kernels see them: rounded to INT8 per token, or left as they are."""
    if spec.activation_bits is None:
        return inputs.float()
    ints, scale = quantize_per_token(inputs)
    return ints * scale
