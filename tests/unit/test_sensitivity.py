"""What a variant costs, block by block: as in a whole model in memory, and near its KL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family_config, random_model, save
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from compress.algorithms.blockwise import clip_of
from compress.algorithms.gptq import DAMPING, Factor, factor, gptq
from compress.algorithms.rtn import rtn
from compress.blocks import hessians
from compress.blocks.collector import Collector, load_block_statistics, picked_rows
from compress.budget import gradients, sensitivity
from compress.budget.sensitivity import Sensitivity, Variant
from compress.clock import Clock
from compress.errors import UserError
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.text.windows import Windows
from compress.training.trainable import ScaleLinear

IDS = torch.randint(3, 259, (3, 24), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[2, 15:] = 0
MLP = ("mlp.gate_proj", "mlp.up_proj")
VARIANTS = [
    [Variant(MLP, QuantSpec(4, 32)), Variant(("self_attn.o_proj",), QuantSpec(8))],
    [Variant(("mlp.down_proj",), QuantSpec(8, activation_bits=8)), Variant(MLP, QuantSpec(4))],
]
SEED = 7


def with_rows(folder: Path, model: PreTrainedModel) -> Path:
    """Add rows of random inputs for the linears of the model in `folder`."""
    draw = torch.Generator().manual_seed(5)
    for index in range(model.config.get_text_config().num_hidden_layers):
        rows = {
            f"{name}.rows": torch.randn(40, module.in_features, generator=draw)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and f"layers.{index}." in name
        }
        save_file(rows, folder / f"block_{index:03d}.safetensors")
    return folder


def made(family: str, folder: Path) -> Path:
    whole = random_model(family_config(family))
    save(whole, folder)
    return with_rows(folder, whole)


def of(folder: Path, work: Path, batch: int = 2, rounding: str = "nearest") -> Sensitivity:
    work.mkdir(exist_ok=True)
    text, model = Windows(IDS, MASK), BlockModel(folder)
    settings: dict[str, Any] = {
        "rounding": rounding,
        "smooth": False,
        "clip": True,
        "seed": SEED,
        "clock": Clock(),
    }
    return Sensitivity(model, text, text, VARIANTS, folder, torch.bfloat16, work, batch, **settings)


def rounded(
    whole: PreTrainedModel, folder: Path, index: int, variant: Variant, rounding: str
) -> dict[str, ScaleLinear]:
    """The linears of a variant by their full names, rounded by what the algorithms offer."""
    statistics, modules = load_block_statistics(folder, index), {}
    for name in variant.names:
        full = f"model.layers.{index}.{name}"
        linear = whole.get_submodule(full)
        weight = linear.get_parameter("weight")
        clip = clip_of(weight, statistics[f"{full}.rows"], None, variant.spec, torch.bfloat16)
        if rounding == "gptq":
            with seen(whole, full) as inputs:
                whole(IDS, attention_mask=MASK)
            x = inputs[0][MASK.bool()]
            tensor = gptq(weight, factor(x.T @ x / len(x)), variant.spec, torch.bfloat16, clip)
        else:
            tensor = rtn(weight, variant.spec, torch.bfloat16, clip)
        modules[full] = ScaleLinear(tensor, linear.bias)
    return modules


@contextmanager
def seen(whole: PreTrainedModel, name: str) -> Iterator[list[Tensor]]:
    """What the linear reads and gives in the last call."""
    found: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor], given: Tensor) -> None:
        found[:] = [args[0], given]
        if given.requires_grad:
            given.retain_grad()

    hook = whole.get_submodule(name).register_forward_hook(see)
    yield found
    hook.remove()


def second_order(whole: PreTrainedModel, modules: dict[str, ScaleLinear]) -> float:
    """Half the mean of (g d)^2 over tokens, for the tokens that the estimate draws too."""
    total = torch.zeros(())
    for name, module in modules.items():
        for row, (ids, mask) in enumerate(zip(IDS, MASK, strict=True)):
            embedded = whole.get_input_embeddings()(ids[None, : mask.sum()]).detach()
            with seen(whole, name) as found, torch.enable_grad():
                logits = whole(inputs_embeds=embedded.requires_grad_()).logits[0]
                logprobs = logits.log_softmax(-1)
                draw = torch.Generator().manual_seed(SEED + row)
                drawn = torch.multinomial(logprobs.detach().exp(), 1, generator=draw)
                logprobs.gather(1, drawn).sum().backward()
            inputs, outputs = found
            assert outputs.grad is not None
            change = module(inputs) - outputs
            total = total + (change * outputs.grad).square().sum().detach()
    return float(total / 2 / MASK.sum())


def kl(whole: PreTrainedModel, modules: dict[str, ScaleLinear], ids: Tensor) -> float:
    """KL of the model with other linears, measured."""
    before = {name: whole.get_submodule(name) for name in modules}
    with torch.no_grad():
        wanted = whole(ids).logits.log_softmax(-1)
        for name, module in modules.items():
            whole.set_submodule(name, module)
        found = whole(ids).logits.log_softmax(-1)
    for name, module in before.items():
        whole.set_submodule(name, module)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "rounding"), [("llama", "nearest"), ("granite", "gptq"), ("gemma3", "nearest")]
)
def test_streamed_and_whole_agree(family: str, rounding: str, tmp_path: Path) -> None:
    folder = made(family, tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.requires_grad_(False)
    found = of(folder, tmp_path / "work", rounding=rounding).measure()
    for index, variants in enumerate(VARIANTS):
        for number, variant in enumerate(variants):
            modules = rounded(whole, folder, index, variant, rounding)
            wanted = second_order(whole, modules)
            assert found[index][number] == pytest.approx(wanted, rel=2e-3)
    assert found[0][0] > 10 * found[0][1] > 0


def test_without_clipping_no_weight_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("llama", tmp_path / "model")
    clipped = of(folder, tmp_path / "clipped").measure()
    plain = replace(of(folder, tmp_path / "plain"), clip=False).measure()
    monkeypatch.setattr(sensitivity, "clip_of", lambda *_: 1.0)
    assert plain == of(folder, tmp_path / "by one").measure()
    assert plain[0][0] != clipped[0][0]


def test_the_second_order_is_near_the_measured_kl(tiny_model: Path, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    folder = Path(tmp_path / "statistics")
    folder.mkdir()
    with_rows(folder, whole)
    text = Path(torch.__file__).with_name("functional.py").read_text()[:8000]
    ids = AutoTokenizer.from_pretrained(tiny_model)(text, return_tensors="pt").input_ids
    ids = ids[:, :1024].reshape(8, 128)
    variants = [
        [Variant(names, spec) for names in (("self_attn.o_proj",), MLP, ("mlp.down_proj",))]
        for spec in (QuantSpec(4), QuantSpec(4, 64), QuantSpec(8, activation_bits=8), QuantSpec(4))
    ]
    windows = Windows(ids, torch.ones_like(ids))
    settings: dict[str, Any] = {
        "rounding": "nearest",
        "smooth": False,
        "clip": True,
        "seed": SEED,
        "clock": Clock(),
    }
    found = Sensitivity(
        BlockModel(tiny_model), windows, windows, variants, folder, torch.bfloat16, tmp_path, 4,
        **settings,
    ).measure()  # fmt: skip
    for index, block in enumerate(variants):
        for number, variant in enumerate(block):
            modules = rounded(whole, folder, index, variant, "nearest")
            near = 0.15 if variant.spec.bits == 4 else 0.2
            assert found[index][number] == pytest.approx(kl(whole, modules, ids), rel=near)


def test_windows_together_and_logits_in_parts_change_nothing_but_the_last_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama", tmp_path / "model")
    apart = of(folder, tmp_path / "apart", batch=1).measure()
    together = of(folder, tmp_path / "together", batch=3).measure()
    for one, other in zip(apart, together, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    monkeypatch.setattr(gradients, "LOGITS", 272 * 5)
    parts = of(folder, tmp_path / "parts").measure()  # of another draw
    assert parts[0][0] == pytest.approx(apart[0][0], rel=0.5)


@pytest.mark.parametrize("passed", range(5))
def test_stopped_at_any_block_it_goes_on_and_ends_with_the_same_figures(
    passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama", tmp_path / "model")
    wanted = of(folder, tmp_path / "left alone", rounding="gptq").measure()
    there_back_and_there = [0, 1, 1, 0, 1]
    entered: list[int] = []
    block = BlockModel.block

    @contextmanager
    def failing(self: BlockModel, index: int) -> Iterator[nn.Module]:
        if len(entered) == passed:
            raise InterruptedError
        entered.append(index)
        with block(self, index) as found:
            yield found

    @contextmanager
    def noting(self: BlockModel, index: int) -> Iterator[nn.Module]:
        entered.append(index)
        with block(self, index) as found:
            yield found

    monkeypatch.setattr(BlockModel, "block", failing)
    with pytest.raises(InterruptedError):
        of(folder, tmp_path / "work", rounding="gptq").measure()
    monkeypatch.setattr(BlockModel, "block", noting)
    assert of(folder, tmp_path / "work", rounding="gptq").measure() == wanted
    assert entered == there_back_and_there


def test_smoothing_lessens_what_int8_costs(tmp_path: Path) -> None:
    """One channel a hundred times as large as the rest, before the weights that undo it."""
    whole = random_model(family_config("llama"))
    with torch.no_grad():
        for block in whole.model.layers:
            block.post_attention_layernorm.weight[3] *= 100
            for name in MLP:
                block.get_submodule(name).weight[:, 3] /= 100
    folder = tmp_path / "model"
    save(whole, folder)
    for index, block in enumerate(whole.model.layers):
        prefix = f"model.layers.{index}."
        linears = {f"{prefix}{n}": m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        with Collector(linears, picked_rows(MASK, 32)) as collector, torch.no_grad():
            collector.start(0, MASK)
            whole(IDS, attention_mask=MASK)
        save_file(collector.tensors(), folder / f"block_{index:03d}.safetensors")
    variants = [[Variant(MLP, QuantSpec(8, activation_bits=8))]] * 2
    costs = {}
    for smooth in (False, True):
        (tmp_path / str(smooth)).mkdir()
        asked = of(folder, tmp_path / str(smooth))
        costs[smooth] = replace(asked, variants=variants, smooth=smooth).measure()
    for plain, smoothed in zip(costs[False], costs[True], strict=True):
        assert smoothed[0] < plain[0] / 10


def test_a_hessian_that_cannot_be_factored_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Tensor) -> None:
        raise ValueError("not positive definite")

    monkeypatch.setattr(hessians, "factor", fails)
    folder = made("llama", tmp_path / "model")
    with pytest.raises(UserError, match=r"o_proj of block 0: not .* allocate\.rounding=nearest"):
        of(folder, tmp_path / "work", rounding="gptq").measure()


def test_a_hessian_that_wants_more_damping_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stubborn(hessian: Tensor) -> Factor:
        return replace(factor(hessian), damping=10 * DAMPING)

    caplog.set_level("INFO", "compress")
    folder = made("llama", tmp_path / "model")
    of(folder, tmp_path / "quiet", rounding="gptq").measure()
    assert not any("damped" in message for message in caplog.messages)
    monkeypatch.setattr(hessians, "factor", stubborn)
    of(folder, tmp_path / "work", rounding="gptq").measure()
    said = [message.strip() for message in caplog.messages if "damped" in message]
    assert "self_attn.o_proj of block 0: Hessian damped by 0.1" in said
    assert len(said) == len(set(said)) == 4
