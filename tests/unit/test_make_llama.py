"""The script that makes a model of random weights makes one that loads and stays finite."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.tensors import TensorFiles

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "make_llama.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_llama", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_loads_and_its_logits_are_finite(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    total = script.make(folder, "tiny", shard_bytes=60_000)
    files = TensorFiles.files(folder)
    assert len(files) > 2
    assert all(file.stat().st_size < 70_000 for file in files)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    assert total == 2 * sum(p.numel() for p in model.parameters())
    ids = AutoTokenizer.from_pretrained(folder)("Grüße, world", return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 1 + len("Grüße, world".encode()))
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert 0.1 < hidden.float().std() < 10
    assert logits.float().std() > 0.01


def test_same_arguments_same_bytes_and_fewer_blocks(script: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        script.make(tmp_path / name, "tiny", blocks=1, tokenizer=None)
    a, b = (tmp_path / name / "model.safetensors" for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()
    names = set(TensorFiles(tmp_path / "a"))
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert not any(name.startswith("model.layers.1.") for name in names)
    script.make(tmp_path / "c", "tiny", blocks=1, tokenizer=tmp_path / "a", seed=1)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() != a.read_bytes()
    text = (tmp_path / "c" / "tokenizer.json").read_text()
    assert text == (tmp_path / "a" / "tokenizer.json").read_text()
