"""A run with `device=cuda`, on a device that is not there: what lives on it, and nothing is mixed.

A Llama in the shape of a 7B with every length a sixteenth, so that weights, activations and
Hessians are each 1/256 of what they are there, and with them the peak. What it comes to:

    python -m pytest tests/pipeline/test_device.py -rP | grep GB$
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import byte_tokenizer
from far import Device
from small import composed
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from compress import heldout, pipeline
from compress.algorithms import rtn, smooth
from compress.blocks import head, hidden
from compress.runtime import linear

LENGTH = 16
SIZE = LENGTH**2
H, K, VOCABULARY = 4096 // LENGTH, 11008 // LENGTH, 32000 // LENGTH
BLOCK = 4 * (4 * H * H + 3 * H * K)  # bytes in float32
LIMIT = 6e9
NOT_COUNTED = 0.6e9
"""For what operators take inside (cuSOLVER, cuBLAS), and for the allocator's fragments."""
SETTINGS = (
    "engine=native",
    "stages=[plan,calibrate,quantize,export]",
    "data.samples=4",
    f"data.length={2048 // LENGTH}",
    f"calibrate.rows={256 // LENGTH}",
    f"calibrate.heldout_length={256 // LENGTH}",
)


@pytest.fixture
def a_sixteenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds the memory of a 7B, made smaller with it; where that takes long, by less."""
    for module, name, share in (
        (hidden, "TOKENS", LENGTH),
        (smooth, "CHANNELS", LENGTH),
        (rtn, "WEIGHTS", LENGTH),
        (head, "CHUNK", SIZE),
        (heldout, "LOGITS", SIZE),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // share)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # asked for by `.to("cuda:0")`
    # Triton runs on no pretended device; the reference holds more, the weight as floats.
    monkeypatch.setattr(linear, "pick_backend", lambda *_: "reference")
    with Device() as found:
        yield found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("7b") / "model"
    config = LlamaConfig(
        hidden_size=H,
        intermediate_size=K,
        num_hidden_layers=2,
        num_attention_heads=32 // LENGTH,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("recipe", "settings"), [("int4_7b", ["quantize.group_size=16"]), ("int8_7b", [])]
)
@pytest.mark.usefixtures("a_sixteenth")
def test_a_7b_is_quantized_in_less_than_6_gb_of_a_gpu(
    recipe: str, settings: list[str], llama: Path, device: Device, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words and no more " * 200)
    paths = (f"model.path={llama}", f"data.path={text}", f"out={tmp_path / 'run'}")
    config = composed(f"recipe={recipe}", *paths, *SETTINGS, *settings)
    config.device = "cuda:0"
    out = pipeline.run(config)
    print(f"{recipe}: {device.peak * SIZE / 1e9:.2f} GB")
    assert BLOCK < device.peak < (LIMIT - NOT_COUNTED) / SIZE
    assert device.now == 0
    measured = json.loads((out / "stages" / "export.json").read_text())["metrics"]["verified"]
    assert measured["kl_moved"] == 0


def test_the_pretended_device_is_as_strict_as_a_real_one(device: Device) -> None:
    here, there = torch.ones(3, 4), torch.ones(3, 4).to("cuda:0")
    with pytest.raises(RuntimeError, match=r"add.*of \[3, 4\] on cuda and \[3, 4\] on cpu"):
        there + here
    with pytest.raises(RuntimeError, match="on cuda and"):
        nn.functional.linear(there, here)
    assert there.cpu().equal(here)
    assert device.now == device.peak == 48
    assert (there[there[:, 0] > 0] + 1.0).sum().item() == 24
    assert device.now == 48 < device.peak
