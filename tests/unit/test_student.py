"""A student's loss: over real positions alone, the same in parts, and what each objective says."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from compress.algorithms.soft_labels import teacher_log_probabilities, top_k
from compress.runtime.loader import load
from compress.training import long_window
from compress.training.labels import NOTHING, Batch
from compress.training.student import LOSSES, Objective, loss

T, V, K = 24, 64, 4


@pytest.fixture
def student(tiny_model: Path) -> PreTrainedModel:
    return load(tiny_model, dtype=torch.float32)


@pytest.fixture
def batch(student: PreTrainedModel) -> Batch:
    """Two windows, the second padded, and labels by nobody in particular."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (2, T), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    follows = ids.roll(-1, 1)
    follows[0, -1] = NOTHING
    follows[1, 14:] = NOTHING
    said = torch.randn(2, T, student.config.vocab_size, generator=generator)
    kept, probabilities, rest = top_k(said, K)
    return Batch(ids, mask, follows, kept.long(), teacher_log_probabilities(probabilities, rest))


@pytest.mark.parametrize("divergence", LOSSES)
def test_a_loss_in_parts_with_blocks_made_again_is_the_same(
    student: PreTrainedModel, batch: Batch, divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_window, "CHUNK", 7)
    objective = Objective(divergence, temperature=1.5, hard=0.3)
    found = []
    for recompute in (False, True):
        student.requires_grad_()
        student.zero_grad()
        value = loss(student, batch, objective, recompute=recompute)
        value.backward()
        gradients = torch.cat([p.grad.flatten() for p in student.parameters()])  # type: ignore[union-attr]
        found.append((value.detach(), gradients))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)
    assert not student.training
    assert float(found[0][1].abs().max()) > 1e-3


def test_padding_changes_nothing(student: PreTrainedModel, batch: Batch) -> None:
    objective = Objective("kl", hard=0.5)
    before = loss(student, batch, objective)
    batch.ids[1, 15:] = 5
    batch.teacher[1, 15:] = -100.0
    assert torch.equal(loss(student, batch, objective), before)


def test_parts_of_padding_alone_change_nothing(
    student: PreTrainedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_window, "CHUNK", 7)
    batch.mask[0, 13:] = 0
    batch.mask[1, 10:] = 0
    objective = Objective("kl", temperature=1.5)
    found = loss(student, batch, objective, recompute=True)
    assert torch.allclose(found, loss(student, batch.part(slice(13)), objective), rtol=1e-5)


def test_hard_labels_are_the_next_tokens_of_the_text(
    student: PreTrainedModel, batch: Batch
) -> None:
    logits = student(batch.ids).logits
    follows = torch.cat([logits[0, :-1], logits[1, :14]])
    tokens = torch.cat([batch.ids[0, 1:], batch.ids[1, 1:15]])
    wanted = F.cross_entropy(follows, tokens, reduction="sum") / batch.mask.sum()
    assert torch.allclose(loss(student, batch, Objective("kl", hard=1.0)), wanted, rtol=1e-4)


@pytest.mark.parametrize("divergence", LOSSES)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    student: PreTrainedModel, batch: Batch, divergence: str
) -> None:
    kept, probabilities, rest = top_k(student(batch.ids).logits, K)
    own = Batch(
        batch.ids,
        batch.mask,
        batch.follows,
        kept.long(),
        teacher_log_probabilities(probabilities, rest),
    )
    assert float(loss(student, own, Objective(divergence))) == pytest.approx(0, abs=1e-5)
    assert float(loss(student, batch, Objective(divergence))) > 0.005


def test_sixteen_bit_arithmetic_is_close(student: PreTrainedModel, batch: Batch) -> None:
    objective = Objective("kl")
    exact = float(loss(student, batch, objective))
    found = float(loss(student, batch, objective, precision=torch.bfloat16))
    assert found != exact
    assert found == pytest.approx(exact, rel=0.02)
