"""A model's linears that stay in bf16 on CPU, through compress.kernels.dense."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.kernels import dense


def use(model: PreTrainedModel) -> None:
    """Let `model` run them so; where a gradient is asked for they stay torch's."""
    forward = _by_amx if dense.has_amx() else _for_few_tokens
    for module in model.modules():
        if type(module) is nn.Linear and dense.takes(module.weight):
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _by_amx(module: nn.Linear, x: Tensor) -> Tensor:
    return _linear(dense.by_amx, module, x)


def _for_few_tokens(module: nn.Linear, x: Tensor) -> Tensor:
    return _linear(dense.for_few_tokens, module, x)


def _linear(linear: dense.Linear, module: nn.Linear, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or module.weight.requires_grad):
        return F.linear(x, module.weight, module.bias)
    return linear(x, module.weight, module.bias)
