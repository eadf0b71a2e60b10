"""Models of our runtime that are saved, and those that transformers' own calls load."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    pipeline,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from compress.errors import UserError
from compress.qtensor import QuantSpec
from compress.runtime import quantizer
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import load
from tests.unit.test_runtime import WEIGHTS, logits, quantized

W8A8 = QuantSpec(8, activation_bits=8)
SPECS = [W8A8, QuantSpec(8), QuantSpec(4), QuantSpec(4, 4)]


@pytest.fixture(scope="module")
def bf16(stories260k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, so that scales are too."""
    folder = tmp_path_factory.mktemp("saved") / "bf16"
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in stories260k.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, bf16: Path, tmp_path: Path) -> Path:
    quantized(bf16, tmp_path / "checkpoint", request.param)
    return tmp_path / "checkpoint"


@pytest.fixture
def installed() -> Iterator[None]:
    theirs = AUTO_QUANTIZER_MAPPING[quantizer.METHOD]
    quantizer.install()
    yield
    AUTO_QUANTIZER_MAPPING[quantizer.METHOD] = theirs


def stored_alike(one: Path, other: Path) -> bool:
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype
        for name in first
    )


@pytest.mark.parametrize("checkpoint", SPECS, indirect=True, ids=lambda spec: spec.scheme)
def test_a_loaded_model_is_saved_as_the_checkpoint_that_it_is(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = load(checkpoint)
    model.save_pretrained(tmp_path / "saved")
    assert stored_alike(tmp_path / "saved", checkpoint)
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("checkpoint", [QuantSpec(4, 4), QuantSpec(8)], indirect=True, ids=str)
def test_words_in_planar_order_are_saved_in_the_checkpoints(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is installed on Linux only")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = load(checkpoint, backend="triton")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    own, stored = model.get_buffer(name), load_file(checkpoint / WEIGHTS)
    assert own.shape != stored[name].shape or not torch.equal(own, stored[name])
    model.save_pretrained(tmp_path / "saved")
    assert stored_alike(tmp_path / "saved", checkpoint)
    # And back: other weights come in the checkpoint's order too.
    model.load_state_dict({n: t.flip(0) for n, t in stored.items() if n == name}, strict=False)
    assert torch.equal(model.state_dict()[name], stored[name].flip(0))


@pytest.mark.parametrize("spec", SPECS[:3], ids=lambda spec: spec.scheme)
def test_a_linear_that_takes_other_weights_is_bound_again(spec: QuantSpec) -> None:
    def made() -> QuantLinear:
        linear = QuantLinear(64, 32, spec, bias=True, dtype=torch.bfloat16)
        nn.init.normal_(linear.bias)
        for buffer in linear.buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.01, 0.02)
            else:
                buffer.random_(-100, 100)
        linear.prepare("cpu", torch.bfloat16)
        return linear

    one, other = made(), made()
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert not torch.equal(one(x), other(x))
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("checkpoint", SPECS, indirect=True, ids=lambda spec: spec.scheme)
def test_from_pretrained_runs_our_kernels(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    linear = model.model.layers[0].mlp.up_proj
    assert isinstance(linear, QuantLinear)
    assert linear._kernel is not None
    assert torch.equal(logits(model), logits(load(checkpoint)))
    model.save_pretrained(tmp_path / "saved")
    assert stored_alike(tmp_path / "saved", checkpoint)
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))
    with safe_open(tmp_path / "saved" / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("checkpoint", [W8A8], indirect=True, ids=str)
def test_a_pipeline_is_named_by_the_folder_alone(checkpoint: Path) -> None:
    asked = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    written = pipeline("text-generation", model=str(checkpoint))
    assert isinstance(written.model.model.layers[0].mlp.up_proj, QuantLinear)
    loaded = pipeline("text-generation", model=load(checkpoint), tokenizer=written.tokenizer)
    assert written("Once upon a time", **asked) == loaded("Once upon a time", **asked)


@pytest.mark.parametrize("checkpoint", [W8A8, QuantSpec(4, 4)], indirect=True, ids=str)
def test_a_kv_cache_of_fixed_size_gives_the_same_tokens(checkpoint: Path) -> None:
    model, ids = load(checkpoint), torch.arange(3, 20)[None]
    asked = {"do_sample": False, "min_new_tokens": 20, "max_new_tokens": 20}
    growing = model.generate(ids, **asked)
    fixed = model.generate(ids, cache_implementation="static", **asked)
    assert growing.shape == (1, 37)
    assert torch.equal(fixed, growing)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("checkpoint", [W8A8], indirect=True, ids=str)
def test_continuous_batching_of_transformers_takes_it(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
    prompts = [list(range(3, 9)), list(range(40, 60))]
    alone = [
        model.generate(torch.tensor([p]), generation_config=greedy)[0, len(p) :].tolist()
        for p in prompts
    ]
    model.set_attn_implementation("sdpa")
    room = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, page_size=32)
    made = model.generate_batch(prompts, greedy, continuous_batching_config=room)
    assert sorted(one.generated_tokens for one in made.values()) == sorted(alone)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("checkpoint", [W8A8], indirect=True, ids=str)
def test_offloaded_weights_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "model.layers": "disk"}
    with pytest.raises(UserError, match=r"leaves weights on cpu and disk; .* GPUs alone"):
        AutoModelForCausalLM.from_pretrained(
            checkpoint, device_map=places, offload_folder=tmp_path / "offloaded"
        )


def test_float16_without_a_gpu_runs_as_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    made = quantizer.KernelQuantizer(SimpleNamespace(quant_method=quantizer.METHOD))
    for gpu, dtype in ((False, torch.bfloat16), (True, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert made.update_dtype(torch.float16) == dtype
    assert made.update_dtype(torch.float32) == torch.float32
