"""The current GPU, which Triton launches on wherever the operands are."""

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within `with`, `device` is the current GPU; nothing is done for one that is, and for none.

    A model over several GPUs has operands on others than the first, whose streams know nothing of a
    launch there.
    """
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.accelerator.device_index(device.index)
