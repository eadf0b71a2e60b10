"""Reading a model block by block gives what the whole model gives."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from compress.blocks import head
from compress.errors import UserError
from compress.model import BlockModel, linear_shapes, storage_dtype
from compress.tensors import TensorFiles

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
FAMILIES: list[PretrainedConfig] = [
    LlamaConfig(**SIZES, tie_word_embeddings=True),
    MistralConfig(**SIZES, sliding_window=8),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=8),
    Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8),
    GPTNeoXConfig(**SIZES),
]


def through_blocks(model: BlockModel, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    hidden = model.embed(ids, mask)
    for index in range(len(model)):
        with model.block(index) as block:
            hidden = block(hidden, **model.calls(ids, mask)[index])
    return model.logits(hidden)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
@torch.no_grad()
def test_blocks_agree_with_the_whole_model(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    model = BlockModel(tmp_path)
    ids = torch.randint(0, 96, (2, 20))
    mask = torch.ones_like(ids)
    assert torch.equal(through_blocks(model, ids, None), whole(ids).logits)
    assert torch.equal(through_blocks(model, ids, mask), whole(ids).logits)
    mask[1, 13:] = 0
    padded = through_blocks(model, ids, mask)
    assert torch.allclose(padded[0], whole(ids[:1]).logits[0], atol=1e-5)
    assert torch.allclose(padded[1, :13], whole(ids[1:, :13]).logits[0], atol=1e-5)
    assert all(p.is_meta for b in model.blocks for p in b.parameters())


@pytest.mark.parametrize(
    ("config", "last"), [(LlamaConfig(**SIZES), "norm"), (PhiConfig(**SIZES), "final_layernorm")]
)
def test_the_head_is_read_again_on_the_way_back(
    config: PretrainedConfig, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config).eval()
    if whole.lm_head.bias is not None:  # Phi's
        torch.nn.init.normal_(whole.lm_head.bias)
    whole.save_pretrained(tmp_path)
    monkeypatch.setattr(head, "CHUNK", 20 * 32)  # five parts of the 96 rows
    hidden = torch.randn(2, 5, 32)
    wanted, found = (hidden.clone().requires_grad_() for _ in range(2))
    weights = torch.randn(2, 5, 96)
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    plain = whole.lm_head(whole.base_model.get_submodule(last)(wanted))
    (plain * weights).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = BlockModel(tmp_path).logits(found)
    (logits * weights).sum().backward()
    torch.testing.assert_close(logits, plain)
    torch.testing.assert_close(found.grad, wanted.grad)
    assert kept
    assert not [shape for shape in kept if len(shape) == 2]  # no part of the weight


def test_shards_read_as_one(tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    files = TensorFiles(tmp_path)
    assert len(TensorFiles.files(tmp_path)) > 1
    state = whole.state_dict()
    assert files.keys() == state.keys()
    assert all(torch.equal(files[name], tensor) for name, tensor in state.items())
    shapes = files.shapes()
    assert shapes["lm_head.weight"] == ((96, 32), torch.float32)


def test_linears_are_those_inside_the_blocks() -> None:
    shapes = linear_shapes(LlamaConfig(**SIZES))
    assert shapes["model.layers.2.mlp.down_proj"] == (32, 64)
    assert shapes["model.layers.0.self_attn.k_proj"] == (16, 32)
    assert len(shapes) == 3 * 7
    assert "lm_head" not in shapes


def test_damage_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()

    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or cut short"):
        BlockModel(folder)

    file.write_bytes(whole)
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = float("nan")
    save_file(tensors, file)
    model = BlockModel(folder)
    with pytest.raises(UserError, match=f"{name} holds NaN"), model.block(1):
        pass

    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(UserError, match=f"no tensor {name}"), BlockModel(folder).block(1):
        pass

    index = {"weight_map": {name: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: missing"):
        BlockModel(folder)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_arithmetic_in_float32_does_not_change_what_is_stored(
    tiny_model: Path, tmp_path: Path, stored: str
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    model = BlockModel(folder, dtype=torch.float32)
    linear_shapes(model.config)
    wanted = torch.bfloat16 if stored == "float32" else getattr(torch, stored)
    assert model.skeleton.dtype == torch.float32
    assert storage_dtype(model.config, "auto") == wanted
