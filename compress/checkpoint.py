"""The deployable folder, in the layout of compressed-tensors.

transformers, vLLM and SGLang read it as it is:
https://github.com/vllm-project/compressed-tensors. Its `config.json` says which linears are
quantized and how; a quantized linear `name` holds, in safetensors,

    W8A8           name.weight int8 [N, K], name.weight_scale [N, 1]
    W8A16, W4A16   name.weight_packed int32 [N, ceil(K * bits / 32)], name.weight_scale [N, G],
                   name.weight_shape int64 [2]
"""

from typing import Any

import torch
from torch import Tensor

from compress.errors import UserError
from compress.qtensor import QTensor, QuantSpec, pack_int32, unpack_int32


def quantization_config(spec: QuantSpec, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json: every Linear by `spec`, but those in `ignore`.

    `ignore` holds full module names: patterns mean different things to different engines.
    """
    packed = spec.activation_bits is None
    layout = "pack-quantized" if packed else "int-quantized"
    weights = {
        "num_bits": spec.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if spec.group_size else "channel",
        "group_size": spec.group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    activations = {
        "num_bits": spec.activation_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
        "observer": None,
    }
    group = {
        "targets": ["Linear"],
        "format": layout,
        "weights": weights,
        "input_activations": None if packed else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def read_quantization_config(config: dict[str, Any]) -> tuple[QuantSpec, list[str]]:
    """The inverse of `quantization_config`: the spec and the names of the linears left alone.

    Raises UserError for a layout that this runtime does not serve.
    """
    groups = config.get("config_groups") or {}
    if config.get("quant_method") != "compressed-tensors" or len(groups) != 1:
        raise UserError(
            f"quantization_config is {config.get('quant_method')!r} with {len(groups)} groups; "
            "wanted compressed-tensors with one group, as this project writes it"
        )
    (group,) = groups.values()
    weights, activations = group["weights"], group.get("input_activations")
    spec = QuantSpec(
        bits=weights["num_bits"],
        group_size=weights.get("group_size") if weights["strategy"] == "group" else None,
        activation_bits=activations["num_bits"] if activations else None,
    )
    return spec, list(config.get("ignore") or [])


def pack(name: str, weight: QTensor) -> dict[str, Tensor]:
    """The tensors by which a checkpoint stores the quantized weight of the linear `name`."""
    if weight.spec.activation_bits is not None:
        return {f"{name}.weight": weight.ints, f"{name}.weight_scale": weight.scales}
    return {
        f"{name}.weight_packed": pack_int32(weight.ints, weight.spec.bits),
        f"{name}.weight_scale": weight.scales,
        f"{name}.weight_shape": torch.tensor(weight.ints.shape, dtype=torch.int64),
    }


def unpack(name: str, tensors: dict[str, Tensor], spec: QuantSpec) -> QTensor:
    """The inverse of `pack`."""
    scales = tensors[f"{name}.weight_scale"]
    if spec.activation_bits is not None:
        return QTensor(tensors[f"{name}.weight"], scales, spec)
    in_features = int(tensors[f"{name}.weight_shape"][1])
    ints = unpack_int32(tensors[f"{name}.weight_packed"], spec.bits, in_features)
    return QTensor(ints, scales, spec)
