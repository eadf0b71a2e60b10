"""A quantized model that learns: integers frozen, scales and 16-bit parameters free.

The integers need no gradient and no optimizer state, and RoPE acts on what is in 16 bit, so the
checkpoint needs no second quantization after training.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.engines import FUSED_QKV, QUERY_KEY, VALUE
from compress.kernels.w8a8.reference import quantize_per_token
from compress.qtensor import QTensor
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
        n, k = self.ints.shape
        grouped = self.ints.view(n, self.weight_scale.shape[1], -1).to(x.dtype)
        weight = (grouped * self.weight_scale.to(x.dtype).unsqueeze(-1)).view(n, k)
        if self.spec.activation_bits is not None:
            x = straight_through_int8(x)
        return nn.functional.linear(x, weight, self.bias)


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


def make_trainable(model: PreTrainedModel) -> PreTrainedModel:
    """Swap every QuantLinear of `model` for a ScaleLinear of the same weight, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(name, ScaleLinear(module.qtensor(), module.bias))
    return model.requires_grad_(False)


def scales(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The scales of the quantized linears, by their names in the checkpoint."""
    return {
        f"{name}.weight_scale": module.weight_scale
        for name, module in model.named_modules()
        if isinstance(module, ScaleLinear)
    }


def norms_and(inputs: tuple[str, ...], model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The norms and the linears called one of `inputs` that are in 16 bit, by parameter name."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm")
        is_input = isinstance(module, nn.Linear) and name.rpartition(".")[2] in inputs
        if is_norm or is_input:
            found |= {f"{name}.{n}": p for n, p in module.named_parameters(recurse=False)}
    return found
