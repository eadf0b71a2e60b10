"""A quantized model that learns: integers frozen, scales and 16-bit parameters free.

The integers need no gradient and no optimizer state, and RoPE acts on what is in 16 bit, so the
checkpoint needs no second quantization after training.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.engines import FUSED_QKV, QUERY_KEY, VALUE
from compress.qtensor import QTensor
from compress.runtime.linear import QuantLinear

ATTENTION_INPUTS = (*QUERY_KEY, *VALUE, *FUSED_QKV)
SMALLEST = 1e-8


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


def straight_through_int8(x: Tensor) -> Tensor:
    """Round each token to INT8 going forward, the identity going back (Bengio et al. 2013)."""
    scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / 127
    rounded = torch.round(x.detach() / scale) * scale
    return x + (rounded - x.detach())


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


def norms_and_attention_inputs(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The norms, and what makes Q and K (and V, where it is in 16 bit), by name."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm")
        is_input = isinstance(module, nn.Linear) and name.rpartition(".")[2] in ATTENTION_INPUTS
        if is_norm or is_input:
            found |= {f"{name}.{n}": p for n, p in module.named_parameters(recurse=False)}
    return found
