"""Divergences: zero where the two agree, above elsewhere, and each other's limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress.algorithms.divergence import forward_kl, jensen_shannon, reverse_kl, soften
from compress.algorithms.soft_labels import (
    LEAST_MASS,
    student_log_probabilities,
    teacher_log_probabilities,
    top_k,
)

seeds = st.integers(0, 2**31 - 1)
sizes = st.floats(0.1, 8.0)
betas = st.floats(0.05, 0.95)


def logits(seed: int, size: float, classes: int = 11) -> Tensor:
    return size * torch.randn(3, 4, classes, generator=torch.Generator().manual_seed(seed))


def pair(seed: int, size: float) -> tuple[Tensor, Tensor]:
    p, q = logits(seed, size), logits(seed + 1, size)
    return p.double().log_softmax(-1), q.double().log_softmax(-1)


@given(seeds, sizes, betas)
def test_every_divergence_is_zero_at_home_and_above_zero_away(
    seed: int, size: float, beta: float
) -> None:
    p, q = pair(seed, size)
    for divergence in (forward_kl, reverse_kl, lambda p, q: jensen_shannon(p, q, beta)):
        assert float(divergence(p, p)) == pytest.approx(0, abs=1e-12)
        assert float(divergence(p, q)) > 0


@given(seeds, sizes)
def test_reverse_is_forward_the_other_way_round(seed: int, size: float) -> None:
    p, q = pair(seed, size)
    assert float(reverse_kl(p, q)) == pytest.approx(float(forward_kl(q, p)), rel=1e-12)
    by_hand = (p.exp() * (p - q)).sum(-1).mean()
    assert float(forward_kl(p, q)) == pytest.approx(float(by_hand), rel=1e-9)


@given(seeds, sizes, betas)
def test_jensen_shannon_is_bounded_and_mirrors(seed: int, size: float, beta: float) -> None:
    p, q = pair(seed, size)
    found = float(jensen_shannon(p, q, beta))
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert found <= entropy + 1e-12
    assert found == pytest.approx(float(jensen_shannon(q, p, 1 - beta)), rel=1e-9)


def test_jensen_shannon_tends_to_both_kl() -> None:
    p, q = pair(0, 1.0)
    forward = float(jensen_shannon(p, q, 1e-5)) / 1e-5
    reverse = float(jensen_shannon(p, q, 1 - 1e-5)) / 1e-5
    assert forward == pytest.approx(float(forward_kl(p, q)), rel=1e-3)
    assert reverse == pytest.approx(float(reverse_kl(p, q)), rel=1e-3)


@given(seeds, sizes, st.floats(0.5, 4.0))
def test_softening_is_what_dividing_the_logits_does(
    seed: int, size: float, temperature: float
) -> None:
    x = logits(seed, size).double()
    found = soften(x.log_softmax(-1), temperature)
    assert torch.allclose(found, (x / temperature).log_softmax(-1))


@given(seeds, sizes, st.integers(1, 10))
def test_kept_classes_and_the_rest_are_the_teacher_s_distribution(
    seed: int, size: float, k: int
) -> None:
    x = logits(seed, size)
    ids, probabilities, rest = top_k(x, k)
    classes = teacher_log_probabilities(probabilities, rest)
    assert torch.allclose(classes.exp().sum(-1), torch.ones(3, 4))
    exact = x.softmax(-1).gather(-1, ids.long())
    assert torch.allclose(classes.exp()[..., :k], exact, rtol=2e-3, atol=2 * LEAST_MASS)
    same = student_log_probabilities(x, ids)
    assert torch.allclose(same.exp(), classes.exp(), rtol=2e-3, atol=2e-5)


@given(seeds, sizes)
def test_merging_the_rest_gives_a_lower_bound_that_every_token_reaches(
    seed: int, size: float
) -> None:
    x, y = logits(seed, size), logits(seed + 1, size)
    full = float(forward_kl(x.log_softmax(-1), y.log_softmax(-1)))
    for k, reached in ((3, 0.0), (10, 0.98)):
        ids, probabilities, rest = top_k(x, k)
        found = float(
            forward_kl(
                teacher_log_probabilities(probabilities, rest), student_log_probabilities(y, ids)
            )
        )
        assert reached * full - 1e-3 <= found <= 1.02 * full + 1e-3


def test_a_small_remaining_mass_is_kept_where_a_sum_of_halves_would_lose_it() -> None:
    x = torch.tensor([10.0, 9.0, 0.0, 0.0])
    _, _, rest = top_k(x, 2)
    exact = float(x.double().softmax(-1)[2:].sum())
    assert float(rest) == pytest.approx(exact, rel=0.02)
    assert exact < 1e-4
