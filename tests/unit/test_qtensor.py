"""Rounding, packing and their inverses, on odd shapes and on every integer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.qtensor import QTensor, QuantSpec, dequantize, pack_int32, quantize, unpack_int32


@pytest.mark.parametrize(
    ("spec", "scheme", "qmin", "qmax"),
    [
        (QuantSpec(8, activation_bits=8), "W8A8", -128, 127),
        (QuantSpec(8), "W8A16", -128, 127),
        (QuantSpec(4, group_size=64), "W4A16 g64", -8, 7),
        (QuantSpec(4), "W4A16", -8, 7),
    ],
)
def test_spec_names_its_scheme_and_grid(spec: QuantSpec, scheme: str, qmin: int, qmax: int) -> None:
    assert (spec.scheme, spec.qmin, spec.qmax) == (scheme, qmin, qmax)


def test_groups_must_divide() -> None:
    assert QuantSpec(4, group_size=64).groups(576) == 9
    assert QuantSpec(4).groups(577) == 1
    with pytest.raises(ValueError, match="group size 128 does not divide 576"):
        QuantSpec(4, group_size=128).groups(576)


def test_rounds_half_to_even_and_clips() -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 6.6, 9.0, -9.0]])
    ints = quantize(weight, torch.ones(1, 1), QuantSpec(4))
    assert ints.tolist() == [[0, 2, 2, 0, -2, 7, 7, -8]]
    assert ints.dtype == torch.int8


def test_each_group_has_its_own_scale() -> None:
    weight = torch.tensor([[1.0, 2.0, 30.0, -40.0], [4.0, 8.0, 0.1, 0.2]])
    scales = torch.tensor([[1.0, 10.0], [4.0, 0.1]])
    ints = quantize(weight, scales, QuantSpec(4, group_size=2))
    assert ints.tolist() == [[1, 2, 3, -4], [1, 2, 1, 2]]
    assert torch.allclose(dequantize(ints, scales), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group"), [(63, 100, None), (5, 576, 64), (1, 32, 32)])
def test_error_is_half_a_step_where_nothing_clips(
    dtype: torch.dtype, n: int, k: int, group: int | None
) -> None:
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    spec = QuantSpec(8, group)
    grouped = weight.float().reshape(n, spec.groups(k), -1)
    # A little more than absmax / qmax, so that rounding the scale to 16 bit clips nothing.
    scales = (grouped.abs().amax(-1) / spec.qmax * 1.01).to(dtype)
    ints = quantize(weight, scales, spec)
    error = (dequantize(ints, scales) - weight.float()).reshape(grouped.shape).abs().amax(-1)
    assert (error <= scales.float() / 2 * (1 + 1e-5)).all()
    assert QTensor(ints, scales, spec).dequantize(dtype).dtype == dtype


@pytest.mark.parametrize("bits", [4, 8])
def test_requantizing_changes_nothing(bits: int) -> None:
    spec = QuantSpec(bits, group_size=16)
    ints = torch.randint(spec.qmin, spec.qmax + 1, (7, 48)).to(torch.int8)
    scales = (torch.rand(7, 3) + 0.1).to(torch.bfloat16)
    assert torch.equal(quantize(dequantize(ints, scales), scales, spec), ints)


def test_packing_by_hand() -> None:
    # Stored as value + 8, the first element in the lowest four bits.
    nibbles = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8)
    assert pack_int32(nibbles, 4).tolist() == [[0xF6543210 - (1 << 32)]]
    octets = torch.tensor([[-128, -127, 0, 1]], dtype=torch.int8)
    assert pack_int32(octets, 8).tolist() == [[0x81800100 - (1 << 32)]]


@given(
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 9),
    k=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_unpacking_undoes_packing(bits: int, n: int, k: int, seed: int) -> None:
    spec = QuantSpec(bits)
    generator = torch.Generator().manual_seed(seed)
    ints = torch.randint(spec.qmin, spec.qmax + 1, (n, k), generator=generator).to(torch.int8)
    packed = pack_int32(ints, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (n, -(-k * bits // 32))
    assert torch.equal(unpack_int32(packed, bits, k), ints)
