"""The deployable folder, held against the compressed-tensors library itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import checkpoint
from compress.errors import UserError
from compress.qtensor import QTensor, QuantSpec, quantize
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
    config = QuantizationConfig.model_validate(checkpoint.quantization_config({NAME: spec}, IGNORE))
    return config.config_groups["group_0"]


@every_spec
def test_library_reads_the_configuration(spec: QuantSpec) -> None:
    ours = checkpoint.quantization_config({NAME: spec}, IGNORE)
    config = QuantizationConfig.model_validate(json.loads(json.dumps(ours)))
    group = config.config_groups["group_0"]
    assert config.ignore == IGNORE
    assert (
        config.format
        == group.format
        == ("int" if spec.activation_bits else "pack") + ("-quantized")
    )
    assert group.targets == ["Linear"]
    assert (group.weights.num_bits, group.weights.symmetric) == (spec.bits, True)
    assert group.weights.dynamic is False
    assert group.weights.group_size == spec.group_size
    expected = QuantizationStrategy.GROUP if spec.group_size else QuantizationStrategy.CHANNEL
    assert group.weights.strategy == expected
    if spec.activation_bits:
        assert group.input_activations.strategy == QuantizationStrategy.TOKEN
        assert group.input_activations.dynamic is True
        assert group.input_activations.num_bits == 8
    else:
        assert group.input_activations is None


@every_spec
def test_our_configuration_reads_back(spec: QuantSpec) -> None:
    written = json.loads(json.dumps(checkpoint.quantization_config({NAME: spec}, IGNORE)))
    assert checkpoint.read_quantization_config(written, [*IGNORE, NAME]) == {NAME: spec}


@every_spec
def test_configuration_as_the_library_writes_it_reads_back(spec: QuantSpec) -> None:
    config = QuantizationConfig.model_validate(checkpoint.quantization_config({NAME: spec}, IGNORE))
    theirs = json.loads(config.model_dump_json())
    assert checkpoint.read_quantization_config(theirs, [*IGNORE, NAME]) == {NAME: spec}


def test_mixed_precision_is_a_group_a_spec() -> None:
    w4, w8, w8a8 = QuantSpec(4, group_size=64), QuantSpec(8), QuantSpec(8, activation_bits=8)
    specs = {"b.0.up": w4, "b.0.down": w8, "b.1.up": w4, "b.1.down": w8}
    config = json.loads(json.dumps(checkpoint.quantization_config(specs, IGNORE)))
    assert config["format"] == "pack-quantized"
    groups = config["config_groups"].values()
    assert [g["targets"] for g in groups] == [["b.0.up", "b.1.up"], ["b.0.down", "b.1.down"]]
    assert checkpoint.read_quantization_config(config, [*specs, *IGNORE, "b.2.up"]) == specs
    assert checkpoint.group_specs(config) == [w4, w8]
    specs["b.1.down"] = w8a8
    config = checkpoint.quantization_config(specs, IGNORE)
    assert config["format"] == "mixed-precision"
    library = QuantizationConfig.model_validate(config)
    formats = [group.format for group in library.config_groups.values()]
    assert formats == ["pack-quantized", "pack-quantized", "int-quantized"]
    theirs = json.loads(library.model_dump_json())
    assert checkpoint.read_quantization_config(theirs, [*specs, *IGNORE]) == specs


def test_a_name_goes_before_a_pattern_and_that_before_the_class() -> None:
    config = checkpoint.quantization_config({"b.0.up": QuantSpec(4), "b.0.down": QuantSpec(8)}, [])
    everything, some = config["config_groups"].values()
    everything["targets"], some["targets"] = ["Linear"], ["re:.*down", "b.1.up"]
    found = checkpoint.read_quantization_config(config, ["b.0.up", "b.0.down", "b.1.up"])
    assert found == {"b.0.up": QuantSpec(4), "b.0.down": QuantSpec(8), "b.1.up": QuantSpec(8)}


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "gptq", "bits": 4}, {}, {"quant_method": "compressed-tensors"}],
)
def test_other_layouts_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="wanted compressed-tensors with at least one"):
        checkpoint.read_quantization_config(config, [NAME])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weights", {"type": "float"}, "weights.type=float in group_0; this runtime serves int;"),
        ("weights", {"symmetric": False}, "weights.symmetric=False in group_0; .* serves True;"),
        ("weights", {"num_bits": 3}, "weights.num_bits=3 in group_0; this runtime serves 8 or 4;"),
        ("weights", {"strategy": "tensor"}, "weights.strategy=tensor in .* channel or group;"),
        ("weights", {"actorder": "group"}, "weights.actorder=group in .* None or static or weight"),
        ("weights", {"num_bits": 4}, "W4A8 in group_0; this runtime serves activations of 8"),
        ("input_activations", {"dynamic": False}, "input_activations.dynamic=False in group_0;"),
        ("input_activations", {"strategy": "tensor"}, "input_activations.strategy=tensor in"),
    ],
)
def test_what_no_kernel_of_ours_serves_is_refused_by_name(
    part: str, change: dict[str, Any], message: str
) -> None:
    config = checkpoint.quantization_config({NAME: QuantSpec(8, activation_bits=8)}, IGNORE)
    config["config_groups"]["group_0"][part] |= change
    with pytest.raises(UserError, match=f"quantization_config has {message}") as told:
        checkpoint.read_quantization_config(config, [NAME])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("weights", "spec"),
    [
        ({"num_bits": 4, "group_size": 32}, QuantSpec(4, 32)),
        ({"num_bits": 4, "group_size": -1}, QuantSpec(4)),
        ({"strategy": "channel"}, QuantSpec(8)),
    ],
)
def test_where_a_group_is_silent_it_means_what_the_library_reads(
    weights: dict[str, Any], spec: QuantSpec
) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    assert checkpoint.read_quantization_config(config, [NAME]) == {NAME: spec}
    theirs = QuantizationConfig.model_validate(config).config_groups["g"].weights
    ours = checkpoint.quantization_config({NAME: spec}, [])["config_groups"]["group_0"]["weights"]
    assert (theirs.num_bits, theirs.strategy) == (ours["num_bits"], ours["strategy"])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": None}, "no weights in g; this runtime serves quantized ones"),
        ({}, "no weights in g; this"),
        ({"weights": {"num_bits": 8}}, "weights.strategy=tensor in g; this runtime serves channel"),
        (
            {"weights": {"group_size": -1}, "input_activations": {"strategy": "token"}},
            "input_activations.dynamic=False in g; this runtime serves True",
        ),
    ],
)
def test_silence_that_no_kernel_of_ours_serves_is_refused(
    group: dict[str, Any], message: str
) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], **group}},
    }
    with pytest.raises(UserError, match=f"quantization_config has {message}"):
        checkpoint.read_quantization_config(config, [NAME])


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
