"""Linears of other projects for the same weight, where they are installed: for `bench` to compare.

Each takes a quantized weight and the dtype of its inputs, and returns a function from [M, K] to
[M, N]; it raises ImportError where its project is not installed, and Unsupported where that has no
kernel for such a weight on this device. Written for GemLite 0.6, torchao 0.18 and vLLM 0.32.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.qtensor import QTensor, pack_int32

Linear = Callable[..., Tensor]
"""Of x [M, K] alone."""


class Unsupported(Exception):
    """What the project has no kernel for."""


def gemlite(weight: QTensor, dtype: torch.dtype) -> Linear:
    """GemLite (github.com/dropbox/gemlite), in Triton, tuned by itself at the first call."""
    if weight.ints.device.type == "cpu":
        raise Unsupported("it is for GPUs")
    from gemlite.helper import A16W8_INT8, A8W8_INT8_dynamic, A16Wn

    spec, form = weight.spec, {"device": str(weight.ints.device), "dtype": dtype}
    if spec.activation_bits is not None:
        return A8W8_INT8_dynamic(**form).from_weights(weight.ints, scales=weight.scales)
    if spec.bits == 8:
        return A16W8_INT8(**form).from_weights(weight.ints, scales=weight.scales)
    # It keeps unsigned integers and zero points: (q - zero) * scale.
    unsigned = (weight.ints + 8).to(torch.uint8)
    zeros = torch.full_like(weight.scales, 8)
    group = spec.group_size or weight.ints.shape[1]
    return A16Wn(**form).from_weights(unsigned, weight.scales, zeros, spec.bits, group)


def torchao(weight: QTensor, dtype: torch.dtype) -> Linear:
    """torchao, compiled as it is meant to be. It rounds the dequantized weight to its own grid."""
    from torchao.quantization import (
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    spec, (n, k) = weight.spec, weight.ints.shape
    if spec.activation_bits is not None:
        config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    elif spec.bits == 8:
        config = Int8WeightOnlyConfig(set_inductor_config=False)
    elif spec.group_size is None or weight.ints.device.type == "cpu":
        raise Unsupported("4 bit is in groups and on GPUs")
    else:
        form = "tile_packed_to_4d"
        config = Int4WeightOnlyConfig(
            group_size=spec.group_size, int4_packing_format=form, set_inductor_config=False
        )
    linear = nn.Linear(k, n, bias=False, device=weight.ints.device, dtype=dtype)
    linear.weight = nn.Parameter(weight.dequantize(dtype), requires_grad=False)
    quantize_(linear, config)
    # By position, where its tensors look for their operands.
    return lambda x: _compiled_linear()(x, linear.weight)


@functools.cache
def _compiled_linear() -> Linear:
    """One function for all weights: compiled for each shape and kind, not for each copy."""
    return torch.compile(F.linear, dynamic=False)


def vllm(weight: QTensor, dtype: torch.dtype) -> Linear:
    """vLLM: CUTLASS for W8A8 and Marlin for the rest on GPUs, oneDNN for W8A8 on CPU."""
    from vllm import _custom_ops as ops

    on_cpu, spec = weight.ints.device.type == "cpu", weight.spec
    if spec.activation_bits is None:
        if on_cpu:
            raise Unsupported("its CPU kernels for packed weights are bound to its layers")
        return _marlin(weight)
    scale_N1, weight_KN = weight.scales.float(), weight.ints.t()
    if on_cpu:
        handler = ops.create_onednn_scaled_mm(weight_KN, scale_N1, dtype, True, False, 128)

        def by_onednn(x: Tensor) -> Tensor:
            q, scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
            y = torch.empty((len(x), len(scale_N1)), dtype=x.dtype)
            ops.onednn_scaled_mm(handler, q, y, scale, None, None, None)
            return y

        return by_onednn

    def by_cutlass(x: Tensor) -> Tensor:
        q, scale, _ = ops.scaled_int8_quant(x)
        return ops.cutlass_scaled_mm(q, weight_KN, scale, scale_N1, x.dtype)

    return by_cutlass


def _marlin(weight: QTensor) -> Linear:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    spec, (n, k) = weight.spec, weight.ints.shape
    words = pack_int32(weight.ints, spec.bits).t().contiguous()
    scales = weight.scales.t().contiguous()
    return functools.partial(
        marlin_utils.apply_gptq_marlin_linear,
        weight=ops.gptq_marlin_repack(words, size_k=k, size_n=n, num_bits=spec.bits),
        weight_scale=marlin_utils.marlin_permute_scales(scales, k, n, spec.group_size or -1),
        weight_zp=marlin_utils.marlin_make_empty(weight.ints.device),
        workspace=None,
        wtype=scalar_types.uint4b8 if spec.bits == 4 else scalar_types.uint8b128,
        output_size_per_partition=n,
        input_size_per_partition=k,
    )


PEERS = {"GemLite": gemlite, "torchao": torchao, "vLLM": vllm}
