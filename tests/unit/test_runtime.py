"""Our runtime on quantized folders: the right numbers, every tensor once, ties kept."""

import copy
import io
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from compress import checkpoint
from compress.errors import UserError
from compress.kernels.check import relative_error
from compress.qtensor import QTensor, QuantSpec, quantize
from compress.quantization_config import quantization_config
from compress.runtime.attention import in_words
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import load

SPECS = [QuantSpec(8), QuantSpec(4), QuantSpec(4, 4), QuantSpec(8, activation_bits=8)]
KEPT = ("q_proj", "k_proj", "v_proj")
WEIGHTS = "model.safetensors"


def quantized(source: Path, folder: Path, spec: QuantSpec) -> dict[str, Tensor]:
    """Write `source` quantized by `spec`; returns the dequantized weights in float32 by name."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    ignore, stored, plain = ["lm_head"], {}, {}
    for name, tensor in load_file(source / WEIGHTS).items():
        module = name.removesuffix(".weight")
        is_linear = "_proj" in module and tensor.ndim == 2
        if is_linear and not module.endswith(KEPT):
            peaks = tensor.float().reshape(len(tensor), spec.groups(tensor.shape[1]), -1)
            scales = (peaks.abs().amax(-1) / spec.qmax).to(tensor.dtype)
            weight = QTensor(quantize(tensor, scales, spec), scales, spec)
            stored |= checkpoint.pack(module, weight)
            plain[name] = weight.dequantize()
        else:
            ignore += [module] if is_linear else []
            stored[name] = tensor
            plain[name] = tensor.float()
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    change_config(folder, quantization_config=quantization_config({"any": spec}, ignore))
    return plain


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@torch.inference_mode()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(3, 63).reshape(2, 30)
    return model(input_ids=ids).logits.float()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with tied embeddings, and 172 channels that no group divides."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("dense")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_in_bf16_can_be_copied_pickled_and_cast(dense: Path) -> None:
    model = load(dense, dtype=torch.bfloat16)
    wanted, pickled = logits(model), io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(torch.load(pickled, weights_only=False)), wanted)
    assert torch.equal(logits(copied), wanted)
    cast = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16).float()
    assert relative_error(logits(copied.float()), logits(cast)) < 1e-5
    assert torch.equal(logits(model), wanted)
    copied.bfloat16().model.layers[0].mlp.up_proj.weight.data.zero_()
    assert not torch.equal(logits(copied), wanted)


@pytest.fixture(params=["random", "trained"])
def source(request: pytest.FixtureRequest, dense: Path) -> Path:
    return dense if request.param == "random" else request.getfixturevalue("stories260k")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.scheme)
def test_logits_are_those_of_the_dequantized_model(
    source: Path, spec: QuantSpec, tmp_path: Path
) -> None:
    plain = quantized(source, tmp_path / "quantized", spec)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    reference.load_state_dict(plain, strict=False)
    wanted = logits(reference)
    model = load(tmp_path / "quantized", dtype=torch.float32)
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert len(layers) == 4 * model.config.num_hidden_layers
    assert not model.training
    error = (logits(model) - wanted).norm() / wanted.norm()
    # Activations in INT8 cost a percent or two; weights alone nothing but float32 rounding.
    assert error < (0.05 if spec.activation_bits else 1e-5)
    in_bf16 = logits(load(tmp_path / "quantized", dtype=torch.bfloat16))
    assert (in_bf16 - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.scheme)
def test_logits_are_those_of_transformers_with_compressed_tensors(
    source: Path, spec: QuantSpec, tmp_path: Path
) -> None:
    quantized(source, tmp_path / "quantized", spec)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    wanted = logits(theirs.eval())
    ours = logits(load(tmp_path / "quantized", dtype=torch.float32))
    # They take absmax / 127.5 as the scale of a token, where engines and we take absmax / 127.
    assert (ours - wanted).norm() / wanted.norm() < (0.05 if spec.activation_bits else 1e-5)


def test_the_cpu_kernel_for_int8_gives_the_bits_of_the_reference(
    source: Path, tmp_path: Path
) -> None:
    quantized(source, tmp_path / "quantized", QuantSpec(8, activation_bits=8))
    fast = load(tmp_path / "quantized", backend="cpu", dtype=torch.float32)
    plain = load(tmp_path / "quantized", backend="reference", dtype=torch.float32)
    assert torch.equal(logits(fast), logits(plain))


def test_a_dense_folder_gives_the_logits_of_transformers(source: Path) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(logits(load(source, dtype=torch.float32)), logits(wanted))


def test_the_head_reads_the_last_token_without_the_strides_of_the_prompt(dense: Path) -> None:
    model, seen = load(dense), []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    ids = torch.arange(3, 63).reshape(2, 30)
    last = model(input_ids=ids, logits_to_keep=1).logits
    assert seen == [(64, 64, 1)]
    assert torch.allclose(last[:, 0], model(input_ids=ids).logits[:, -1], atol=1e-5)


def test_how_a_model_attends_is_told(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(dense)
    for name, words in (("sdpa", "SDPA"), ("eager", "eager")):
        model.set_attn_implementation(name)
        assert in_words(model) == words
    on_gpu: Any = SimpleNamespace(config=model.config, device=torch.device("cuda"))
    model.set_attn_implementation("sdpa")
    assert in_words(on_gpu) == "SDPA, by FlashAttention where torch has it"
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert in_words(on_gpu) == "SDPA"


def test_embeddings_stay_tied_and_a_second_copy_is_taken_as_one(
    dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    quantized(dense, folder, QuantSpec(4))
    for change in (
        lambda tensors: None,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    ):
        change_weights(folder, change)
        model = load(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))


def test_untied_heads_that_disagree_with_the_config_are_refused(
    dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(dense, folder)
    change_weights(folder, lambda t: t.update({"lm_head.weight": torch.ones(128, 64)}))
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(folder)


def test_float16_runs_as_bfloat16_on_cpu_and_scales_stay(dense: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16).save_pretrained(half)
    assert load(half).dtype == torch.bfloat16
    assert load(half, dtype=torch.float32).dtype == torch.float32
    quantized(half, tmp_path / "quantized", QuantSpec(8, activation_bits=8))
    model = load(tmp_path / "quantized")
    stored = load_file(tmp_path / "quantized" / WEIGHTS)
    name = "model.layers.0.mlp.down_proj"
    layer = model.get_submodule(name)
    assert torch.equal(layer.qtensor().scales, stored[f"{name}.weight_scale"])
    assert torch.equal(layer.qtensor().ints, stored[f"{name}.weight"])


def test_a_truncated_file_is_named(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    quantized(dense, folder, QuantSpec(8))
    whole = (folder / WEIGHTS).read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(UserError, match=rf"{WEIGHTS}: damaged or cut short at {size} bytes"):
            load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale"),
            r"layers\.1\.mlp\.up_proj\.weight_scale is missing",
        ),
        (
            lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2)}),
            r"model\.layers\.7\.mlp\.up_proj\.weight is stored, but",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            r"model\.norm\.weight has shape \(63,\); wanted \(64,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight is torch\.int8",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    dense: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    quantized(dense, tmp_path / "quantized", QuantSpec(8))
    change_weights(tmp_path / "quantized", change)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "quantized")
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_shards_is_named(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(dense, folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    again = {"model.norm.weight": tensors["model.norm.weight"].clone()}
    for file, part in (("a.safetensors", tensors), ("b.safetensors", again)):
        save_file(part, folder / file, {"format": "pt"})
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored twice"):
        load(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors: missing"):
        load(folder)


def test_a_folder_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a causal language model that loads") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_layer_moved_or_cast_binds_its_kernel_again() -> None:
    torch.manual_seed(0)
    layer = QuantLinear(64, 32, QuantSpec(8, activation_bits=8), bias=True, dtype=torch.float32)
    layer.weight.random_(-127, 128)
    layer.weight_scale.uniform_(0.01, 0.02)
    nn.init.normal_(layer.bias)
    layer.prepare("cpu", torch.float32)
    x = torch.randn(3, 64)
    before = layer(x)
    layer.weight_scale.mul_(2)
    assert torch.equal(layer.double().float()(x), layer(x))
    doubled = (layer(x) - layer.bias) / (before - layer.bias)
    torch.testing.assert_close(doubled, torch.full_like(doubled, 2), rtol=1e-4, atol=0)
    assert "W8A8" in repr(layer)


@pytest.mark.parametrize("tied", [False, True])
def test_threads_load_at_once(tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    wanted = load(tmp_path)(ids).logits

    def load_some(_: int) -> list[Tensor]:
        begin.wait()
        return [load(tmp_path)(ids).logits for _ in range(8)]

    begin = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        for logits in threads.map(load_some, range(4)):
            assert all(found.equal(wanted) for found in logits)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
