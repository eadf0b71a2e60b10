"""A model's linears that stay in bf16 on CPU, through compress.kernels.dense."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.kernels import dense


def use(model: PreTrainedModel) -> None:
    """Let `model` run them so. They stay torch's where a gradient is asked for, and once they are
    cast or moved.
    """
    linear = dense.linear()
    for module in model.modules():
        if type(module) is nn.Linear and dense.takes(module.weight):
            # No bound method: pickle would look for it in nn.Linear.
            forward = partial(_forward, linear, module)
            module.forward = forward  # type: ignore[method-assign]


def _forward(linear: dense.Linear, module: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if trained or x.dtype != weight.dtype or not dense.fits(weight):
        return F.linear(x, weight, bias)
    return linear(x, weight, bias)
