"""A model whose Python lies in its folder: refused unasked, and run when asked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, dynamic_module_utils

from compress import pipeline
from compress.config import Config
from compress.errors import UserError
from compress.runtime.loader import load
from compress.source import read_config

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = Path(shutil.copytree(tiny_model, tmp_path / "own"))
    (model / "modeling_own.py").write_text(CODE)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_refused_unasked(small: Callable[..., Config], own_code: Path) -> None:
    said = r"Python code in its folder.*add model\.trust_remote_code=true"
    with pytest.raises(UserError, match=said):
        pipeline.run(small(f"model.path={own_code}"))
    with pytest.raises(UserError, match=r"not a causal language model that loads"):
        load(own_code)


def test_run_when_asked(small: Callable[..., Config], own_code: Path, tiny_model: Path) -> None:
    assert read_config(own_code, True).model_type == "own_llama"
    ids = AutoTokenizer.from_pretrained(tiny_model)("The file", return_tensors="pt")["input_ids"]
    ours, plain = load(own_code, trust_remote_code=True), load(tiny_model)
    assert type(ours).__name__ == "OwnForCausalLM"
    assert torch.equal(ours(ids).logits, plain(ids).logits)
    trusted = (f"model.path={own_code}", "model.trust_remote_code=true")
    stages = "stages=[plan,calibrate,quantize,export,serve,score,report]"
    out = pipeline.run(small(*trusted, stages))
    assert (out / "checkpoint" / "modeling_own.py").read_text() == CODE
    served = load(out / "checkpoint", trust_remote_code=True)
    assert type(served).__name__ == "OwnForCausalLM"
    assert (out / "report.json").exists()
