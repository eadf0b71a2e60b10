"""GPTQ against its definition and against plain rounding."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.algorithms import gptq as gptq_module
from compress.algorithms.gptq import DAMPING, factor, gptq
from compress.algorithms.rtn import rtn
from compress.machine import CLEAR_REFS, PeakMemory, high_water
from compress.qtensor import QuantSpec

W8, W4, W4G32 = QuantSpec(8), QuantSpec(4), QuantSpec(4, 32)


def correlated(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs [rows, k] whose channels say much of each other, of sizes that differ tenfold."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k // 4, k, generator=generator)
    own = 0.3 * torch.randn(rows, k, generator=generator)
    sizes = torch.logspace(-0.5, 0.5, k)[torch.randperm(k, generator=generator)]
    return (torch.randn(rows, k // 4, generator=generator) @ mixing / (k // 4) ** 0.5 + own) * sizes


def weights(n: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", [W8, W4, W4G32], ids=lambda s: s.scheme)
@pytest.mark.parametrize("k", [64, 160, 288])
def test_outputs_move_far_less_than_by_plain_rounding(spec: QuantSpec, k: int) -> None:
    weight, inputs = weights(48, k), correlated(3000, k)
    seen, unseen = inputs[:2000], inputs[2000:]
    rounded = gptq(weight, factor(seen.T @ seen), spec, torch.float32)
    plain = rtn(weight, spec, torch.float32)

    def error(q: torch.Tensor) -> float:
        return float((unseen @ (weight - q).T).norm())

    assert error(rounded.dequantize()) < 0.75 * error(plain.dequantize())
    assert torch.equal(rounded.scales, plain.scales)


def test_independent_channels_are_rounded_to_nearest() -> None:
    weight = weights(16, 96)
    rounded = gptq(weight, factor(torch.diag(torch.logspace(-2, 2, 96))), W4G32, torch.float32)
    assert torch.equal(rounded.ints, rtn(weight, W4G32, torch.float32).ints)


def test_a_column_at_a_time_as_in_the_paper() -> None:
    """Without blocks: each column's error goes to the columns that come, by the inverse."""
    weight, inputs = weights(8, 140), correlated(500, 140)
    hessian = inputs.T @ inputs
    found = factor(hessian.clone())
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    damped = hessian[order][:, order].double()
    damped.diagonal().add_(DAMPING * hessian.diagonal().mean())
    scale = rtn(weight, W4, torch.float32).scales.double()[:, 0]
    rest, ints = weight.double()[:, order].clone(), torch.zeros(8, 140)
    for column in range(140):
        ints[:, column] = torch.round(rest[:, column] / scale).clamp(-8, 7)
        error = rest[:, column] - ints[:, column] * scale
        inverse = torch.linalg.inv(damped[column:, column:])
        rest[:, column:] -= error.unsqueeze(1) * (inverse[0] / inverse[0, 0])
    expected = ints[:, torch.argsort(order)]
    same = gptq(weight, found, W4, torch.float32).ints.float() == expected
    assert same.float().mean() > 0.99  # float32 sends a value near a half the other way


@pytest.mark.parametrize("together", [1, 7, 16])
def test_a_few_output_channels_at_a_time_give_the_same(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, inputs = weights(33, 160), correlated(500, 160)
    hessian = inputs.T @ inputs
    whole = factor(hessian.clone())
    at_once = gptq(weight, whole, W4G32, torch.bfloat16)
    monkeypatch.setattr(gptq_module, "TOGETHER", together)
    found = factor(hessian)
    assert torch.equal(found.upper, whole.upper)
    by_few = gptq(weight, found, W4G32, torch.bfloat16)
    assert torch.equal(by_few.ints, at_once.ints)


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="only Linux resets the peak of memory")
def test_the_factor_takes_a_matrix_and_a_quarter_beside_the_hessian() -> None:
    # Of its own process, whose allocator gives back what is freed, the peak is that of tensors.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, stdout=subprocess.PIPE, check=True
    )
    assert 1.2 < float(done.stdout) < 1.45


def main() -> None:
    """Print the peak beside a Hessian while it is factored, in matrices of its size."""
    gptq_module.TOGETHER = 64
    hessian = torch.eye(4096) + 0.1
    factor(torch.eye(4096))  # what the libraries take once for a matrix of this size
    with PeakMemory() as memory:
        before = high_water()
        factor(hessian)
    print((memory.peak - before) / hessian.nbytes)


@given(k=st.sampled_from([8, 33, 130]), rank=st.integers(1, 8), seed=st.integers(0, 99))
def test_few_or_dead_inputs_are_damped_until_it_works(k: int, rank: int, seed: int) -> None:
    inputs = torch.randn(rank, k, generator=torch.Generator().manual_seed(seed))
    inputs[:, ::3] = 0
    found = factor(inputs.T @ inputs)
    rounded = gptq(weights(5, k), found, W4, torch.bfloat16)
    assert found.damping >= DAMPING
    assert int(rounded.ints.min()) >= W4.qmin
    assert int(rounded.ints.max()) <= W4.qmax
    assert torch.isfinite(rounded.dequantize()).all()


def test_a_hessian_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not positive definite"):
        factor(-torch.eye(4) * 100)


@pytest.mark.parametrize("k", [1, 7, 130, 513, 1100])
def test_the_factor_is_that_of_the_inverse(k: int) -> None:
    inputs = correlated(2 * k + 8, max(k, 4))[:, :k]
    hessian = (inputs.T @ inputs).double()
    found = factor(hessian.float())
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)[found.order][:, found.order]
    upper = torch.linalg.cholesky(inverse, upper=True)
    assert float((found.upper - upper).norm() / upper.norm()) < 1e-5


def test_a_factor_inverted_by_halves_and_slices_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = correlated(800, 300)
    whole = factor(inputs.T @ inputs)
    monkeypatch.setattr(gptq_module, "SOLVED", 8)
    monkeypatch.setattr(gptq_module, "TOGETHER", 50)
    found = factor(inputs.T @ inputs)
    assert torch.equal(found.order, whole.order)
    assert float((found.upper - whole.upper).norm() / whole.upper.norm()) < 1e-6


if __name__ == "__main__":
    main()
