"""A quantized model that learns: scales and 16-bit parameters, and the integers if asked for.

Frozen integers need no gradient and no optimizer state, and RoPE acts on what is in 16 bit, so the
checkpoint needs no second quantization after training. Integers that learn are latent weights in
float32, rounded going forward, and stored as what they round to.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import checkpoint
from compress.engines import FUSED_QKV, QUERY_KEY, VALUE
from compress.kernels.w8a8.reference import quantize_per_token
from compress.qtensor import QTensor, QuantSpec
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import load

if TYPE_CHECKING:
    from compress.config import Config

ROTATED = (*QUERY_KEY, *FUSED_QKV)
"""What RoPE acts on, with V where it is in one matrix with Q and K."""
ATTENTION_INPUTS = (*ROTATED, *VALUE)


class ScaleLinear(nn.Module):
    """A linear of frozen integers whose scales [N, G] are learned."""

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        super().__init__()
        self.spec = weight.spec
        self.ints: Tensor
        self.register_buffer("ints", weight.ints)
        self.weight_scale = nn.Parameter(weight.scales.float())
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.ints, self.weight_scale, self.bias, self.spec)


class LatentLinear(nn.Module):
    """A linear whose integers are learned too: `latent` [N, K], in steps of the grid, is rounded
    going forward and taken as it is going back (Bengio et al. 2013, arXiv:1308.3432).
    """

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        super().__init__()
        self.spec = weight.spec
        self.latent = nn.Parameter(weight.ints.float())
        self.weight_scale = nn.Parameter(weight.scales.float())
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rounded = self.latent + (to_integers(self.latent, self.spec) - self.latent).detach()
        return _linear(x, rounded, self.weight_scale, self.bias, self.spec)


def to_integers(latent: Tensor, spec: QuantSpec) -> Tensor:
    """What latent weights in steps of the grid stand for, in their own dtype."""
    return latent.round().clamp(spec.qmin, spec.qmax)


def _linear(
    x: Tensor, ints: Tensor, scales: Tensor, bias: Tensor | None, spec: QuantSpec
) -> Tensor:
    n, k = ints.shape
    grouped = ints.view(n, scales.shape[1], -1).to(x.dtype)
    weight = (grouped * scales.to(x.dtype).unsqueeze(-1)).view(n, k)
    if spec.activation_bits is not None:
        x = straight_through_int8(x)
    return nn.functional.linear(x, weight, bias)


class _StraightThroughInt8(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        ints, scale = quantize_per_token(x)
        return (ints * scale).to(x.dtype)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def straight_through_int8(x: Tensor) -> Tensor:
    """Round each token [..., K] to INT8 going forward, by the very arithmetic of the kernels'
    reference; the identity going back (Bengio et al. 2013, arXiv:1308.3432).
    """
    return _StraightThroughInt8.apply(x)


def load_exact(folder: Path, config: "Config") -> PreTrainedModel:
    """The model in `folder` in float32 on the run's device, for training and for measuring it."""
    return load(
        folder,
        device=config.device,
        dtype=torch.float32,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_trainable(model: PreTrainedModel, *, latent: bool = False) -> PreTrainedModel:
    """Swap every QuantLinear of `model`, in place, for one of the same weight that learns."""
    kind = LatentLinear if latent else ScaleLinear
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(name, kind(module.qtensor(), module.bias))
    return model.requires_grad_(False)


def scales(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The scales of the quantized linears, by their names in the checkpoint."""
    return {
        f"{name}.weight_scale": module.weight_scale
        for name, module in model.named_modules()
        if isinstance(module, ScaleLinear | LatentLinear)
    }


def fewest_bits(model: PreTrainedModel) -> int:
    """Of its quantized linears; 8 where there are none."""
    kinds = (ScaleLinear, LatentLinear)
    return min((m.spec.bits for m in model.modules() if isinstance(m, kinds)), default=8)


def latents(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The latent weights by the names of their linears, with `.latent`; none unless asked for."""
    return {
        f"{name}.latent": module.latent
        for name, module in model.named_modules()
        if isinstance(module, LatentLinear)
    }


def as_stored(model: PreTrainedModel, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was learned, by name, as the checkpoint's tensors: latent weights become integers."""
    found: dict[str, Tensor] = {}
    for name, value in learned.items():
        linear = name.removesuffix(".latent")
        if linear == name:
            found[name] = value
            continue
        spec = cast(LatentLinear, model.get_submodule(linear)).spec
        ints = to_integers(value, spec).to(torch.int8)
        packed = checkpoint.pack(linear, QTensor(ints, learned[f"{linear}.weight_scale"], spec))
        found |= packed
    return found


def norms_and(inputs: tuple[str, ...], model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The norms and the linears called one of `inputs` that are in 16 bit, by parameter name."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm")
        is_input = isinstance(module, nn.Linear) and name.rpartition(".")[2] in inputs
        if is_norm or is_input:
            found |= {f"{name}.{n}": p for n, p in module.named_parameters(recurse=False)}
    return found
