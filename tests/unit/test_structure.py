from itertools import pairwise

import pytest
import torch
from families import FAMILIES, family_config, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from compress.algorithms.blockwise import divide_outputs
from compress.algorithms.smooth import tied
from compress.blocks.structure import Feed, feeds, head_names, knows, model_name, stored_name
from compress.model import find_blocks, skeleton

IDS = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(1))


def block_outputs(model: PreTrainedModel) -> list[Tensor]:
    """What each block gives for IDS."""
    found: list[Tensor] = []
    _, blocks = find_blocks(model)
    hooks = [b.register_forward_hook(lambda _, __, out: found.append(out)) for b in blocks]
    model(IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def move(block: nn.Module, feed: Feed, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Divide by random scales of 0.1 to 10, and multiply."""
    width = block.get_parameter(f"{feed.targets[0]}.weight").shape[1]
    scales = 10 ** (2 * torch.rand(width, generator=generator) - 1)
    scales = tied(scales, feed.repeat, feed.head)
    held = divide_outputs(block.get_submodule(feed.source), scales, feed, dtype)
    for target in feed.targets:
        block.get_parameter(f"{target}.weight").mul_(held)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_scales_move_along_every_feed_and_nothing_changes(family: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = family_config(family)
    model = random_model(config, seed)
    before = block_outputs(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _, blocks = find_blocks(model)
    for block in blocks:
        for feed in feeds(config, block):
            move(block, feed, generator, torch.float32)
    assert any(not torch.equal(state[n], value) for n, value in model.state_dict().items())
    for wanted, found in zip(before, block_outputs(model), strict=True):
        assert (wanted - found).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "starcoder2"])
def test_a_norm_rounded_to_bfloat16_is_made_up_for(family: str) -> None:
    config = family_config(family)
    model = random_model(config)
    before = block_outputs(model)
    _, blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(0)
    for block in blocks:
        norms = [f for f in feeds(config, block) if f.source.endswith("norm")]
        assert len(norms) == 2
        for feed in norms:
            move(block, feed, generator, torch.bfloat16)
            weight = block.get_parameter(f"{feed.source}.weight")
            assert torch.equal(weight, weight.bfloat16().float())
    for wanted, found in zip(before, block_outputs(model), strict=True):
        assert (wanted - found).norm() < 1e-4 * wanted.norm()


def test_a_factor_that_storage_cannot_hold_stays() -> None:
    norm = nn.LayerNorm(4)
    feed = Feed("norm", ("down",), offset=1.0)
    # Stored for 1 + w: 0, and 0.25 / 1000, which bfloat16 rounds to 0 beside 1.
    weight = torch.tensor([-1.0, -0.75, 0.0, 3.0])
    norm.weight.data.copy_(weight)
    norm.bias.data.fill_(1.0)
    with torch.no_grad():
        held = divide_outputs(norm, torch.full((4,), 1000.0), feed, torch.bfloat16)
    assert torch.equal(norm.weight[:2], weight[:2])
    assert torch.equal(held[:2], torch.ones(2))
    torch.testing.assert_close((weight + 1)[3], held[3] * (norm.weight + 1)[3])
    torch.testing.assert_close(norm.bias * held, torch.ones(4))


def sources(family: str) -> list[str]:
    config = family_config(family)
    _, blocks = find_blocks(skeleton(config, torch.float32))
    return [feed.source.rpartition(".")[2] for feed in feeds(config, blocks[0])]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", ["input_layernorm", "v_proj", "post_attention_layernorm", "up_proj"]),
        ("gemma2", ["input_layernorm", "v_proj", "pre_feedforward_layernorm", "up_proj"]),
        ("phi3", ["input_layernorm", "qkv_proj", "post_attention_layernorm", "gate_up_proj"]),
        ("olmo", ["v_proj", "up_proj"]),
        ("olmo-clipped", ["up_proj"]),
        ("olmo2", ["v_proj", "up_proj"]),
        ("gpt_neox", ["input_layernorm", "query_key_value", "post_attention_layernorm"]),
        ("cohere", ["input_layernorm", "v_proj", "up_proj"]),
    ],
)
def test_where_scales_move(family: str, wanted: list[str]) -> None:
    assert sources(family) == wanted


def test_fused_sources_name_the_rows_that_are_read() -> None:
    phi = family_config("phi3")
    _, blocks = find_blocks(skeleton(phi, torch.float32))
    _, value, _, up = feeds(phi, blocks[0])
    # 6 query heads, then 2 key heads, then 2 value heads of 16; gate, then up.
    assert value.rows == range(128, 160)
    assert (value.repeat, value.head) == (3, 16)
    assert up.rows == range(176, 352)

    neox = family_config("gpt_neox")
    _, blocks = find_blocks(skeleton(neox, torch.float32))
    _, value, _ = feeds(neox, blocks[0])
    # Head by head: 16 of q, 16 of k, 16 of v.
    assert value.rows is not None
    assert list(value.rows[:17]) == [*range(32, 48), 80]
    assert all(a < b for a, b in pairwise(value.rows))
    assert len(value.rows) == 96


def test_an_unknown_block_has_no_feeds() -> None:
    config = AutoConfig.for_model("opt", hidden_size=32, ffn_dim=64, num_attention_heads=2)
    assert not knows(config)
    assert feeds(config, nn.Module()) == []
    assert knows(family_config("gpt_neox"))


@pytest.mark.parametrize(
    ("family", "names"), [("llama", ["lm_head"]), ("gpt_neox", ["lm_head", "embed_out"])]
)
def test_the_head_by_all_its_names(family: str, names: list[str]) -> None:
    assert head_names(skeleton(family_config(family), torch.float32)) == names


def test_names_in_files_and_back() -> None:
    neox, llama = family_config("gpt_neox"), family_config("llama")
    assert stored_name(neox, "lm_head.weight") == "embed_out.weight"
    assert model_name(neox, "embed_out.weight") == "lm_head.weight"
    inside = "gpt_neox.layers.0.attention.dense.weight"
    assert stored_name(neox, inside) == model_name(neox, inside) == inside
    assert stored_name(llama, "lm_head.weight") == "lm_head.weight"
