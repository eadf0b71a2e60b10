"""The order of words that Triton's kernels want: every value in its place, and back again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.kernels.wna16 import planar
from compress.qtensor import QuantSpec, pack_int32
from compress.runtime.linear import QuantLinear

BITS = st.sampled_from([4, 8])
GROUPS = st.sampled_from([None, 4, 32, 64, 96, 128])


@given(n=st.integers(1, 9), k=st.integers(1, 700), bits=BITS, group=GROUPS, seed=st.integers(0))
def test_back_and_forth(n: int, k: int, bits: int, group: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    words = -(-k * bits // 32)
    packed = torch.randint(-(2**31), 2**31, (n, words), dtype=torch.int32, generator=generator)
    there = planar.to_planar(packed, bits, group)
    assert there.shape == (n, -(-words // planar.block_words(group)) * planar.block_words(group))
    assert torch.equal(planar.from_planar(there, bits, group, k), packed)


@given(bits=BITS, group=GROUPS, data=st.data())
def test_where_a_value_goes(bits: int, group: int | None, data: st.DataObject) -> None:
    width = planar.block_words(group)
    k = data.draw(st.integers(0, 3 * width * 32 // bits - 1))
    ints = torch.zeros((1, 3 * width * 32 // bits), dtype=torch.int8)
    empty = planar.to_planar(pack_int32(ints, bits), bits, group)
    ints[0, k] = 1
    changed = planar.to_planar(pack_int32(ints, bits), bits, group) ^ empty
    block, within = divmod(k, width * 32 // bits)
    plane, place = divmod(within, 2 * width)
    word, half = divmod(place, 2)
    assert changed.nonzero().tolist() == [[0, block * width + word]]
    # Adding 1 to a stored 2^(bits-1) sets the lowest bit of its field.
    assert int(changed[0, block * width + word]) == 1 << (bits * plane + 16 * half)


def test_what_is_added_stands_for_zeros() -> None:
    for bits in (4, 8):
        ones = pack_int32(torch.ones((2, 1), dtype=torch.int8), bits)
        there = planar.to_planar(ones, bits, None)
        ints = planar.from_planar(there, bits, None, 32 * planar.WORDS // bits)
        zeros = pack_int32(torch.zeros((2, 32 * planar.WORDS // bits), dtype=torch.int8), bits)
        assert torch.equal(ints[:, 1:], zeros[:, 1:])


@pytest.mark.parametrize("spec", [QuantSpec(4, 32), QuantSpec(8)], ids=str)
def test_a_linear_keeps_its_weight_whatever_it_is_bound_to(
    spec: QuantSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is installed on Linux only")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    linear = QuantLinear(96, 5, spec, bias=False, dtype=torch.float32)
    limits = (spec.qmin, spec.qmax + 1)
    ints = torch.randint(*limits, (5, 96), dtype=torch.int8)
    packed = pack_int32(ints, spec.bits)
    linear.get_buffer("weight_packed").copy_(packed)
    linear.get_buffer("weight_shape").copy_(torch.tensor([5, 96]))
    for backend in ("triton", "cpu", "triton", "reference"):
        linear.prepare(backend, torch.float32)
        in_order = torch.equal(linear.get_buffer("weight_packed"), packed)
        assert in_order == (backend != "triton")
        assert torch.equal(linear.qtensor().ints, ints)
        linear.to(torch.float64)
        assert torch.equal(linear.qtensor().ints, ints)
