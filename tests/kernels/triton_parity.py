"""The Triton kernels against the reference; run by test_triton.py, in a process of its own.

Without a GPU this runs in Triton's interpreter, whose bfloat16 conftest.py puts right.
"""

from contextlib import nullcontext
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from compress.kernels import bench, tune, w8a8
from compress.kernels.bench import bind, random_weight
from compress.kernels.check import check_linear, reference_linear, relative_error
from compress.kernels.quantize import reference as quantize_reference
from compress.kernels.quantize import triton as quantize
from compress.kernels.splits import new_locks
from compress.kernels.tiles import Tile, gpu_of, space
from compress.kernels.w8a8 import triton as w8a8_triton
from compress.kernels.wna16 import triton as wna16_triton
from compress.kernels.wna16.planar import to_planar
from compress.qtensor import QTensor, QuantSpec, pack_int32
from compress.runtime.fused import GatedMlp, Int8Norm
from compress.runtime.linear import QuantLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16, BF16 = torch.float16, torch.bfloat16
# Rounding of the output; where groups are no whole planes, of the dequantized weight too.
TOLERANCE = {FP16: 5e-4, BF16: 4e-3, torch.float32: 2e-6}
W8A8 = QuantSpec(8, activation_bits=8)
TILES = [
    Tile(16, 64, 1, 4, 4),
    Tile(16, 32, 4, 4, 4),
    Tile(64, 64, 2, 4, 4),
    Tile(128, 64, 1, 4, 3),
]


def signed_weight(n: int, k: int, spec: QuantSpec, dtype: torch.dtype) -> QTensor:
    """A random weight; at 4 bit half of the scales are negative, as the quantizer may make them."""
    weight = random_weight(n, k, spec, DEVICE, dtype)
    if spec.bits == 4:
        weight.scales[torch.rand(weight.scales.shape, device=DEVICE) < 0.5] *= -1
    return weight


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (1, 576, 100), (3, 63, 17), (17, 1000, 63), (100, 17, 3), (130, 300, 65)],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_w8a8(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    weight = random_weight(n, k, W8A8, DEVICE, dtype)
    bias = torch.randn(n, device=DEVICE, dtype=dtype) if m % 2 else None
    x = torch.randn(m, k, device=DEVICE, dtype=dtype)
    linear = w8a8.prepare(weight.ints, weight.scales, bias, "triton")
    assert check_linear(linear, x, weight, bias) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("spec", "m", "k", "n"),
    [
        (W8A8, 1, 4096, 63),
        (W8A8, 3, 100, 4096),
        (QuantSpec(4, 32), 2047, 32, 3),
        (QuantSpec(4, 128), 1, 4096, 5),
        (QuantSpec(8), 3, 100, 2047),
    ],
)
def test_long_sides(spec: QuantSpec, m: int, k: int, n: int) -> None:
    weight = signed_weight(n, k, spec, FP16)
    x = torch.randn(m, k, device=DEVICE, dtype=FP16)
    assert check_linear(bind(weight, "triton", FP16), x, weight) < TOLERANCE[FP16]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(3, 63, 100), (65, 1100, 17)])
def test_the_int32_product_is_exact(
    m: int, k: int, n: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_parts(monkeypatch, w8a8_triton)
    a = torch.randint(-128, 128, (m, k), device=DEVICE, dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), device=DEVICE, dtype=torch.int8)
    one = torch.ones(max(m, n), 1, device=DEVICE)
    locks = new_locks(torch.device(DEVICE))
    # Poisoned, and with a row and column too many that nothing may touch.
    buffer = torch.full((m + 1, n), float("nan"), device=DEVICE)
    w8a8_triton.gemm(a, one[:m], b, one[:n], None, locks, buffer[:m], tile)
    assert torch.equal(buffer[:m], w8a8.reference.matmul_int32(a, b).float())
    assert buffer[m].isnan().all()
    assert not locks.any()


def test_the_product_of_4096_tokens_is_exact() -> None:
    a = torch.randint(-128, 128, (4096, 100), device=DEVICE, dtype=torch.int8)
    b = torch.randint(-128, 128, (3, 100), device=DEVICE, dtype=torch.int8)
    one = torch.ones(4096, 1, device=DEVICE)
    y = torch.full((4096, 3), float("nan"), device=DEVICE)
    locks = new_locks(torch.device(DEVICE))
    w8a8_triton.gemm(a, one, b, one[:3], None, locks, y, TILES[-1])
    assert torch.equal(y, w8a8.reference.matmul_int32(a, b).float())


def poison_parts(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Fill the workspace for parts of K: what no program wrote must not be added up."""
    make = module.new_parts

    def poisoned(tile: Tile, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        parts = make(tile, m, n, dtype, device)
        return parts.fill_(float("nan") if dtype.is_floating_point else 1_234_567)

    monkeypatch.setattr(module, "new_parts", poisoned)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("spec", "n", "k"),
    [
        (QuantSpec(4, 32), 17, 96),
        (QuantSpec(4, 64), 63, 576),
        (QuantSpec(4, 128), 33, 1152),
        (QuantSpec(4, 256), 3, 512),
        (QuantSpec(4), 100, 63),
        (QuantSpec(4), 1, 576),
        (QuantSpec(8), 17, 100),
        (QuantSpec(8), 64, 576),
        (QuantSpec(8, 64), 63, 192),
        (QuantSpec(8, 128), 3, 384),
    ],
    ids=str,
)
def test_wna16(spec: QuantSpec, n: int, k: int, dtype: torch.dtype) -> None:
    weight = signed_weight(n, k, spec, dtype)
    linear = bind(weight, "triton", dtype)
    for tokens in (3 if n == 1 else 1, 17, 70):  # A single sum may all but cancel.
        x = torch.randn(tokens, k, device=DEVICE, dtype=dtype)
        assert check_linear(linear, x, weight) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("n", "k", "group"), [(20, 172, 4), (3, 120, 24), (5, 384, 96), (5, 768, 192)]
)
def test_groups_that_are_no_whole_planes(n: int, k: int, group: int) -> None:
    weight = signed_weight(n, k, QuantSpec(4, group), BF16)
    x = torch.randn(3, k, device=DEVICE, dtype=BF16)
    assert check_linear(bind(weight, "triton", BF16), x, weight) < 2 * TOLERANCE[BF16]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, None)])
def test_wna16_writes_its_output_and_nothing_else(
    tile: Tile, bits: int, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_parts(monkeypatch, wna16_triton)
    spec = QuantSpec(bits, group)
    weight = signed_weight(33, 640, spec, FP16)
    words = to_planar(pack_int32(weight.ints, bits), bits, group)
    locks = new_locks(torch.device(DEVICE))
    bias = torch.randn(33, device=DEVICE, dtype=FP16)
    for m in (3, 70):
        x = torch.randn(m, 640, device=DEVICE, dtype=FP16)
        y = torch.full((m + 1, 33), float("nan"), device=DEVICE, dtype=FP16)
        form = {"bits": bits, "group_size": group, "tile": tile}
        wna16_triton.gemm(x, words, weight.scales, bias, locks, y[:m], **form)
        assert check_linear(lambda _, y=y[:m]: y, x, weight, bias) < TOLERANCE[FP16]
        assert y[m].isnan().all()
        assert not locks.any()


def test_activations_are_quantized_as_in_the_reference() -> None:
    x = torch.randn(40, 577, device=DEVICE) * torch.logspace(-6, 4, 40, device=DEVICE)[:, None]
    x[7] = 0
    q, scale = quantize.per_token(x)
    wanted_q, wanted_scale = w8a8.reference.quantize_per_token(x)
    assert torch.equal(q, wanted_q)
    assert torch.equal(scale, wanted_scale)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_row_alone(value: float) -> None:
    x = torch.randn(3, 33, device=DEVICE)
    x[1, 5] = value
    q, scale = quantize.per_token(x)
    assert scale.isfinite().flatten().tolist() == [True, False, True]
    assert torch.equal(q[::2], w8a8.reference.quantize_per_token(x)[0][::2])


def test_the_largest_value_does_not_wrap() -> None:
    x = torch.tensor([[-3.3, 3.3, 1.1]], device=DEVICE)
    q, _ = quantize.per_token(x)
    assert q.tolist() == [[-127, 127, 42]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 63), (17, 576), (2, 4096)])
def test_fused_with_rmsnorm_and_swiglu(m: int, k: int, dtype: torch.dtype) -> None:
    x = 3 * torch.randn(m, k, device=DEVICE, dtype=dtype)
    weight = torch.randn(k, device=DEVICE, dtype=dtype)
    both = torch.randn(m, 2 * k, device=DEVICE, dtype=dtype)
    halves = both[:, :k], both[:, k:]
    found = [quantize.rmsnorm(x, weight, 1e-5), quantize.swiglu(*halves)]
    wanted = [quantize_reference.rmsnorm(x, weight, 1e-5), quantize_reference.swiglu(*halves)]
    for (q, scale), (wanted_q, wanted_scale) in zip(found, wanted, strict=True):
        # A root or a sum in another order may carry a value over a rounding boundary: by one step.
        steps = (q.int() - wanted_q.int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 0.02
        torch.testing.assert_close(scale, wanted_scale, rtol=TOLERANCE[dtype] * 2, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_norm_and_mlp_fused_are_those_of_the_reference(bias: bool) -> None:
    def linear(n: int, k: int) -> QuantLinear:
        made = QuantLinear(k, n, W8A8, bias=bias, dtype=FP16, device=DEVICE)
        weight = random_weight(n, k, W8A8, DEVICE, FP16)
        made.weight, made.weight_scale = weight.ints, weight.scales
        if made.bias is not None:
            nn.init.normal_(made.bias)
        return made

    x = torch.randn(2, 3, 100, device=DEVICE, dtype=FP16)
    weight = nn.Parameter(torch.randn(100, device=DEVICE, dtype=FP16), requires_grad=False)
    linears = [linear(63, 100), linear(63, 100), linear(100, 63)]
    normed = nn.functional.rms_norm(x.float(), [100], eps=1e-5).to(FP16) * weight
    gate, up, down = (partial(reference_linear, weight=m.qtensor(), bias=m.bias) for m in linears)
    wanted = down(nn.functional.silu(gate(normed).to(FP16)) * up(normed).to(FP16))
    y = GatedMlp(*linears)(Int8Norm(weight, 1e-5)(x))
    assert y.shape == x.shape
    # A root in another order carries a value over a rounding boundary now and then.
    assert relative_error(y, wanted) < 5 * TOLERANCE[FP16]


@pytest.mark.parametrize("kernel", ["w8a8", "w4a16"])
def test_tuning_measures_right_tiles_only(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "ROUND_SECONDS", 0)
    monkeypatch.setattr(bench, "last_cache", lambda _: 10_000)
    monkeypatch.setattr(tune, "space", lambda *a: space(*a)[:1])
    device = torch.device(DEVICE)
    tiles = list(tune.candidates(kernel, 16, 16, 1024, gpu_of(device)))
    assert {tile.SPLITS for tile in tiles} == {1, 2}
    best, microseconds = tune.fastest(kernel, 16, 16, 1024, device)
    assert best in tiles
    assert microseconds > 0
    monkeypatch.setattr(tune, "relative_error", lambda *_: 0.5)
    with pytest.raises(RuntimeError, match=r"16x16x1024 .* is off by 0\.5"):
        tune.fastest(kernel, 16, 16, 1024, device)


def test_every_launch_is_on_the_gpu_of_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    for module in (quantize, w8a8_triton, wna16_triton):
        monkeypatch.setattr(module, "current", lambda d: devices.append(d) or nullcontext())
    x = torch.randn(2, 32, device=DEVICE, dtype=FP16)
    for spec in (W8A8, QuantSpec(4)):
        bind(random_weight(16, 32, spec, DEVICE, FP16), "triton", FP16)(x)
    quantize.rmsnorm(x, x[0], 1e-5)
    quantize.swiglu(x, x)
    assert devices == [x.device] * 5


def test_leading_dimensions_stay_and_no_tokens_give_no_rows() -> None:
    for spec in (W8A8, QuantSpec(4, 32)):
        linear = bind(random_weight(16, 32, spec, DEVICE, FP16), "triton", FP16)
        assert linear(torch.randn(2, 3, 32, device=DEVICE, dtype=FP16)).shape == (2, 3, 16)
        assert linear(torch.empty(0, 32, device=DEVICE, dtype=FP16)).shape == (0, 16)
