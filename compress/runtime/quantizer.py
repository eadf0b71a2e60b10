"""transformers' own `from_pretrained` and pipelines through our kernels.

    from compress.runtime import quantizer

    quantizer.install()
    model = AutoModelForCausalLM.from_pretrained("runs/…/checkpoint")

Without `install` transformers loads the same folder by compressed-tensors, which decompresses it at
the first forward. compress.runtime.loader.load checks every tensor by name; what this checks is
what transformers does.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from compress.errors import UserError
from compress.kernels.backend import pick_backend
from compress.runtime.loader import make_ready, swap_linears

METHOD = "compressed-tensors"


def install() -> None:
    """Let every later `from_pretrained` of this process take KernelQuantizer for checkpoints of
    compressed-tensors, whoever calls it.
    """
    AUTO_QUANTIZER_MAPPING[METHOD] = KernelQuantizer


class KernelQuantizer(HfQuantizer):
    """QuantLinear in the place of every quantized linear, bound to the kernels of its device.

    The backend is COMPRESS_BACKEND's, or the device's own. Scales are cast to the model's dtype.
    Raises UserError for a layout that is not served, and for weights that are offloaded.
    """

    requires_calibration = True
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        """`save_pretrained` writes the checkpoint's layout."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float16 on a machine without a GPU runs as bfloat16, as in `load`."""
        slow = dtype == torch.float16 and not torch.cuda.is_available()
        return torch.bfloat16 if slow else dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        swap_linears(model, self.quantization_config.to_dict())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        places = sorted({str(place) for place in getattr(model, "hf_device_map", {}).values()})
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise UserError(
                f"device_map leaves weights on {' and '.join(places)}; kernels are bound to "
                "weights that stay where they are; wanted a device_map of GPUs alone"
            )
        # Hooks that carry activations from one GPU to another sit on the modules that are there.
        make_ready(model, pick_backend(model.device), fused=len(places) <= 1)
