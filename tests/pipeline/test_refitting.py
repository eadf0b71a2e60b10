"""What stays of a cut model is fitted to the original: its hidden states come nearer."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, family_config, random_model, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import checkpoint
from compress.model import BlockModel
from compress.source import describe, read_config
from compress.text.windows import Windows
from compress.training.cutting import Cut, write_cut
from compress.training.importance import rows_of
from compress.training.refitting import ADDS, refitted

BLOCKS, KEPT = 4, [1, 3]
GROUPS, CHANNELS = list(range(2)), list(range(176))
ADDING = [name for name in FAMILIES if FAMILIES[name][0] in ADDS]


def windows(seed: int) -> Windows:
    ids = torch.randint(3, 250, (32, 48), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    return Windows(ids, mask)


def made(name: str, folder: Path, cut: Cut) -> tuple[Path, Path]:
    """A random model of four blocks, and what `cut` leaves of it."""
    whole, left = folder / "whole", folder / "left"
    save(random_model(family_config(name, num_hidden_layers=BLOCKS)), whole)
    config = read_config(whole, trust_remote_code=False)
    left.mkdir()
    write_cut(whole, left, config, BlockModel(whole).prefix, cut, torch.bfloat16)
    return whole, left


def fitted(whole: Path, left: Path, kept: list[int]) -> dict[str, Tensor]:
    return refitted(BlockModel(whole), BlockModel(left), kept, windows(1), torch.bfloat16)


@torch.no_grad()
def last_states(folder: Path) -> Tensor:
    """What the last block gives for other windows, each token of size 1."""
    model = BlockModel(folder)
    rows = rows_of(model, windows(2))
    hidden = [model.embed(row) for row in rows]
    for index in range(len(model)):
        with model.block(index) as block:
            hidden = [
                block(states, **model.calls(row)[index])
                for states, row in zip(hidden, rows, strict=True)
            ]
    found = torch.cat([states[0] for states in hidden])
    return found / found.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("name", ADDING)
def test_hidden_states_come_nearer_in_every_family_that_adds(name: str, tmp_path: Path) -> None:
    whole, left = made(name, tmp_path, Cut(KEPT, [GROUPS] * 2, [CHANNELS] * 2))
    found = fitted(whole, left, KEPT)
    prefix = BlockModel(left).prefix
    linears = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    assert set(found) == {f"{prefix}.{block}.{name}" for block in (0, 1) for name in linears}
    nearer = tmp_path / "nearer"
    nearer.mkdir()
    checkpoint.rewrite(left, nearer, found, describe(left))
    wanted = last_states(whole)
    before, after = ((last_states(f) - wanted).square().mean() for f in (left, nearer))
    assert after < 0.95 * before


def test_a_narrower_model_makes_up_for_the_channels_that_went(tmp_path: Path) -> None:
    every = list(range(BLOCKS))
    cut = Cut(every, [[1]] * BLOCKS, [list(range(0, 176, 2))] * BLOCKS)
    whole, left = made("llama", tmp_path, cut)
    nearer = tmp_path / "nearer"
    nearer.mkdir()
    checkpoint.rewrite(left, nearer, fitted(whole, left, every), describe(left))
    wanted = last_states(whole)
    before, after = ((last_states(f) - wanted).square().mean() for f in (left, nearer))
    assert after < 0.95 * before


def test_a_model_that_lacks_nothing_stays_as_it_is(tmp_path: Path) -> None:
    whole, _ = made("llama", tmp_path, Cut([0], [GROUPS], [CHANNELS]))
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    with torch.no_grad():
        for index in (0, 2):
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    save(model, whole)
    left = tmp_path / "silent"
    left.mkdir()
    config, cut = (
        read_config(whole, trust_remote_code=False),
        Cut(KEPT, [GROUPS] * 2, [CHANNELS] * 2),
    )
    write_cut(whole, left, config, BlockModel(whole).prefix, cut, torch.bfloat16)
    found = fitted(whole, left, KEPT)
    assert len(found) == 4
    for name, weight in found.items():
        assert torch.equal(weight, BlockModel(left).tensors[name])


def test_blocks_with_a_norm_behind_what_they_add_are_left_alone(tmp_path: Path) -> None:
    whole, left = made("olmo2", tmp_path, Cut(KEPT, [GROUPS] * 2, [CHANNELS] * 2))
    assert fitted(whole, left, KEPT) == {}
