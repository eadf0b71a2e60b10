"""Faults planted in a checkpoint are found by the judging, and named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from compress.algorithms.rope import scaled
from compress.algorithms.rtn import rtn
from compress.eval.diagnosis import faults
from compress.eval.fingerprint import Fingerprint
from compress.eval.layers import Blocks
from compress.model_path import Model
from compress.qtensor import QuantSpec, dequantize
from compress.stage import Run
from compress.stages.score import Score
from compress.stages.serve import Serve
from compress.text.documents import Data


@pytest.fixture(scope="module")
def dense(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head of its own, that can be changed apart from the embedding."""
    folder = tmp_path_factory.mktemp("models") / "dense"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def judged(dense: Path, checkpoint: Path, work: Path) -> dict[str, Any]:
    config = SimpleNamespace(device="cpu", seed=0, data=Data(), model=Model(), serve=Serve())
    artifacts = {"dense": dense, "checkpoint": checkpoint}
    score = Score(text=__file__, tasks=["cloze"], limit=1, windows=1, window_tokens=128)
    return score.run(Run(config, artifacts, work, {}), work)


def changed(change: Callable[[PreTrainedModel], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            change(model)
        model.save_pretrained(folder)

    return plant


def head_in_4_bit(model: PreTrainedModel) -> None:
    rounded = rtn(model.lm_head.weight.float(), QuantSpec(bits=4), torch.float32)
    model.lm_head.weight.copy_(dequantize(rounded.ints, rounded.scales))


def doubled_scales(model: PreTrainedModel) -> None:
    block = model.model.layers[2]
    for linear in (block.self_attn.o_proj, *block.mlp.children()):
        if isinstance(linear, torch.nn.Linear):
            linear.weight *= 2


def noisy_embedding(model: PreTrainedModel) -> None:
    weight = model.model.embed_tokens.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight += 0.3 * weight.std() * noise


def another_order(model: PreTrainedModel) -> None:
    """The channels of every MLP no longer where those that write them are."""
    for block in model.model.layers:
        block.mlp.down_proj.weight.copy_(block.mlp.down_proj.weight.roll(1, dims=1))


def negated(model: PreTrainedModel) -> None:
    for linear in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        linear.weight.neg_()


def settings(file: str, **more: Any) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | more))

    return plant


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def no_bos(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "post_processor": None}))


def no_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()


def ends_with(*ids: int) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        for file in (folder / "config.json", folder / "generation_config.json"):
            content = json.loads(file.read_text())
            file.write_text(json.dumps(content | {"eos_token_id": list(ids) or None}))

    return plant


def wrong_rope(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    file.write_text(json.dumps(config))


def another_config(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rms_norm_eps"] *= 1.5
    config["max_position_embeddings"] //= 2
    file.write_text(json.dumps(config))


def extended(folder: Path) -> None:
    """By half of what its new window asks for."""
    wrong_rope(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["max_position_embeddings"] *= 8
    file.write_text(json.dumps(config))


def extended_well(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    window, size = config["max_position_embeddings"], config["hidden_size"]
    config["rope_parameters"] = scaled(
        "yarn", config["rope_parameters"], 4.0, size // config["num_attention_heads"], window
    )
    config["max_position_embeddings"] = 4 * window
    file.write_text(json.dumps(config))


def another_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    others = [*range(5), *reversed(range(5, len(ids)))]  # special tokens stay
    content["model"]["vocab"] = dict(zip(ids, others, strict=True))
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("plant", "name", "said"),
    [
        (lambda folder: None, None, ""),
        (changed(head_in_4_bit), "LM head", "The output head alone costs a KL of 0."),
        (changed(doubled_scales), "block", "so its scales or norms are wrong"),
        (changed(negated), "block", "what it adds points elsewhere, so its weights are wrong"),
        (changed(another_order), "block", "what they have in common is wrong"),
        (changed(noisy_embedding), "embedding", "The input embedding is off by 35% of its size"),
        (no_template, "chat template", "is lost"),
        (no_bos, "BOS", "BOS is missing"),
        (no_settings, "tokenizer", "no longer says what its bos_token and eos_token is"),
        (
            settings("tokenizer_config.json", eos_token="<|pad|>"),
            "tokenizer",
            "has <|pad|> as its eos_token, not <|end|>",
        ),
        (
            settings("generation_config.json", no_repeat_ngram_size=3, repetition_penalty=1.5),
            "generation",
            "no_repeat_ngram_size is 3, should be absent; repetition_penalty is 1.5, should be",
        ),
        (ends_with(), "EOS", "EOS is missing: <|end|> ends the original's answers; the "),
        (
            ends_with(1, 2),
            "EOS",
            "answers are ended by <|end|> or <|pad|>, the original's by <|end|>",
        ),
        (wrong_rope, "RoPE", "factor is 4.0, should be absent"),
        (extended, "RoPE", "factor 4.0 in place of absent"),
        (extended_well, None, ""),
        (another_config, "configuration", "rms_norm_eps is 1.5e-06, should be 1e-06"),
        (another_tokenizer, "tokenizer", "is that of another model"),
    ],
    ids=[
        *("none", "head", "scales", "negated", "order", "embedding", "template", "bos"),
        *("settings", "eos name", "penalties", "no eos", "eos"),
        *("rope", "extended", "extended well", "config", "tokenizer"),
    ],
)
def test_a_planted_fault_is_named(
    dense: Path, tmp_path: Path, plant: Callable[[Path], None], name: str | None, said: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(dense, checkpoint)
    plant(checkpoint)
    found = judged(dense, checkpoint, tmp_path)["faults"]
    assert {fault["name"] for fault in found} == ({name} if name else set())
    assert said in "".join(fault["text"] for fault in found)


def test_blocks_are_judged_one_by_one(dense: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(dense, checkpoint)
    changed(doubled_scales)(checkpoint)
    blocks = judged(dense, checkpoint, tmp_path)["blocks"]
    assert len(blocks["error"]) == len(blocks["gain"]) == 4
    assert blocks["error"][2] > 0.5
    assert max(e for i, e in enumerate(blocks["error"]) if i != 2) < 0.02
    assert max(blocks["error_floor"]) < 0.02
    assert blocks["head_kl"] < 1e-3


SERVED = Blocks([0.01, 0.01, 0.01], [1.0, 1.0, 1.0], 0.0001)
RIGHT = Fingerprint({"a": 0, "b": 1}, ((0, 1),), True, "{{ x }}", {"rope_theta": 1e4})


def test_what_is_as_it_should_be_has_no_fault() -> None:
    even = Blocks([0.2, 0.25, 0.3], [1.0, 0.9, 0.9], 0.001)
    assert faults(RIGHT, RIGHT, even, SERVED) == []


def test_what_arithmetic_alone_costs_is_no_fault() -> None:
    coarse = Blocks([0.02, 0.4, 0.02], [1.0, 1.0, 1.0], 0.009)
    served = Blocks([0.02, 0.35, 0.02], [1.0, 1.0, 1.0], 0.006)
    assert faults(RIGHT, RIGHT, coarse, served) == []
    names = [fault["name"] for fault in faults(RIGHT, RIGHT, coarse, SERVED)]
    assert names == ["LM head", "block"]


def test_a_tokenizer_that_is_gone_is_one_fault_not_three() -> None:
    gone = Fingerprint({}, (), False, None, {"rope_theta": 1e4})
    found = faults(RIGHT, gone, Blocks([0.1] * 3, [1.0] * 3, 0.0), SERVED)
    assert [fault["name"] for fault in found] == ["tokenizer"]


def test_a_head_that_is_quantized_is_named_with_its_scheme() -> None:
    (fault,) = faults(RIGHT, RIGHT, Blocks([0.1] * 3, [1.0] * 3, 0.06, "W4A16 g64"), SERVED)
    assert "KL of 0.060 nats a token: it is stored in W4A16 g64" in fault["text"]


@pytest.mark.parametrize(
    ("error", "gain", "said"), [(0.34, 1.31, "1.31"), (0.36, 0.98, "0.98"), (0.34, 0.98, None)]
)
def test_what_is_wrong_with_all_blocks_alike_is_named(
    error: float, gain: float, said: str | None
) -> None:
    found = faults(RIGHT, RIGHT, Blocks([error] * 3, [gain] * 3, 0.0), SERVED)
    assert len(found) == (said is not None)
    for fault in found:
        assert fault["text"].startswith(f"The blocks add {said} times what they should (median), ")


@pytest.mark.parametrize(
    ("error", "gain", "said"),
    [
        (1.01, 2.0, "it adds 2.00 times what it should, so its scales or norms are wrong"),
        (0.75, 0.4, "it adds 0.40 times what it should, so its scales or norms are wrong"),
        (1.01, 0.3, "what it adds points elsewhere"),  # most of the error is left at that factor
        (3.0, -1.8, "what it adds points elsewhere"),
        (0.5, 0.9, "what it adds points elsewhere"),
    ],
)
def test_a_factor_is_named_where_it_explains_the_error(
    error: float, gain: float, said: str
) -> None:
    (fault,) = faults(RIGHT, RIGHT, Blocks([0.1, error, 0.1], [1.0, gain, 1.0], 0.0), SERVED)
    assert said in fault["text"]


def test_weights_are_not_blamed_where_the_configuration_is_wrong() -> None:
    stretched = replace(RIGHT, rope={"rope_theta": 2e4})
    off = Blocks([0.1, 0.5, 0.1], [1.0, 0.9, 1.0], 0.0)
    rope, block = faults(RIGHT, stretched, off, SERVED)
    assert rope["name"] == "RoPE"
    assert block["text"].endswith("the median block by 10.0%: config.json may explain it.")


def test_a_checkpoint_of_fewer_blocks_is_judged(dense: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(dense)
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    model.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(dense).save_pretrained(checkpoint)
    found = judged(dense, checkpoint, tmp_path)
    assert found["blocks"] is None
    assert found["faults"] == []
    assert found["fidelity"]["kl"] > 0.01


def test_errors_that_are_not_finite_are_faults() -> None:
    broken = Blocks([0.1, float("nan"), 0.1], [1.0, float("nan"), 1.0], 0.0)
    found = faults(RIGHT, RIGHT, broken, SERVED)
    assert [fault["name"] for fault in found] == ["block"]
    said = "gives are not finite numbers: its weights or scales are broken."
    assert found[0]["text"] == f"What block 1 {said}"
    nothing = Blocks([float("nan")] * 3, [float("nan")] * 3, float("inf"))
    found = faults(RIGHT, RIGHT, nothing, SERVED)
    assert [fault["text"] for fault in found] == [
        f"What the output head {said}",
        *(f"What block {i} {said}" for i in range(3)),
    ]
