"""A folder whose tensors are not what its config.json says is refused before they are used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from compress.errors import UserError
from compress.model import BlockModel, storage_dtype

UP = "model.layers.1.mlp.up_proj.weight"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
Changed = Callable[[dict[str, Tensor]], Path]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A small Llama's folder with some of its tensors exchanged."""

    def make(new: dict[str, Tensor], *, tied: bool = False) -> Path:
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=96,
            tie_word_embeddings=tied,
        )
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        assert (HEAD in tensors) is not tied
        save_file(tensors | new, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.int8])
@pytest.mark.parametrize("name", [UP, TABLE])
def test_weights_that_are_no_floats_of_16_bit_are_refused(
    changed: Callable[..., Path], dtype: torch.dtype, name: str
) -> None:
    shape = (64, 32) if name == UP else (96, 32)
    folder = changed({name: torch.ones(shape).to(dtype)})
    said = rf"{name} is stored as {str(dtype)[6:]}; wanted the original model in 16 or 32 bit"
    with pytest.raises(UserError, match=said), BlockModel(folder).block(1):
        pass


def test_a_tied_head_that_is_another_matrix_is_refused(changed: Callable[..., Path]) -> None:
    # transformers keeps such a head; to tie it would be another model.
    folder = changed({HEAD: torch.ones(96, 32)}, tied=True)
    with pytest.raises(UserError, match=f"{HEAD} differs from {TABLE}, but config.json ties them"):
        BlockModel(folder)
    folder = changed({HEAD: torch.ones(97, 32)}, tied=True)
    with pytest.raises(UserError, match=f"{HEAD} differs from {TABLE}"):
        BlockModel(folder)
    table = load_file(changed({}, tied=True) / "model.safetensors")[TABLE]
    model = BlockModel(changed({HEAD: table.clone()}, tied=True))
    assert list(model.outside_names()) == [TABLE, "model.norm.weight"]


def test_what_the_model_has_no_place_for_stays_behind(changed: Callable[..., Path]) -> None:
    odd = ("model.mtp.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    model = BlockModel(changed({name: torch.ones(4) for name in odd}))
    assert set(model.outside_names()) == {HEAD, TABLE, "model.norm.weight"}
    with model.block(0) as block:
        assert len(list(block.parameters())) == 9


def test_a_model_in_64_bit_is_kept_in_bfloat16() -> None:
    config = LlamaConfig(dtype=torch.float64)
    assert storage_dtype(config, "auto") == torch.bfloat16
    assert storage_dtype(config, "float16") == torch.float16
