"""The CPU kernels against the reference: fresh random inputs, odd shapes, every format."""

import ctypes
import dataclasses
import mmap
from typing import Any

import pytest
import torch

from compress.kernels import dense, w8a8
from compress.kernels.bench import bind, random_weight
from compress.kernels.check import check_linear, relative_error
from compress.kernels.native import build
from compress.kernels.w8a8 import cpu as w8a8_cpu
from compress.kernels.wna16 import cpu as wna16_cpu
from compress.qtensor import QuantSpec, pack_int32

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
TOKENS = (1, 3, 17, 100, 130)


@pytest.fixture(params=["own", "aten"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products with our kernels in C++, and as they are where no compiler is found."""
    if request.param == "aten":
        monkeypatch.setattr(build, "available", lambda: False)
    elif not build.available():
        pytest.skip("no C++ compiler here")
    return str(request.param)


@pytest.fixture
def amx() -> None:
    if not build.has_amx():
        pytest.skip("no AMX here")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("k", [1, 63, 100, 576])
@pytest.mark.parametrize("n", [1, 17, 64])
def test_w8a8(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random_weight(n, k, QuantSpec(8, activation_bits=8), "cpu", dtype)
    bias = torch.randn(n, dtype=dtype)
    for tokens in TOKENS:
        x = torch.randn(tokens, k, dtype=dtype)
        for b in (bias, None):
            linear = w8a8.prepare(weight.ints, weight.scales, b, "cpu")
            assert check_linear(linear, x, weight, b) < TOLERANCE[dtype]


@pytest.mark.parametrize(("m", "k", "n"), [(1, 2, 1), (3, 63, 100), (17, 576, 63), (100, 1536, 3)])
def test_the_int32_product_is_exact(m: int, k: int, n: int) -> None:
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    assert torch.equal(torch._int_mm(a, b.t()), w8a8.reference.matmul_int32(a, b))


def test_activations_are_quantized_as_in_the_reference() -> None:
    x = torch.randn(64, 576, dtype=torch.bfloat16) * torch.logspace(-6, 4, 64)[:, None]
    q, scale = w8a8_cpu.quantize_per_token(x.bfloat16())
    wanted_q, wanted_scale = w8a8.reference.quantize_per_token(x.bfloat16())
    assert torch.equal(q, wanted_q)
    assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("m", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("k", [31, 576, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-45, 1e-43, 1e-42, 1e-30, 1.0, 1e30])
def test_w8a8_has_the_bits_of_the_reference(
    m: int, k: int, dtype: torch.dtype, size: float, products: str
) -> None:
    weight = random_weight(100, k, QuantSpec(8, activation_bits=8), "cpu", dtype)
    for bias in (torch.randn(100).to(dtype), None):
        x = (size * torch.randn(m, k)).to(dtype)
        wanted = w8a8.reference.linear(x, weight.ints, weight.scales, bias, dtype)
        assert torch.equal(w8a8.prepare(weight.ints, weight.scales, bias, "cpu")(x), wanted)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("size", [1e-38, 1e-36, 1.0])
def test_w8a8_by_amx_has_zeros_for_what_is_below_normal_numbers(size: float) -> None:
    """Otherwise the bits of the reference."""
    weight = random_weight(100, 576, QuantSpec(8, activation_bits=8), "cpu", torch.bfloat16)
    x = size * torch.randn(17, 576, dtype=torch.bfloat16)
    wanted = w8a8.reference.linear(x, weight.ints, weight.scales, None, torch.float32)
    wanted[wanted.abs() < torch.finfo(torch.float32).tiny] = 0
    y = w8a8.prepare(weight.ints, weight.scales, None, "cpu")(x)
    assert torch.equal(y, wanted.bfloat16())


@pytest.mark.parametrize("k", [31, 1536])
def test_many_tokens_have_the_bits_of_few(k: int) -> None:
    """Also where one more token takes the other path."""
    weight = random_weight(100, k, QuantSpec(8, activation_bits=8), "cpu", torch.bfloat16)
    for bias in (torch.randn(100).bfloat16(), None):
        linear = bind(weight, "cpu", torch.bfloat16, bias)
        if not isinstance(linear, w8a8_cpu.Int8):
            pytest.skip("no C++ compiler here")
        for size in (1e-30, 1.0, 1e30):
            x = (size * torch.randn(17, k)).bfloat16()
            assert torch.equal(linear.many(x), linear.few(x))


@pytest.mark.usefixtures("products")
def test_a_row_of_zeros_gives_the_bias_and_nan_stays_in_its_row() -> None:
    weight = random_weight(16, 32, QuantSpec(8, activation_bits=8), "cpu", torch.bfloat16)
    bias = torch.randn(16, dtype=torch.bfloat16)
    linear = w8a8.prepare(weight.ints, weight.scales, bias, "cpu")
    for tokens in (3, 40):
        x = torch.randn(tokens, 32, dtype=torch.bfloat16)
        x[0], x[1, 5] = 0, float("nan")
        y = linear(x)
        assert torch.equal(y[0], bias)
        assert y[1].isnan().all()
        assert y[2:].isfinite().all()


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("spec", "n", "k"),
    [
        (QuantSpec(4, 32), 48, 96),
        (QuantSpec(4, 64), 64, 576),
        (QuantSpec(4, 128), 16, 256),
        (QuantSpec(4, 512), 32, 1024),
        (QuantSpec(4), 64, 576),
        (QuantSpec(4), 17, 63),
        (QuantSpec(4, 4), 100, 172),
        (QuantSpec(8), 100, 576),
        (QuantSpec(8), 17, 63),
        (QuantSpec(8), 33, 100),
        (QuantSpec(8, 64), 63, 576),
    ],
    ids=str,
)
def test_wna16(spec: QuantSpec, n: int, k: int, dtype: torch.dtype) -> None:
    weight = random_weight(n, k, spec, "cpu", dtype)
    linear = bind(weight, "cpu", dtype)
    for tokens in TOKENS:
        x = torch.randn(2, tokens, k, dtype=dtype)
        y = linear(x)
        assert y.shape == (2, tokens, n)
        assert y.dtype == dtype
        assert check_linear(linear, x, weight) < TOLERANCE[dtype]


def outputs_of(linear: dense.Linear, n: int, k: int, tokens: int) -> None:
    """Holds a linear in bf16, with a bias and without, to the product in float64."""
    weight = torch.randn(n, k, dtype=torch.bfloat16)
    for bias in (torch.randn(n, dtype=torch.bfloat16), None):
        x = torch.randn(2, tokens, k, dtype=torch.bfloat16)[:1]
        y = linear(x, weight, bias)
        assert y.dtype == x.dtype
        assert y.shape == (1, tokens, n)
        product = x.double() @ weight.double().t()
        wanted = product if bias is None else product + bias
        # Rounded, by 2^-8 at most, before the bias and after it; summed in float32.
        bound = 2**-8 * (product.abs() + wanted.abs())
        bound += 1e-5 * (x.abs().double() @ weight.abs().double().t())
        assert ((y - wanted).abs() <= bound).all()


@pytest.mark.parametrize("n", [1, 17, 3000])
@pytest.mark.parametrize("k", [1, 31, 63, 576])
def test_dense(n: int, k: int) -> None:
    if not build.available():
        pytest.skip("no C++ compiler here")
    for tokens in (0, 1, 2, 3):
        outputs_of(dense.for_few_tokens, n, k, tokens)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("n", [1, 16, 17, 100])
@pytest.mark.parametrize("k", [1, 31, 64, 576])
def test_amx(n: int, k: int) -> None:
    for tokens in (0, 1, 15, 16, 17, 32, 33, 70):
        outputs_of(dense.by_amx, n, k, tokens)


@pytest.mark.usefixtures("amx")
def test_amx_where_the_tokens_are_too_many_for_the_cache() -> None:
    outputs_of(dense.by_amx, 70, 576, 1500)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(("n", "k"), [(576, 576), (40, 1536), (5, 33)])
def test_by_amx_a_token_has_the_same_bits_in_any_batch(n: int, k: int) -> None:
    weight, x = torch.randn(n, k).bfloat16(), torch.randn(1500, k).bfloat16()
    alone = torch.cat([dense.by_amx(x[i : i + 1], weight, None) for i in range(40)])
    for tokens in (2, 16, 17, 33, 40, 64, 200, 512, 1500):
        together = dense.by_amx(x[:tokens], weight, None)[:40]
        assert torch.equal(together, alone[:tokens])


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(("n", "k", "group"), [(100, 576, 64), (7, 256, 128), (40, 192, None)])
def test_w4a16_by_amx_is_the_dequantized_product(n: int, k: int, group: int | None) -> None:
    weight = random_weight(n, k, QuantSpec(4, group), "cpu", torch.bfloat16)
    words, scales = pack_int32(weight.ints, 4), weight.scales.float()
    dequantized = torch.ops.compress_cpu.dequantize(words, scales, 4)
    for tokens in (0, 1, 15, 17, 33, 70):
        x = torch.randn(tokens, k).bfloat16()
        y = torch.ops.compress_cpu.w4a16_amx(x, [words], [scales])
        # The same products; only their order differs.
        exact = x.double() @ dequantized.double().t()
        bound = 2**-8 * exact.abs() + 1e-5 * (x.abs().double() @ dequantized.abs().double().t())
        assert ((y - exact).abs() <= bound).all()


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("spec", [QuantSpec(4, 64), QuantSpec(4)], ids=str)
def test_w4a16_by_amx_has_the_same_bits_in_any_batch(spec: QuantSpec) -> None:
    linear = bind(random_weight(100, 576, spec, "cpu", torch.bfloat16), "cpu", torch.bfloat16)
    x = torch.randn(1500, 576).bfloat16()
    alone = torch.cat([linear(x[i : i + 1]) for i in range(40)])
    for tokens in (2, 16, 17, 40, 200, 1500):
        assert torch.equal(linear(x[:tokens])[:40], alone[:tokens])


@pytest.mark.usefixtures("amx")
def test_amx_leaves_the_tiles_of_others_as_they_were() -> None:
    """Whose shapes the two instructions here write and read."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("c4e2784907c3c4e2794907c3"))  # ldtilecfg [rdi], sttilecfg [rdi]
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    write, read = (ctypes.CFUNCTYPE(None, ctypes.c_char_p)(at + i) for i in (0, 6))
    # Palette 1; tile 0 has 3 rows of 12 bytes.
    others = bytes([1] + [0] * 15 + [12] + [0] * 31 + [3] + [0] * 15)
    found = ctypes.create_string_buffer(64)
    dense.by_amx(torch.ones(1, 96).bfloat16(), torch.ones(70, 96).bfloat16(), None)
    write(others)
    try:
        dense.by_amx(torch.ones(50, 96).bfloat16(), torch.ones(70, 96).bfloat16(), None)
        read(found)
    finally:
        write(bytes(64))
    assert found.raw == others


@pytest.mark.parametrize(
    "spec", [QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 64)], ids=str
)
def test_a_linear_is_traced_whole(spec: QuantSpec) -> None:
    linear = bind(random_weight(64, 128, spec, "cpu", torch.bfloat16), "cpu", torch.bfloat16)
    if not build.available():
        pytest.skip("no C++ compiler here")
    for tokens in (1, 20):
        x = torch.randn(tokens, 128, dtype=torch.bfloat16)
        traced = torch.compile(lambda x: linear(x), backend="eager", fullgraph=True)
        assert torch.equal(traced(x), linear(x))


@pytest.mark.parametrize("spec", [QuantSpec(8), QuantSpec(4, 64), QuantSpec(4, 32)], ids=str)
@pytest.mark.parametrize("tokens", [1, 20])
def test_wna16_has_the_gradient_of_the_dequantized_product(spec: QuantSpec, tokens: int) -> None:
    weight = random_weight(64, 576, spec, "cpu", torch.bfloat16)
    linear: Any = bind(weight, "cpu", torch.bfloat16)
    if not isinstance(linear, wna16_cpu.Packed):
        pytest.skip("no C++ compiler here")
    x = torch.randn(tokens, 576, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    slopes = torch.randn_like(y)
    y.backward(slopes)
    dequantized = torch.ops.compress_cpu.dequantize(linear.weight, linear.scales, linear.bits)
    assert x.grad is not None
    assert relative_error(x.grad, slopes.float() @ dequantized.float()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("spec", [QuantSpec(8), QuantSpec(4, 64), QuantSpec(4, 32)], ids=str)
def test_a_token_has_the_same_bits_in_any_batch_of_few(spec: QuantSpec) -> None:
    weight = random_weight(100, 576, spec, "cpu", torch.bfloat16)
    linear = bind(weight, "cpu", torch.bfloat16)
    x = torch.randn(wna16_cpu.FEW_TOKENS, 576, dtype=torch.bfloat16)
    together = linear(x)
    assert all(torch.equal(linear(x[i : i + 1])[0], together[i]) for i in range(len(x)))


@pytest.mark.parametrize(
    "spec", [None, QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 64)], ids=str
)
def test_linears_of_one_input_have_their_bits_as_one_product(spec: QuantSpec | None) -> None:
    if not build.available():
        pytest.skip("no C++ compiler here")
    parts: list[Any] = []
    for n in (700, 1, 130):
        bias = None if n == 1 else torch.randn(n, dtype=torch.bfloat16)
        if spec is None:
            parts.append(dense.Dense(torch.randn(n, 576, dtype=torch.bfloat16), bias))
        else:
            weight = random_weight(n, 576, spec, "cpu", torch.bfloat16)
            parts.append(bind(weight, "cpu", torch.bfloat16, bias))
    if isinstance(parts[0], wna16_cpu.Packed):
        parts = [dataclasses.replace(part, by_amx=False) for part in parts]
    x = torch.randn(1, 576, dtype=torch.bfloat16)
    wanted, before = torch.cat([part(x) for part in parts], -1), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):  # whose shares end within one of the weights
            torch.set_num_threads(threads)
            assert torch.equal(type(parts[0]).joined(parts)(x), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("amx")
def test_one_token_of_w4a16_is_multiplied_before_it_is_rounded() -> None:
    """As where there is no AMX."""
    weight = random_weight(100, 576, QuantSpec(4, 64), "cpu", torch.bfloat16)
    linear: Any = bind(weight, "cpu", torch.bfloat16)
    x = torch.randn(1, 576, dtype=torch.bfloat16)
    words = dataclasses.replace(linear, by_amx=False)
    assert torch.equal(type(linear).joined([linear])(x), words(x))


def test_weights_of_other_groups_are_not_joined() -> None:
    if not build.available():
        pytest.skip("no C++ compiler here")
    weights = [random_weight(64, 576, QuantSpec(4, g), "cpu", torch.bfloat16) for g in (64, 32)]
    parts: list[Any] = [bind(weight, "cpu", torch.bfloat16) for weight in weights]
    assert type(parts[0]).joined(parts) is None


@pytest.mark.parametrize("tokens", [2, 40])
def test_the_number_of_threads_does_not_change_a_bit(tokens: int) -> None:
    weight = torch.randn(3000, 576, dtype=torch.bfloat16)
    if not dense.takes(weight):
        pytest.skip("no C++ compiler here")
    if tokens > dense.FEW_TOKENS and not build.has_amx():
        pytest.skip("torch's product")
    x = torch.randn(tokens, 576, dtype=torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(dense.Dense(weight, None)(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("spec", "k"),
    [
        (QuantSpec(4, 32), 160),
        (QuantSpec(4, 96), 288),
        (QuantSpec(4, 160), 320),
        (QuantSpec(4), 32),
        (QuantSpec(4), 672),
    ],
    ids=str,
)
def test_int4_where_vectors_of_words_end_within_a_row(spec: QuantSpec, k: int) -> None:
    """Groups of a part of a vector, of no whole number of them; inputs between two of a row."""
    weight = random_weight(5, k, spec, "cpu", torch.bfloat16)
    linear = bind(weight, "cpu", torch.bfloat16)
    for tokens in (1, 4, 7):
        x = (3 + torch.randn(tokens, 2 * k + 1)).bfloat16()[:, 1::2]
        assert check_linear(linear, x, weight) < TOLERANCE[torch.bfloat16]


def test_the_dequantized_weight_is_that_of_the_reference() -> None:
    if not build.available():
        pytest.skip("no C++ compiler here")
    for spec in (QuantSpec(8), QuantSpec(8, 32), QuantSpec(4, 64), QuantSpec(4)):
        weight = random_weight(33, 192, spec, "cpu", torch.bfloat16)
        packed = pack_int32(weight.ints, spec.bits)
        scales = weight.scales.float()
        out = torch.ops.compress_cpu.dequantize(packed, scales, spec.bits)
        assert torch.equal(out, weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize(
    ("n", "k", "spec", "group"),
    [
        (64, 576, QuantSpec(4, 64), 64),
        (64, 1536, QuantSpec(4), 256),
        (64, 576, QuantSpec(4), 64),
        (172, 64, QuantSpec(4, 64), None),
        (64, 172, QuantSpec(4), None),
        (64, 576, QuantSpec(8), None),
    ],
)
def test_which_shapes_the_int4_op_takes(n: int, k: int, spec: QuantSpec, group: int | None) -> None:
    assert wna16_cpu.int4_op_group(n, k, spec) == group


def test_the_planar_dequantization_equals_the_plain_one() -> None:
    weight = random_weight(32, 256, QuantSpec(4, 64), "cpu", torch.bfloat16)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    order = wna16_cpu.planar(torch.arange(256.0)[None])[0].long()
    planar = wna16_cpu.dequantize_planar(pack_int32(weight.ints, 4), weight.scales)
    assert torch.equal(planar, weight.dequantize(torch.bfloat16)[:, order])
    assert torch.equal(wna16_cpu.planar(x), x[:, order])


@pytest.mark.usefixtures("products")
def test_no_tokens_give_no_rows() -> None:
    for spec in (QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 64)):
        weight = random_weight(32, 64, spec, "cpu", torch.bfloat16)
        y = bind(weight, "cpu", torch.bfloat16)(torch.empty(0, 64, dtype=torch.bfloat16))
        assert y.shape == (0, 32)


def test_relative_error_is_infinite_for_what_is_not_finite() -> None:
    y = torch.ones(2, 2)
    assert relative_error(y, y) == 0
    assert relative_error(y * float("nan"), y) == float("inf")
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
