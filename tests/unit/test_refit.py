"""A linear fitted again: it finds what makes up for what is lacking, and keeps the rest."""

import pytest
import torch
from torch import Tensor

from compress.algorithms import refit as module
from compress.algorithms.refit import Sums, refit

N, K, TOKENS = 5, 12, 200


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sums(inputs: Tensor, lacking: Tensor, weights: Tensor | None = None) -> Sums:
    found = Sums(torch.empty(N, inputs.shape[-1]))
    weights = torch.ones(len(inputs), 1) if weights is None else weights
    for part in range(0, len(inputs), 70):
        rows = slice(part, part + 70)
        found.add(inputs[rows], lacking[rows], weights[rows])
    return found


def fitted(weight: Tensor, of: Sums) -> Tensor:
    return refit(weight, of, of)


def test_a_weight_that_would_lack_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight, wanted = drawn(TOKENS, K, seed=0), drawn(N, K, seed=1), drawn(N, K, seed=2)
    of = sums(inputs, inputs @ (wanted - weight).T)
    errors = []
    for damping in (1e-9, 0.5):
        monkeypatch.setattr(module, "DAMPINGS", (damping,))
        found = fitted(weight, of)
        error = (inputs @ (found - wanted).T).square().sum()
        errors.append(float(error))
        lacked = (inputs @ (weight - wanted).T).square().sum()
        assert of.gain(found - weight) == pytest.approx(float(lacked - error), rel=1e-4)
    assert errors[0] < 1e-6 < errors[1] < lacked


def test_what_was_not_seen_says_how_far_to_go() -> None:
    inputs, weight, wanted = drawn(TOKENS, K, seed=0), drawn(N, K, seed=1), drawn(N, K, seed=2)
    lacking = inputs @ (wanted - weight).T
    noisy = sums(inputs[:14], lacking[:14] + 3 * drawn(14, N, seed=3))
    unseen = sums(inputs[100:], lacking[100:])
    found = refit(weight, noisy, unseen)
    gains = [unseen.gain(module._moved(noisy, damping)) for damping in module.DAMPINGS]
    assert unseen.gain(found - weight) == pytest.approx(max(gains), rel=1e-4)
    assert gains[0] < max(gains)
    against = sums(inputs[100:], -lacking[100:])
    assert torch.equal(refit(weight, noisy, against), weight)


def test_inputs_that_were_never_seen_keep_their_weights() -> None:
    inputs, weight = drawn(TOKENS, K, seed=0), drawn(N, K, seed=1)
    inputs[:, 3] = 0
    found = fitted(weight, sums(inputs, drawn(TOKENS, N, seed=2)))
    assert torch.equal(found[:, 3], weight[:, 3])
    assert not torch.equal(found[:, 4], weight[:, 4])


def test_the_scale_of_a_channel_changes_nothing() -> None:
    inputs, weight, lacking = (
        drawn(*shape, seed=seed) for seed, shape in enumerate(((TOKENS, K), (N, K), (TOKENS, N)))
    )
    scale = torch.logspace(-3, 3, K)
    found = fitted(weight / scale, sums(inputs * scale, lacking)) * scale
    torch.testing.assert_close(found, fitted(weight, sums(inputs, lacking)), rtol=1e-3, atol=1e-4)


def test_tokens_count_by_their_weights() -> None:
    inputs, weight, lacking = drawn(60, K, seed=0), drawn(N, K, seed=1), drawn(60, N, seed=2)
    weights = torch.ones(60, 1)
    weights[:30] = 3
    thrice = torch.cat([inputs, inputs[:30], inputs[:30]])
    found = fitted(weight, sums(inputs, lacking, weights))
    wanted = fitted(weight, sums(thrice, torch.cat([lacking, lacking[:30], lacking[:30]])))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, fitted(weight, sums(inputs, lacking)), rtol=1e-2)
