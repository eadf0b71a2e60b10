"""The metric of a block's errors: what it weighs is what moves the model's predictions."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.blocks.metrics import ALIKE, Metrics
from compress.model import BlockModel


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(5, 500, (50, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def metrics(tiny_model: Path, ids: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    folder = tmp_path_factory.mktemp("metrics")
    save_file({"ids": ids, "mask": torch.ones_like(ids)}, folder / "windows.safetensors")
    made = Metrics(folder / "metrics")
    with torch.no_grad():
        made.make(BlockModel(tiny_model), folder / "windows.safetensors", 48, 8, seed=0)
    return made


def test_a_metric_is_symmetric_and_its_diagonal_is_1_in_the_mean(metrics: Metrics) -> None:
    metric = metrics.of(1, "cpu")
    assert metric is not None
    assert torch.allclose(metric, metric.T, atol=1e-5)
    assert float(metric.diagonal().mean()) == pytest.approx(1)
    assert float(torch.linalg.eigvalsh(metric)[0]) > 0.99 * ALIKE
    assert metrics.of(9, "cpu") is None
    assert not (metrics.folder / "streams").exists()


@pytest.mark.parametrize("index", [0, 3])
@torch.no_grad()
def test_errors_move_the_predictions_as_it_says(
    metrics: Metrics, tiny_model: Path, ids: Tensor, index: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    metric = metrics.of(index, "cpu")
    assert metric is not None
    values, directions = torch.linalg.eigh(metric)
    unseen = ids[48:]
    before = model(unseen).logits.log_softmax(-1)
    signs = torch.randn(2, 64, 1, generator=torch.Generator().manual_seed(1)).sign()

    def kl(direction: Tensor) -> float:
        change = 0.01 * signs * direction
        hook = model.model.layers[index].register_forward_hook(lambda *of: of[2] + change)
        after = model(unseen).logits.log_softmax(-1)
        hook.remove()
        return float((before.exp() * (before - after)).sum(-1).mean())

    most, middle, least = (kl(directions[:, number]) for number in (-1, len(values) // 2, 0))
    assert most > 5 * middle
    assert middle > 1.2 * least
