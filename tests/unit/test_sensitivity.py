"""What a variant costs, measured block by block, is what it costs in a whole model in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from families import family_config, random_model, save
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import sensitivity
from compress.algorithms.blockwise import clip_of
from compress.algorithms.rtn import rtn
from compress.collector import load_block_statistics
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.sensitivity import Sensitivity, Variant
from compress.trainable import ScaleLinear

IDS = torch.randint(3, 259, (3, 24), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[2, 15:] = 0
MLP = ("mlp.gate_proj", "mlp.up_proj")
VARIANTS = [
    [Variant(MLP, QuantSpec(4, 32)), Variant(("self_attn.o_proj",), QuantSpec(8))],
    [Variant(("mlp.down_proj",), QuantSpec(8, activation_bits=8)), Variant(MLP, QuantSpec(4))],
]


def made(family: str, folder: Path) -> Path:
    """A random model and, for its linears, rows of random inputs."""
    whole = random_model(family_config(family))
    save(whole, folder)
    draw = torch.Generator().manual_seed(5)
    for index in range(2):
        rows = {
            f"{name}.rows": torch.randn(40, module.in_features, generator=draw)
            for name, module in whole.named_modules()
            if isinstance(module, nn.Linear) and f"layers.{index}." in name
        }
        save_file(rows, folder / f"block_{index:03d}.safetensors")
    return folder


def measured(folder: Path, work: Path, batch: int = 2) -> list[list[float]]:
    work.mkdir(exist_ok=True)
    model = BlockModel(folder)
    return Sensitivity(model, IDS, MASK, VARIANTS, folder, torch.bfloat16, work, batch).measure()


def directly(model: PreTrainedModel, folder: Path, index: int, variant: Variant) -> float:
    """The KL of one variant: the whole model in memory, its linears exchanged."""

    def logprobs() -> Tensor:
        return model(IDS, attention_mask=MASK).logits.log_softmax(-1)[MASK.bool()]

    wanted = logprobs()
    statistics = load_block_statistics(folder, index)
    before = {}
    for name in variant.names:
        full = f"model.layers.{index}.{name}"
        linear = model.get_submodule(full)
        weight, rows = linear.get_parameter("weight"), statistics[f"{full}.rows"]
        clip = clip_of(weight, rows, None, variant.spec, torch.bfloat16)
        before[full] = linear
        served = ScaleLinear(rtn(weight, variant.spec, torch.bfloat16, clip), linear.bias)
        model.set_submodule(full, served)
    found = logprobs()
    for full, linear in before.items():
        model.set_submodule(full, linear)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "granite", "gemma3"])
def test_streamed_and_whole_agree(family: str, tmp_path: Path) -> None:
    folder = made(family, tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = measured(folder, tmp_path / "work")
    for index, variants in enumerate(VARIANTS):
        for number, variant in enumerate(variants):
            with torch.no_grad():
                wanted = directly(whole, folder, index, variant)
            assert found[index][number] == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert found[0][0] > 10 * found[0][1] > 0


def test_windows_together_and_logits_in_parts_change_nothing_but_the_last_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama", tmp_path / "model")
    apart = measured(folder, tmp_path / "apart", batch=1)
    monkeypatch.setattr(sensitivity, "LOGITS", 272 * 3 * 5)
    together = measured(folder, tmp_path / "together", batch=3)
    for one, other in zip(apart, together, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_stopped_after_any_block_it_goes_on_and_ends_with_the_same_figures(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama", tmp_path / "model")
    wanted = measured(folder, tmp_path / "left alone")
    entered: list[int] = []
    block, distances = BlockModel.block, Sensitivity._distances

    @contextmanager
    def failing(self: BlockModel, index: int) -> Iterator[nn.Module]:
        if index == blocks:
            raise InterruptedError
        with block(self, index) as found:
            yield found

    def failing_at_the_head(self: Sensitivity, states: object, index: int) -> list[float]:
        if index == 1:
            raise InterruptedError
        return distances(self, states, index)  # type: ignore[arg-type]

    @contextmanager
    def noting(self: BlockModel, index: int) -> Iterator[nn.Module]:
        entered.append(index)
        with block(self, index) as found:
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(BlockModel, "block", failing)
        patch.setattr(Sensitivity, "_distances", failing_at_the_head)
        with pytest.raises(InterruptedError):
            measured(folder, tmp_path / "work")
    monkeypatch.setattr(BlockModel, "block", noting)
    assert measured(folder, tmp_path / "work") == wanted
    assert entered == list(range(blocks, 2))
