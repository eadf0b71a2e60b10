"""What is done to one decoder block beside rounding: smooth, clip, and measure on real inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.algorithms.rtn import rounded, search_clip, stored_scales
from compress.algorithms.smooth import fake_quantize, search_strength
from compress.blocks.structure import Feed
from compress.qtensor import QTensor, QuantSpec


@dataclass(frozen=True)
class LayerReport:
    """What was done to a linear. error and error_rtn: |Y - Y'| / |Y| on the calibration rows,
    of what is kept and of plain rounding. smooth: strength of the smoothing of its input, if any.
    clip: mean over its groups, 1 where nothing is cut. damping: what was added to the diagonal of
    its Hessian, as a share of the mean; None without GPTQ.
    """

    name: str
    error: float
    error_rtn: float
    smooth: float | None
    clip: float
    damping: float | None = None


def smooth_block(
    block: nn.Module,
    feeds: Sequence[Feed],
    statistics: dict[str, Tensor],
    specs: Mapping[str, QuantSpec],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Move scales between the block's weights, in place, wherever it lessens the output error.

    statistics: `<name>.rows` [R, K], `<name>.relative` and `<name>.mean_abs` [K] by the linear's
    name in the block. specs: how each linear that is quantized will be; linears that one feed
    reaches are smoothed for the one of fewest bits. Returns, by the same names, the scales [K] by
    which inputs are now divided, and their strengths.
    """
    divided: dict[str, Tensor] = {}
    strengths: dict[str, float] = {}
    for feed in feeds:
        targets = [name for name in feed.targets if name in specs]
        if not targets:
            continue
        spec = min((specs[name] for name in targets), key=lambda spec: spec.bits)
        size = "mean_abs" if spec.activation_bits is None else "relative"
        weights = [weight_of(block, name) for name in targets]
        scales, strength = search_strength(
            even_rows(statistics[f"{targets[0]}.rows"], weights),
            statistics[f"{targets[0]}.{size}"],
            weights,
            spec,
            dtype,
            tie=(feed.repeat, feed.head),
        )
        if strength is None:
            continue
        scales = divide_outputs(block.get_submodule(feed.source), scales, feed, dtype)
        for name in feed.targets:
            weight_of(block, name).mul_(scales)
            divided[name], strengths[name] = scales, strength
    return divided, strengths


def divide_outputs(source: nn.Module, scales: Tensor, feed: Feed, dtype: torch.dtype) -> Tensor:
    """Divide what `source` gives to `feed.targets` by `scales` [K], in place.

    Returns the scales as they hold once a norm is stored in `dtype`: its weight is rounded here,
    and they make up for it. Gemma's norms, which store w for a factor of 1 + w, would lose 2% of
    the factor 0.1 in bfloat16.
    """
    if not isinstance(source, nn.Linear):
        return _divide_norm(source, scales, feed.offset, dtype)
    once = scales
    if feed.repeat > 1:  # a value head that several query heads read is divided once
        once = scales.reshape(-1, feed.repeat, feed.head)[:, 0].reshape(-1)
    rows = slice(None) if feed.rows is None else list(feed.rows)
    source.weight[rows] /= once.unsqueeze(1)
    if source.bias is not None:
        source.bias[rows] /= once
    return scales


def _divide_norm(norm: nn.Module, scales: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    weight = norm.get_parameter("weight")
    factor = weight + offset
    stored = (factor / scales - offset).to(dtype).to(weight.dtype)
    exact = factor / (stored + offset)
    # A factor that is 0, or becomes 0 when it is stored, stays as it is.
    holds = torch.isfinite(exact) & (exact > 0)
    exact = torch.where(holds, exact, 1.0)
    weight.copy_(torch.where(holds, stored, weight))
    bias = getattr(norm, "bias", None)
    if bias is not None:
        bias.div_(exact)
    return exact


def weight_of(block: nn.Module, name: str) -> Tensor:
    """The weight [N, K] of the linear `name` of the block."""
    return block.get_parameter(f"{name}.weight")


def clip_of(
    weight: Tensor, rows: Tensor, divided: Tensor | None, spec: QuantSpec, dtype: torch.dtype
) -> Tensor:
    """The clip [N, G] of a weight [N, K] that reads `rows` [R, K], divided by `divided` if given.

    It is judged on inputs as they will be served, so that it need not fit what is lost.
    """
    inputs = fake_quantize(_smoothed(rows, divided), spec)
    return search_clip(weight, even_rows(inputs, [weight]), spec, dtype)


def error_of_rtn(weight: Tensor, rows: Tensor, spec: QuantSpec, dtype: torch.dtype) -> float:
    """|Y - Y'| / |Y| of a weight [N, K] rounded to nearest, on `rows` [R, K]."""
    plain = fake_quantize(rows, spec) @ rounded(weight, spec, dtype).T
    return _relative(rows.float() @ weight.float().T, plain)


def report_on(
    name: str,
    error_rtn: float,
    weight: Tensor,
    quantized: QTensor,
    rows: Tensor,
    divided: Tensor | None,
    strength: float | None,
    dtype: torch.dtype,
    damping: float | None = None,
) -> LayerReport:
    """Measure a rounded weight on `rows` [R, K]; weight [N, K]: as it was smoothed; error_rtn: by
    `error_of_rtn`, before that; damping: of its Hessian, if there was one.
    """
    spec = quantized.spec
    inputs = _smoothed(rows, divided)
    kept = fake_quantize(inputs, spec) @ quantized.dequantize().T
    return LayerReport(
        name=name,
        # What smoothing divided the layer's own outputs by is no error of it.
        error=_relative(inputs @ weight.float().T, kept),
        error_rtn=error_rtn,
        smooth=strength,
        clip=float((quantized.scales.float() / stored_scales(weight, spec, dtype).float()).mean()),
        damping=damping,
    )


def even_rows(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Inputs [R, K], each divided by the size of its outputs, so that every token counts alike.

    A few tokens (the first of a text above all) carry activations hundreds of times larger than
    the rest, and would decide every search alone, though the next norm divides them out again.
    """
    outputs = torch.stack([(rows.float() @ w.float().T).square().sum(-1) for w in weights]).sum(0)
    return rows.float() / outputs.sqrt().clamp_min(1e-6).unsqueeze(-1)


def _smoothed(rows: Tensor, divided: Tensor | None) -> Tensor:
    """Inputs [R, K] as smoothing leaves them."""
    return rows.float() if divided is None else rows.float() / divided


def _relative(wanted: Tensor, found: Tensor) -> float:
    return float((wanted - found).norm() / wanted.norm().clamp_min(1e-12))
