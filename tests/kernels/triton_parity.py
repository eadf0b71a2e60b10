"""The Triton kernels against the reference; run by test_triton.py, in a process of its own.

On a machine without a GPU this runs in Triton's interpreter, whose bf16 arithmetic is wrong: the
tests use float16 there.
"""

import pytest
import torch

from compress.kernels import w8a8
from compress.kernels.bench import bind, random_weight
from compress.kernels.check import check_linear
from compress.kernels.w8a8 import triton as w8a8_triton
from compress.kernels.wna16 import triton as wna16_triton
from compress.qtensor import QuantSpec, pack_int32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16
TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (1, 576, 100), (3, 63, 17), (17, 100, 63), (100, 17, 3), (130, 300, 129)],
)
def test_w8a8(m: int, k: int, n: int) -> None:
    weight = random_weight(n, k, QuantSpec(8, activation_bits=8), DEVICE, DTYPE)
    bias = torch.randn(n, device=DEVICE, dtype=DTYPE)
    x = torch.randn(m, k, device=DEVICE, dtype=DTYPE)
    for b in (bias, None):
        linear = w8a8.prepare(weight.ints, weight.scales, b, "triton")
        assert check_linear(linear, x, weight, b) < TOLERANCE


def test_activations_are_quantized_as_in_the_reference() -> None:
    x = torch.randn(40, 577, device=DEVICE) * torch.logspace(-6, 4, 40, device=DEVICE)[:, None]
    x[7] = 0
    q, scale = w8a8_triton.quantize_per_token(x)
    wanted_q, wanted_scale = w8a8.reference.quantize_per_token(x)
    assert torch.equal(q, wanted_q)
    assert torch.equal(scale, wanted_scale)


def test_a_long_row_is_quantized_in_several_blocks() -> None:
    x = torch.randn(2, 9001, device=DEVICE, dtype=DTYPE)
    q, scale = w8a8_triton.quantize_per_token(x)
    wanted_q, wanted_scale = w8a8.reference.quantize_per_token(x)
    assert torch.equal(q, wanted_q)
    assert torch.equal(scale, wanted_scale)


def test_the_largest_value_does_not_wrap() -> None:
    x = torch.tensor([[-3.3, 3.3, 1.1]], device=DEVICE)
    q, _ = w8a8_triton.quantize_per_token(x)
    assert q.tolist() == [[-127, 127, 42]]


@pytest.mark.parametrize("tile", [w8a8_triton.DECODE, w8a8_triton.SHORT, w8a8_triton.PREFILL])
@pytest.mark.parametrize(("m", "k", "n"), [(3, 63, 100), (65, 256, 17)])
def test_the_int32_product_is_exact(m: int, k: int, n: int, tile: w8a8_triton.Tile) -> None:
    a = torch.randint(-128, 128, (m, k), device=DEVICE, dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), device=DEVICE, dtype=torch.int8)
    one = torch.ones(max(m, n), 1, device=DEVICE)
    # Poisoned, and with a row and column too many that nothing may touch.
    buffer = torch.full((m + 1, n), float("nan"), device=DEVICE)
    w8a8_triton.gemm(a, one[:m], b, one[:n], None, buffer[:m], tile)
    assert torch.equal(buffer[:m], w8a8.reference.matmul_int32(a, b).float())
    assert buffer[m].isnan().all()


@pytest.mark.parametrize(
    ("spec", "n", "k"),
    [
        (QuantSpec(4, 32), 17, 96),
        (QuantSpec(4, 64), 63, 576),
        (QuantSpec(4, 128), 100, 384),
        (QuantSpec(4, 256), 3, 512),
        (QuantSpec(4, 4), 20, 172),
        (QuantSpec(4), 100, 63),
        (QuantSpec(4), 1, 576),
        (QuantSpec(8), 17, 100),
        (QuantSpec(8), 64, 576),
        (QuantSpec(8, 64), 63, 192),
    ],
    ids=str,
)
def test_wna16(spec: QuantSpec, n: int, k: int) -> None:
    weight = random_weight(n, k, spec, DEVICE, DTYPE)
    linear = bind(weight, "triton", DTYPE)
    for tokens in (1, 3, 17, 100):
        x = torch.randn(tokens, k, device=DEVICE, dtype=DTYPE)
        assert check_linear(linear, x, weight) < TOLERANCE


def test_wna16_writes_its_output_and_nothing_else() -> None:
    weight = random_weight(33, 100, QuantSpec(4), DEVICE, DTYPE)
    for m in (3, 70):
        x = torch.randn(m, 100, device=DEVICE, dtype=DTYPE)
        buffer = torch.full((m + 1, 33), float("nan"), device=DEVICE, dtype=DTYPE)
        packed = pack_int32(weight.ints, 4)
        wna16_triton.gemm(x, packed, weight.scales, None, buffer[:m], bits=4, group_size=None)
        assert check_linear(lambda _, y=buffer[:m]: y, x, weight) < TOLERANCE
        assert buffer[m].isnan().all()


def test_leading_dimensions_stay_and_no_tokens_give_no_rows() -> None:
    for spec in (QuantSpec(8, activation_bits=8), QuantSpec(4, 32)):
        linear = bind(random_weight(16, 32, spec, DEVICE, DTYPE), "triton", DTYPE)
        assert linear(torch.randn(2, 3, 32, device=DEVICE, dtype=DTYPE)).shape == (2, 3, 16)
        assert linear(torch.empty(0, 32, device=DEVICE, dtype=DTYPE)).shape == (0, 16)


def test_the_operators_are_sound_for_compilers() -> None:
    x = torch.randn(3, 32, device=DEVICE, dtype=DTYPE)
    weight = random_weight(16, 32, QuantSpec(8, activation_bits=8), DEVICE, DTYPE)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        w8a8_triton.linear_op, (x, weight.ints, weight.scales, None), test_utils=checks
    )
    weight = random_weight(16, 32, QuantSpec(4, 32), DEVICE, DTYPE)
    packed = pack_int32(weight.ints, 4)
    torch.library.opcheck(
        wna16_triton.linear_op, (x, packed, weight.scales, None, 4, 32), test_utils=checks
    )
