"""A model that learns, cut over the processes of a run by FSDP2, so that none holds all of it.

A block is whole while it computes; its parameters, their gradients and the optimizer's state are
cut along their first dimension at all other times. A process alone holds everything, uncut.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from compress import processes
from compress.model import find_blocks
from compress.training.trainable import is_norm


def shard(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Cut the blocks of `model` and the norms outside them, in place, over the processes of this
    work; `device`, where what is left is put, is that of each process.

    Embeddings and head stay whole in every process. Gradients are summed over the processes.
    """
    mesh = init_device_mesh(device, (processes.count(),))
    prefix, blocks = find_blocks(model)
    norms = [
        module
        for name, module in model.named_modules()
        if is_norm(module) and not name.startswith(f"{prefix}.")
    ]
    for module in (*blocks, *norms):
        cut = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(cut, FSDPModule)
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in the same pass
    return model.to(device)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be cut; every process has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def collected(tensor: Tensor) -> Tensor:
    """A tensor to be written. Of one that is cut the leader gets all, on CPU, and others nothing:
    every process has to ask for it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if processes.leads() else full.new_empty(0)


def cut_like(full: Tensor, tensor: Tensor) -> Tensor:
    """`full`, which every process has, cut as `tensor` is where it is of the same shape."""
    if not isinstance(tensor, DTensor) or full.shape != tensor.shape:
        return full
    placed = full.to(tensor.device)
    return distribute_tensor(placed, tensor.device_mesh, tensor.placements, src_data_rank=None)


def collected_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, its tensors as from `collected`."""
    state = optimizer.state_dict()
    each = {
        number: {key: collected(value) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": each}


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer what `collected_state` gave, cut as its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    each = {
        number: {key: cut_like(value, parameters[number]) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": each})
