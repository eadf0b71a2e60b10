"""Faults planted into the text of the Triton kernels are found; run by test_triton.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compress.kernels.bench import random_weight
from compress.kernels.check import MAX_RELATIVE_ERROR, check_linear, reference_linear
from compress.kernels.splits import new_locks
from compress.kernels.tiles import Tile
from compress.kernels.w8a8 import triton as w8a8_triton
from compress.kernels.wna16 import triton as wna16_triton
from compress.kernels.wna16.planar import to_planar
from compress.qtensor import QuantSpec, pack_int32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16 = torch.float16
W8A8 = QuantSpec(8, activation_bits=8)


def broken_copy(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """`module` with a fault planted into its text, and operators of names of their own."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert old in text, f"no {old!r} to break"
    file = folder / "broken.py"
    own_names = f'"{folder.name}::'.replace("-", "_")
    file.write_text(text.replace(old, new).replace('"compress::', own_names))
    spec = importlib.util.spec_from_file_location("broken", file)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    return broken


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.minimum(first + span, K)", "tl.minimum(first + span, K - BLOCK_K)"),
        ("* w_scale[None, :]", "* tl.max(w_scale, 0)"),
        ("range(first,", "range(0,"),
        ("tl.minimum(n, N - 1)", "tl.minimum(n, N - 2)"),
        ("if SPLITS > 1:", "if SPLITS > 4:"),
    ],
)
def test_a_fault_in_w8a8_is_found(old: str, new: str, tmp_path: Path) -> None:
    broken = broken_copy(w8a8_triton, old, new, tmp_path)
    weight = random_weight(63, 1000, W8A8, DEVICE, FP16)
    linear = broken.prepare(weight.ints, weight.scales, None)
    x = torch.randn(5, 1000, device=DEVICE, dtype=FP16)
    assert check_linear(linear, x, weight) > 2 * MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(1 << (BITS - 1))", "(1 << (BITS - 1)) - 1"),
        ("tl.join(left, right)", "tl.join(right, left)"),
        ("word >> (p * BITS)", "word >> (p * BITS + 1)"),
        ("tl.minimum(start // GROUP, groups - 1)", "0"),
        ("group_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)\n    last", "pass\n    last"),
        ("first = tl.program_id(2)", "first = 0 * tl.program_id(2)"),
    ],
)
def test_a_fault_in_w4a16_is_found(old: str, new: str, tmp_path: Path) -> None:
    broken = broken_copy(wna16_triton, old, new, tmp_path)
    spec = QuantSpec(4, 64)
    weight = random_weight(63, 1088, spec, DEVICE, FP16)
    words = to_planar(pack_int32(weight.ints, 4), 4, 64)
    linear = broken.prepare(words, weight.scales, None, spec=spec)
    x = torch.randn(5, 1088, device=DEVICE, dtype=FP16)
    assert check_linear(linear, x, weight) > 2 * MAX_RELATIVE_ERROR


def test_a_lock_that_was_not_left_at_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = wna16_triton.new_parts
    monkeypatch.setattr(wna16_triton, "new_parts", lambda *a: make(*a).fill_(float("nan")))
    weight = random_weight(33, 1024, QuantSpec(8), DEVICE, FP16)
    words = to_planar(pack_int32(weight.ints, 8), 8, None)
    x = torch.randn(3, 1024, device=DEVICE, dtype=FP16)
    locks = new_locks(torch.device(DEVICE))
    tile, form = Tile(16, 64, 4, 4, 4), {"bits": 8, "group_size": None}
    for left, fine in ((0, True), (1, False)):
        locks.fill_(left)
        y = torch.full((3, 33), float("nan"), device=DEVICE, dtype=FP16)
        wna16_triton.gemm(x, words, weight.scales, None, locks, y, tile=tile, **form)
        expected = reference_linear(x, weight)
        assert torch.allclose(y.float(), expected, rtol=0.01, atol=0.05) == fine
