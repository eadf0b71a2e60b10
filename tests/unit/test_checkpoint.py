"""The deployable folder, held against the compressed-tensors library itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import checkpoint
from compress.qtensor import QTensor, QuantSpec, quantize
from compress.quantization_config import quantization_config
from compress.tensors import TensorFiles, ToWrite

SPECS = [
    QuantSpec(8, activation_bits=8),
    QuantSpec(8),
    QuantSpec(8, group_size=32),
    QuantSpec(4),
    QuantSpec(4, group_size=32),
    QuantSpec(4, group_size=64),
]
IGNORE = ["lm_head", "model.layers.0.self_attn.q_proj"]
NAME = "model.layers.0.mlp.down_proj"

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.scheme)


def some_weight(spec: QuantSpec, n: int = 63, k: int = 192) -> tuple[Tensor, QTensor]:
    """A bfloat16 weight [n, k] on no grid, and the same rounded to the grid of `spec`."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    grouped = weight.float().reshape(n, spec.groups(k), -1)
    scales = (grouped.abs().amax(-1) / spec.qmax).to(torch.bfloat16)
    return weight, QTensor(quantize(weight, scales, spec), scales, spec)


def their_scheme(spec: QuantSpec) -> Any:
    config = QuantizationConfig.model_validate(quantization_config({NAME: spec}, IGNORE))
    return config.config_groups["group_0"]


@every_spec
def test_library_packs_the_same_tensors(spec: QuantSpec) -> None:
    weight, ours = some_weight(spec)
    scheme = their_scheme(spec)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    theirs = compressor.compress({"weight": weight, "weight_scale": ours.scales}, scheme)
    packed = checkpoint.pack(NAME, ours)
    assert {f"{NAME}.{key}" for key in theirs} == set(packed)
    for key, tensor in theirs.items():
        mine = packed[f"{NAME}.{key}"]
        assert mine.dtype == tensor.dtype, key
        if key not in ("weight", "weight_packed"):
            assert torch.equal(mine, tensor), key
    # The library divides in the weight's dtype, bfloat16, and so rounds some values the other way;
    # given the same integers it stores the same words.
    exact = compressor.compress(
        {"weight": ours.dequantize(), "weight_scale": ours.scales.float()}, scheme
    )
    integers = "weight" if spec.activation_bits else "weight_packed"
    assert torch.equal(packed[f"{NAME}.{integers}"], exact[integers])


@every_spec
def test_library_unpacks_the_same_weight(spec: QuantSpec) -> None:
    _, ours = some_weight(spec)
    scheme = their_scheme(spec)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    packed = checkpoint.pack(NAME, ours)
    local = {key.removeprefix(f"{NAME}."): tensor for key, tensor in packed.items()}
    local["weight_scale"] = local["weight_scale"].float()
    assert torch.equal(compressor.decompress(local, scheme)["weight"], ours.dequantize())


@every_spec
def test_unpack_undoes_pack_through_a_file(spec: QuantSpec, tmp_path: Path) -> None:
    _, ours = some_weight(spec)
    save_file(checkpoint.pack(NAME, ours), tmp_path / "model.safetensors")
    read = checkpoint.unpack(NAME, load_file(tmp_path / "model.safetensors"), spec)
    assert torch.equal(read.ints, ours.ints)
    assert torch.equal(read.scales, ours.scales)
    assert read.spec == spec


def parts() -> dict[str, ToWrite]:
    return {f"block.{i}.weight": ToWrite.of(torch.full((16, 16), float(i))) for i in range(5)}


def source(folder: Path) -> Path:
    """A model folder with companions, an old index and another format's weights."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "README.md").write_text("the original's card")
    return folder


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 30, 1), (2048, 3), (1, 5)])
def test_shards_hold_every_tensor_once(tmp_path: Path, shard_bytes: int, files: int) -> None:
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.write(out, parts(), {"a": 1}, source(tmp_path / "in"), shard_bytes=shard_bytes)
    found = sorted(out.glob("*.safetensors"))
    assert len(found) == files
    tensors = [(name, t) for file in found for name, t in load_file(file).items()]
    assert [name for name, _ in tensors] == [f"block.{i}.weight" for i in range(5)]
    assert all(torch.equal(t, torch.full((16, 16), float(i))) for i, (_, t) in enumerate(tensors))
    index = out / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        listing = json.loads(index.read_text())
        assert listing["metadata"]["total_size"] == 5 * 16 * 16 * 4
        assert {out / f for f in listing["weight_map"].values()} == set(found)
    assert not list(out.glob("*.tmp"))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_what_is_on_disk_is_written_in_pieces(
    dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers of odd length before what is wider, and a number without rows."""
    tensors = {
        "ints": torch.arange(-7, 8, dtype=torch.int8).reshape(5, 3),
        "weight": torch.randn(7, 3),
        "shape": torch.tensor([5, 3]),
        "step": torch.tensor(3.5),
    }
    file, out = tmp_path / "file", tmp_path / "out"
    save_file(tensors, file)
    out.mkdir()
    monkeypatch.setattr("compress.tensors.PIECE", 6)
    stored = {name: ToWrite.stored(file, name, dtype) for name in tensors}
    assert len(list(stored["weight"].values())) == 4
    checkpoint.write(out, stored, {}, source(tmp_path / "in"))
    for name, read in load_file(out / "model.safetensors").items():
        wanted = tensors[name]
        wanted = wanted.to(dtype) if dtype and wanted.is_floating_point() else wanted
        assert read.dtype == wanted.dtype
        assert torch.equal(read, wanted)
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert (out / "config.json").stat().st_mode == (out / "model.safetensors").stat().st_mode


def test_only_files_that_are_too_large_are_written_again(tmp_path: Path) -> None:
    made, linked, cut = (tmp_path / name for name in ("made", "linked", "cut"))
    for folder in (made, linked, cut):
        folder.mkdir()
    checkpoint.write(made, parts(), {"a": 1}, source(tmp_path / "in"), shard_bytes=2048)
    checkpoint.reshard(made, linked, shard_bytes=4096)
    for file in made.iterdir():
        assert (linked / file.name).samefile(file)
    checkpoint.reshard(made, cut, shard_bytes=1024)
    assert len(TensorFiles.files(cut)) == 5
    before, after = TensorFiles(made), TensorFiles(cut)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((cut / "config.json").read_text()) == {"a": 1}


def test_what_no_file_holds_is_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, source / "model.safetensors")
    checkpoint.rewrite(source, folder, {"a": torch.ones(2), "c": torch.ones(2)}, {})
    assert {n: t.sum() for n, t in TensorFiles(folder).items()} == {"a": 2, "b": 0}
    said = f"  {source}: no tensor c; of what was changed 1 of 2 tensors are in none of its files"
    assert [message.startswith(said) for message in caplog.messages] == [True]
    checkpoint.rewrite(source, folder, {"b": torch.ones(3)}, {})
    assert len(caplog.messages) == 1


def test_companions_come_along_and_other_weights_do_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.write(out, parts(), {"a": 1}, source(tmp_path / "in"))
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
    }
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings == {"bos_token": "<s>", "chat_template": "{{ messages }}"}
