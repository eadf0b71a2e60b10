"""AdamW with its state, two moments of every parameter, in 32 or in 8 bit.

In 8 bit a moment takes a byte a value and a scale for each 256 (Dettmers et al. 2021,
arXiv:2110.02861), by torchao, which leaves parameters of less than 4096 values in 32 bit.
"""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "adamw_8bit")
BETAS = (0.9, 0.95)


def missing(kind: str) -> str | None:
    """What has to be installed for this one of OPTIMIZERS and is not; None where nothing is."""
    if kind != "adamw_8bit" or find_spec("torchao"):
        return None
    return "torchao, which is not installed (pip install '.[optimizer]')"


def adamw(
    groups: Sequence[tuple[float, Sequence[nn.Parameter]]], kind: str
) -> torch.optim.Optimizer:
    """An AdamW without weight decay over parameters with their learning rates; kind: one of
    OPTIMIZERS.
    """
    each: Any = [{"params": list(parameters), "lr": rate} for rate, parameters in groups]
    if kind == "adamw":
        return torch.optim.AdamW(each, betas=BETAS, weight_decay=0.0, foreach=False)
    # It tells of each kernel for other GPUs that it was built without.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.optim import AdamW8bit

    return AdamW8bit(each, betas=BETAS, weight_decay=0.0)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Give each group its learning rate for the next step."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):  # torchao's, whose compiled step reads it there
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
