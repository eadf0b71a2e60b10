"""Blocks of kinds that are not in the table: run as they are, or refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from compress.blocks.structure import knows
from compress.config import Config, Model
from compress.errors import UserError
from compress.model import BlockModel
from compress.preflight import preflight

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(3, 35).view(2, 16)


def folder_of(kind: str, folder: Path, **special: Any) -> tuple[PretrainedConfig, Path]:
    config = AutoConfig.for_model(kind, **SIZES | special)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return config, folder


@torch.no_grad()
def through_blocks(model: BlockModel) -> torch.Tensor:
    hidden = model.embed(IDS)
    for index in range(len(model)):
        with model.block(index) as block:
            hidden = block(hidden, **model.calls(IDS)[index])
    return model.logits(hidden)


@pytest.mark.parametrize("kind", ["phi", "stablelm", "nemotron", "arcee", "helium"])
@torch.no_grad()
def test_blocks_that_are_like_others_run(kind: str, tmp_path: Path) -> None:
    config, folder = folder_of(kind, tmp_path, head_dim=8)
    assert not knows(config)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.allclose(through_blocks(BlockModel(folder)), whole(IDS).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "special", "told"),
    [
        ("falcon", {}, r"give tuple, wanted hidden states alone"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, r"reads \[32, 32\], not \[B, T, K\]"),
        ("recurrent_gemma", {"lru_width": 32}, r"called otherwise than those of the known kinds"),
    ],
)
def test_blocks_that_are_not_are_refused_in_one_line(
    kind: str, special: dict[str, Any], told: str, tmp_path: Path
) -> None:
    _, folder = folder_of(kind, tmp_path, **special)
    with pytest.raises(UserError, match=told) as caught:
        through_blocks(BlockModel(folder))
    assert str(caught.value).startswith(f"{kind} is not supported: its decoder blocks ")
    assert "\n" not in str(caught.value)


def test_linears_outside_the_blocks_are_in_ignore() -> None:
    config = AutoConfig.for_model("modernbert-decoder", **SIZES)
    chosen = preflight(config, Config(engine="native", model=Model(path="x")))
    assert chosen.ignore[-2:] == ["lm_head.dense", "decoder"]
    assert not {"lm_head.dense", "decoder"} & set(chosen.quantize)
