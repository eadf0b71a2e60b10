"""The check finds kernels that are broken in the ways in which kernels break."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress.kernels.bench import bind, random_weight
from compress.kernels.check import MAX_RELATIVE_ERROR, check_linear
from compress.qtensor import QTensor, QuantSpec, pack_int32, unpack_int32

W8A8 = QuantSpec(8, activation_bits=8)
W4A16 = QuantSpec(4, 64)

Breaks = Callable[[QTensor], Callable[[Tensor], Tensor]]


def _with(weight: QTensor, ints: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    return bind(QTensor(ints, scales, weight.spec), "cpu", torch.bfloat16)


def scale_of_the_next_row(weight: QTensor) -> Callable[[Tensor], Tensor]:
    return _with(weight, weight.ints, weight.scales.roll(1, 0))


def last_columns_left_out(weight: QTensor) -> Callable[[Tensor], Tensor]:
    ints = weight.ints.clone()
    ints[:, -32:] = 0
    return _with(weight, ints, weight.scales)


def one_row_not_written(weight: QTensor) -> Callable[[Tensor], Tensor]:
    def broken(x: Tensor) -> Tensor:
        y = _with(weight, weight.ints, weight.scales)(x)
        y[-1] = float("nan")
        return y

    return broken


def nibbles_in_reverse(weight: QTensor) -> Callable[[Tensor], Tensor]:
    ints = unpack_int32(pack_int32(weight.ints, 4), 4, weight.ints.shape[1])
    return _with(weight, ints.view(len(ints), -1, 8).flip(-1).reshape_as(ints), weight.scales)


def zero_point_off_by_one(weight: QTensor) -> Callable[[Tensor], Tensor]:
    return _with(weight, weight.ints - 1, weight.scales)


def activations_that_wrap(weight: QTensor) -> Callable[[Tensor], Tensor]:
    def broken(x: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / 130
        q = torch.round(x.float() / scale).to(torch.int16).to(torch.int8)
        return (q.float() * scale) @ weight.dequantize().t()

    return broken


@pytest.mark.parametrize(
    ("spec", "breaks"),
    [
        (W8A8, scale_of_the_next_row),
        (W8A8, last_columns_left_out),
        (W8A8, one_row_not_written),
        (W8A8, activations_that_wrap),
        (W4A16, scale_of_the_next_row),
        (W4A16, last_columns_left_out),
        (W4A16, nibbles_in_reverse),
        (W4A16, zero_point_off_by_one),
    ],
)
def test_a_broken_kernel_is_found(spec: QuantSpec, breaks: Breaks) -> None:
    weight = random_weight(64, 576, spec, "cpu", torch.bfloat16)
    weight.ints.clamp_(min=spec.qmin + 1)
    x = torch.randn(17, 576, dtype=torch.bfloat16)
    assert check_linear(bind(weight, "cpu", torch.bfloat16), x, weight) < MAX_RELATIVE_ERROR
    assert check_linear(breaks(weight), x, weight) > 2 * MAX_RELATIVE_ERROR
