"""RMSNorm and attention of one token on CPU against the reference, and operands that do not fit."""

import pytest
import torch
from torch import Tensor

from compress.kernels import token
from compress.kernels.check import relative_error
from compress.kernels.token import reference

pytestmark = pytest.mark.skipif(not token.available(), reason="no C++ compiler here")


def bf16(*sizes: int) -> Tensor:
    return torch.randn(*sizes).bfloat16()


def of_one_token(groups: int, queries: int, size: int, room: int) -> tuple[Tensor, ...]:
    """qkv, cos, sin, keys and values; the room's rest is NaN, which nothing may touch."""
    angles = torch.randn(size // 2).repeat(2)
    kept = bf16(groups, room, size), bf16(groups, room, size)
    qkv = bf16(1, groups * (queries + 2) * size)
    return qkv, angles.cos().bfloat16(), angles.sin().bfloat16(), *kept


@pytest.mark.parametrize("k", [1, 31, 64, 576])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rmsnorm(k: int, size: float) -> None:
    x, weight = size * bf16(3, k), bf16(k)
    found, wanted = token.ops().rmsnorm(x, weight, 1e-5), reference.rmsnorm(x, weight, 1e-5)
    # A root in another order carries a value over a rounding boundary now and then.
    assert relative_error(found, wanted) < 2**-10
    assert (found - wanted).abs().le(2**-7 * wanted.abs()).all()


@pytest.mark.parametrize("position", [0, 1, 37, 299])
@pytest.mark.parametrize(("groups", "queries", "size"), [(3, 3, 64), (1, 8, 8), (2, 1, 34)])
def test_attention(position: int, groups: int, queries: int, size: int) -> None:
    qkv, cos, sin, keys, values = of_one_token(groups, queries, size, 300)
    keys[:, position:] = values[:, position:] = float("nan")
    their_keys, their_values = keys.clone(), values.clone()
    found = token.ops().attend(qkv, cos, sin, keys, values, position, size**-0.5)
    wanted = reference.attend(qkv, cos, sin, their_keys, their_values, position, size**-0.5)
    assert relative_error(found, wanted) < 2**-9
    assert torch.equal(keys[:, : position + 1], their_keys[:, : position + 1])
    assert torch.equal(values[:, : position + 1], their_values[:, : position + 1])
    assert keys[:, position + 1 :].isnan().all()


def test_scores_too_large_for_an_exponential_are_those_of_softmax() -> None:
    qkv, *rest = of_one_token(1, 2, 16, 9)
    found = token.ops().attend(1000 * qkv, *rest, 8, 1.0)
    assert relative_error(found, reference.attend(1000 * qkv, *rest, 8, 1.0)) < 2**-9


@pytest.mark.parametrize("n", [1, 16, 37, 1536])
def test_swiglu(n: int) -> None:
    gate_up = bf16(3, 2 * n)
    gate_up[:, : n // 2] *= torch.logspace(-30, 38, n // 2).bfloat16()
    found, wanted = token.ops().swiglu(gate_up), reference.swiglu(gate_up)
    # An exponential's last bits carry a value over a rounding boundary now and then, and it ends
    # at e^88, where what is left of the gate is nothing or next to it.
    same = (found == wanted) | ((found - wanted).abs() <= 1e-30)
    assert (same | ((found - wanted).abs() <= 2**-7 * wanted.abs())).all()
    assert same.float().mean() > 0.99


def test_swiglu_of_what_is_not_finite_shows_it() -> None:
    gate_up = bf16(1, 2 * 37)
    gate_up[0, 3], gate_up[0, 20], gate_up[0, 35] = float("nan"), float("inf"), float("nan")
    gate_up[0, 37 + 9] = float("nan")
    found = ~token.ops().swiglu(gate_up)[0].isfinite()
    assert found.nonzero().flatten().tolist() == [3, 9, 20, 35]


def test_operands_that_do_not_fit_are_refused() -> None:
    qkv, cos, sin, keys, values = of_one_token(2, 2, 16, 8)
    attend = token.ops().attend
    for refused in (
        lambda: token.ops().rmsnorm(qkv, cos, 1e-5),
        lambda: token.ops().swiglu(qkv[:, 1:]),
        lambda: attend(qkv[:, 1:], cos, sin, keys, values, 0, 1.0),
        lambda: attend(qkv, cos, sin[:8], keys, values, 0, 1.0),
        lambda: attend(qkv, cos, sin, keys, values[:, 1:], 0, 1.0),
    ):
        with pytest.raises(RuntimeError, match="wanted contiguous"):
            refused()
    with pytest.raises(RuntimeError, match="token 8 of a cache for 8"):
        attend(qkv, cos, sin, keys, values, 8, 1.0)
    with pytest.raises(RuntimeError, match="wanted heads of some size"):
        attend(qkv, cos, sin, keys[:0], values[:0], 0, 1.0)
    with pytest.raises(RuntimeError, match="wanted a query or more to each key"):
        attend(qkv[:, :64], cos, sin, keys, values, 0, 1.0)
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        attend(qkv.float(), cos, sin, keys, values, 0, 1.0)
