"""A cut model is the original without what was cut: equal outputs, in every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_config, random_model, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress.blocks.structure import LAYOUTS
from compress.errors import UserError
from compress.model import BlockModel, find_blocks
from compress.source import describe, read_config
from compress.tensors import TensorFiles
from compress.text.windows import Windows
from compress.training.cutting import NARROWABLE, Cut, Size, refuse, size_of, write_cut
from compress.training.importance import Trials, choose

BLOCKS = 4
WHOLE_GROUPS, WHOLE_MLP = list(range(2)), list(range(176))
NARROW = [n for n in FAMILIES if LAYOUTS.get(FAMILIES[n][0]) in NARROWABLE]

Made = Callable[[str], Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(name: str) -> Path:
        folder = tmp_path / "whole"
        save(random_model(family_config(name, num_hidden_layers=BLOCKS)), folder)
        return folder

    return make


def cut_model(whole: Path, cut: Cut) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The original and what is left of it, both in float32 by transformers."""
    folder, config = whole.parent / "cut", read_config(whole, trust_remote_code=False)
    folder.mkdir()
    prefix = BlockModel(whole).prefix
    write_cut(whole, folder, config, prefix, cut, torch.bfloat16)
    models = [
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (whole, folder)
    ]
    return models[0], models[1]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_blocks_cut_out_is_the_original_that_skips_them(made: Made, name: str) -> None:
    kept = [1, 3]
    cut = Cut(kept, [WHOLE_GROUPS] * 2, [WHOLE_MLP] * 2)
    whole, left = cut_model(made(name), cut)
    assert left.config.num_hidden_layers == 2

    def skip(_: nn.Module, args: tuple[Any, ...], __: Any) -> Any:
        return args[0]

    _, blocks = find_blocks(whole)
    for number, block in enumerate(blocks):
        if number not in kept:
            block.register_forward_hook(skip)
    assert torch.equal(logits(left), logits(whole))


@pytest.mark.parametrize("name", NARROW)
def test_a_narrower_model_is_the_original_with_channels_that_add_nothing(
    made: Made, name: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    mlp = [sorted(torch.randperm(176, generator=generator)[:96].tolist()) for _ in range(BLOCKS)]
    groups = [[1], [0], [0], [1]]
    whole, left = cut_model(made(name), Cut(list(range(BLOCKS)), groups, mlp))
    assert (left.config.num_attention_heads, left.config.num_key_value_heads) == (3, 1)
    assert left.config.intermediate_size == 96
    _, blocks = find_blocks(whole)
    with torch.no_grad():
        for number, block in enumerate(blocks):
            out, down = block.self_attn.o_proj.weight, block.mlp.down_proj.weight
            out.view(96, 2, -1)[:, 1 - groups[number][0]] = 0
            gone = torch.ones(176, dtype=torch.bool)
            gone[mlp[number]] = False
            down[:, gone] = 0
    torch.testing.assert_close(logits(left), logits(whole), rtol=1e-4, atol=1e-4)


def test_what_a_planted_model_does_not_need_goes(made: Made) -> None:
    whole = made("llama")
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    silent, channels = model.model.layers[2], torch.arange(0, 176, 2)
    with torch.no_grad():
        silent.self_attn.o_proj.weight.zero_()
        silent.mlp.down_proj.weight.zero_()
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, channels] = 0
            layer.self_attn.o_proj.weight.view(96, 2, -1)[:, 0] = 0
    save(model, whole)
    ids = torch.randint(3, 250, (2, 32), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    file, windows = whole.parent / "trials.json", Windows(ids, mask)
    cut, removed = choose(BlockModel(whole), windows, file, Size(3, 1, 88))
    assert [removal.block for removal in removed] == [2]
    assert removed[0].cost == pytest.approx(0, abs=1e-6)
    assert cut == Cut([0, 1, 3], [[1]] * 3, [list(range(1, 176, 2))] * 3)
    before, left = cut_model(whole, cut)
    torch.testing.assert_close(logits(left), logits(before), rtol=1e-4, atol=1e-4)
    both, first, second = (
        Trials(BlockModel(whole), Windows(ids[r], mask[r]), whole.parent / "alone.json")
        for r in (slice(None), slice(1), slice(1, 2))
    )
    of_each = 32 * first.kl_without((0,)) + 20 * second.kl_without((0,))
    assert both.kl_without((0,)) == pytest.approx(of_each / 52, rel=1e-4)  # every token alike
    written = file.stat().st_mtime_ns
    choose(BlockModel(whole), windows, file, Size(3, 2, 176))
    assert file.stat().st_mtime_ns == written  # the same trials
    choose(BlockModel(whole), Windows(ids + 1, mask), file, Size(3, 2, 176))
    assert file.stat().st_mtime_ns > written


def test_lists_of_a_value_a_block_are_cut_with_the_blocks(made: Made) -> None:
    whole = made("gemma3")
    kinds = read_config(whole, trust_remote_code=False).layer_types
    cut_model(whole, Cut([1, 3], [WHOLE_GROUPS] * 2, [WHOLE_MLP] * 2))
    assert describe(whole.parent / "cut")["layer_types"] == [kinds[1], kinds[3]]
    names = TensorFiles(whole.parent / "cut").keys()
    assert not any(".layers.2." in name for name in names)
    assert (whole.parent / "cut" / "tokenizer.json").exists()


def test_sizes_that_cannot_be_are_refused_in_one_line() -> None:
    llama, olmo = family_config("llama"), family_config("olmo2")
    assert size_of(llama) == Size(2, 2, 176)
    for wanted, said in (
        (Size(3, 2, 176), "shrink.blocks is 3; the model has 2; wanted 1 to 2"),
        (Size(2, 4, 176), "shrink.kv_heads is 4; the model has 2; wanted 1 to 2"),
        (Size(2, 2, 512), "shrink.mlp is 512; the model has 176; wanted 1 to 176"),
    ):
        with pytest.raises(UserError) as raised:
            refuse(llama, wanted)
        assert str(raised.value) == said
    refuse(olmo, Size(1, 2, 176))
    with pytest.raises(UserError, match=r"^shrink: blocks of olmo2 are not known well enough"):
        refuse(olmo, Size(2, 1, 176))
