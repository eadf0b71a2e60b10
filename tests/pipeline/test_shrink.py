"""A smaller student through the pipeline: cut or given, taught, killed, judged by the original."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import composed, forked
from test_kill import killed_in_bar
from test_run import files
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress import pipeline
from compress.config import Config
from compress.errors import ConfigError, UserError
from compress.report.words import significant
from compress.source import describe, read_config
from compress.stages.shrink import Shrink
from compress.text.documents import python_docs
from compress.training.padded import pad_vocabulary

Small = Callable[..., Config]

CUT = ("shrink.blocks=3", "shrink.mlp=256", "shrink.kv_heads=1")
TAUGHT = (
    *CUT,
    *("shrink.samples=96", "shrink.length=64", "shrink.batch=4"),
    *("shrink.measures=2", "shrink.rate=5e-4"),
)


def manifest(out: Path, stage: str) -> dict[str, Any]:
    return json.loads((out / "stages" / f"{stage}.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The option for a text that takes no time to tokenize."""
    file = tmp_path_factory.mktemp("text") / "docs.txt"
    file.write_text("\n\n".join(python_docs())[:100_000])
    return f"data.path={file}"


@pytest.fixture
def short(small: Small, text: str) -> Small:
    """A small run on that text."""
    return partial(small, text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, text: str) -> Path:
    """A whole run, quantized, distilled, served, scored and reported."""
    from small import SMALL

    out = tmp_path_factory.mktemp("shrink") / "run"
    words = (
        "recipe=tiny",
        f"model.path={tiny_model}",
        text,
        f"out={out}",
        "extend.factor=1",
        "stages=[plan,calibrate,quantize,export,score,report]",
    )
    pipeline.run(composed(*words, *SMALL, *TAUGHT))
    return out


def test_the_checkpoint_is_the_smaller_model(finished: Path, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "checkpoint")
    config = model.config
    assert len(model.model.layers) == config.num_hidden_layers == 3
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    assert config.intermediate_size == 256
    assert AutoTokenizer.from_pretrained(finished / "checkpoint").chat_template
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    told = manifest(finished, "shrink")["parameters"]
    student = AutoModelForCausalLM.from_pretrained(finished / "stages" / "shrink")
    assert told == {"before": weights, "after": sum(p.numel() for p in student.parameters())}


def test_the_student_learns_and_all_is_measured_by_the_original(finished: Path) -> None:
    shrink, plan = manifest(finished, "shrink"), manifest(finished, "plan")
    assert shrink["kept"]
    assert shrink["tokens"] == 96 * 64
    assert shrink["fit"]["tensors"] == 2 * 3
    assert shrink["fit"]["tokens"] == 32 * 64
    assert shrink["fit"]["kl"] < 0.9 * shrink["kl"]["before"]
    assert shrink["curve"][0]["kl"] == pytest.approx(shrink["fit"]["kl"], rel=1e-3)
    assert shrink["kl"]["after"] < shrink["fit"]["kl"]
    assert shrink["ppl"]["original"] < shrink["ppl"]["after"] < shrink["ppl"]["before"]
    assert len(shrink["left_out"]) == 1
    quantize, score = manifest(finished, "quantize"), manifest(finished, "score")
    assert quantize["heldout_kl"]["before"] == shrink["kl"]["after"]
    # The original's answers, not the student's: calibrate keeps what the original says.
    assert manifest(finished, "calibrate")["heldout"]["ppl"] == pytest.approx(
        shrink["ppl"]["original"], rel=1e-4
    )
    assert quantize["heldout_kl"]["after"] == pytest.approx(shrink["kl"]["after"], rel=0.2)
    assert score["fidelity"]["kl"] > 0.5 * shrink["kl"]["after"]
    assert score["fidelity"]["kl_floor"] < 0.01
    assert score["blocks"] is None
    assert score["faults"] == []
    assert plan["parameters"] == shrink["parameters"]["after"]
    on_disk = sum(f.stat().st_size for f in (finished / "checkpoint").glob("*.safetensors"))
    assert plan["bytes"]["after"]["total"] == pytest.approx(on_disk, rel=0.03)


def test_the_report_says_what_was_cut(finished: Path) -> None:
    wanted = "3 of its 4 blocks, 1 of its 2 KV heads and 256 of its 384 MLP channels"
    findings = json.loads((finished / "report.json").read_text())["verdict"]["findings"]
    (said,) = [f["text"] for f in findings if f["about"] == "A smaller model"]
    assert wanted in said
    shrink = manifest(finished, "shrink")
    assert f"{significant(shrink['kl']['before'])} as cut" in said
    fitted = f"{significant(shrink['fit']['kl'])} fitted to the original's hidden states"
    assert (fitted in said) == (shrink["fit"]["kl"] < shrink["kl"]["before"])
    assert "6,144 tokens of the original's soft labels" in said
    assert "<h2>A smaller model</h2>" in (finished / "report.html").read_text()
    card = (finished / "checkpoint" / "README.md").read_text()
    assert wanted in card
    assert "| making it smaller | " in card


def test_killed_again_and_again_it_goes_on_to_the_same_bytes(short: Small, finished: Path) -> None:
    def config() -> Config:
        return short(*TAUGHT, "stages=[shrink]")

    out = Path(config().out or "")
    for bar, after in (("leave out", 2), ("fit", 1), ("soft labels", 1), ("shrink", 11)):
        assert forked(partial(killed_in_bar, bar, after, config())) == -9
        assert (out / "stages" / "shrink.partial" / "key.json").exists()
    assert forked(lambda: pipeline.run(config())) == 0
    assert "shrink: goes on" in (out / "log.txt").read_text()
    assert files(out / "stages" / "shrink") == files(finished / "stages" / "shrink")
    assert not list((out / "stages").glob("*.partial"))


def test_other_settings_use_the_labels_again_and_cut_alone_is_handed_on(
    short: Small, finished: Path
) -> None:
    words = ("stages=[shrink]", *TAUGHT, "shrink.hard=1.0", "force=[shrink]")
    out = Path(short().out or "")
    for name in ("shrink", "shrink_labels"):
        shutil.copytree(finished / "stages" / name, out / "stages" / name)
        shutil.copy(finished / "stages" / f"{name}.json", out / "stages")
    before = manifest(out, "shrink")
    labels_file = out / "stages" / "shrink_labels" / "000000.arrow"
    made = labels_file.stat().st_mtime_ns
    pipeline.run(short(*words))
    assert labels_file.stat().st_mtime_ns == made
    assert manifest(out, "shrink")["labels"] == before["labels"]
    assert manifest(out, "shrink")["curve"][-1] != before["curve"][-1]
    pipeline.run(short(*words, "shrink.samples=0"))
    told = manifest(out, "shrink")
    assert told["kept"] is False
    assert told["kl"]["before"] > told["kl"]["after"] == told["fit"]["kl"] > 0
    pipeline.run(short(*words, "shrink.samples=0", "shrink.fit=0"))
    told = manifest(out, "shrink")
    assert told["fit"] is None
    assert told["kl"]["after"] == told["kl"]["before"] > 0
    assert describe(out / "stages" / "shrink")["num_hidden_layers"] == 3


def test_a_given_student_takes_the_original_s_place(
    short: Small, finished: Path, tmp_path: Path
) -> None:
    given = tmp_path / "smaller"
    shutil.copytree(finished / "stages" / "shrink", given)
    weights = given / "model.safetensors"
    tensors = load_file(weights)
    head = tensors["model.embed_tokens.weight"].clone()  # tied, and stored all the same
    save_file({**tensors, "lm_head.weight": head}, weights, {"format": "pt"})
    before = weights.read_bytes()
    words = ("stages=[plan,calibrate,quantize]", f"shrink.student={given}", *TAUGHT[3:])
    config = short(*words)
    assert config.stages == ["plan", "shrink", "calibrate", "quantize"]
    pipeline.run(config)
    stages = Path(config.out or "") / "stages"
    told = manifest(stages.parent, "shrink")
    assert "in none of its files" not in (stages.parent / "log.txt").read_text()
    assert told["student"] == "smaller"
    assert told["left_out"] == []
    assert told["kept"]
    assert told["kl"]["after"] < told["kl"]["before"]
    assert told["trained_parameters"] == told["parameters"]["after"] - head.numel()
    assert weights.read_bytes() == before
    assert weights.stat().st_nlink == 1
    student = AutoModelForCausalLM.from_pretrained(stages / "shrink")
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert not torch.equal(student.lm_head.weight.bfloat16(), head)


def test_a_student_with_a_shorter_window_learns_and_is_measured_within_it(
    short: Small, tiny_model: Path, tmp_path: Path
) -> None:
    given = Path(shutil.copytree(tiny_model, tmp_path / "smaller"))
    described = describe(given) | {"max_position_embeddings": 48}
    (given / "config.json").write_text(json.dumps(described))
    words = (f"shrink.student={given}", "shrink.samples=2", "shrink.length=64")
    out = pipeline.run(short("stages=[shrink,calibrate]", *words))
    assert "windows of 48 tokens instead of 64, the limit of" in (out / "log.txt").read_text()
    assert manifest(out, "shrink")["labels"]["tokens"] == 2 * 48
    kept = load_file(out / "stages" / "calibrate" / "heldout.safetensors")
    assert kept["ids"].shape == (2, 48)


def test_it_is_off_unless_asked_for_and_its_place_is_not_skipped(short: Small) -> None:
    assert "shrink" not in short().stages
    assert short("shrink.blocks=3").stages[:3] == ["plan", "shrink", "calibrate"]
    with pytest.raises(ConfigError, match="shrink runs only where asked to cut"):
        short("force=[shrink]")
    with pytest.raises(UserError, match=r"calibrate needs dense.*run it first with only=shrink"):
        pipeline.run(short(*CUT, "only=calibrate"))


@pytest.mark.parametrize(
    ("stages", "option", "said"),
    [
        ("plan,calibrate,quantize", "blocks=9", "shrink.blocks is 9; the model has 4; wanted 1 to"),
        ("shrink", "blocks=9", "shrink.blocks is 9; the model has 4; wanted 1 to 4"),
        ("shrink", "student={other}", ": another vocabulary, of 512 tokens where the model has"),
        ("shrink", "student=nowhere", "shrink.student=nowhere: no config.json there"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(
    short: Small, stories260k: Path, stages: str, option: str, said: str
) -> None:
    config = short(f"stages=[{stages}]", f"shrink.{option.format(other=stories260k)}")
    with pytest.raises(UserError) as raised:
        pipeline.run(config)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    work = Path(config.out or "") / "stages" / "shrink.partial" / "work"
    assert not work.exists() or not list(work.iterdir())


@pytest.mark.parametrize("more", [64, -3])
def test_a_student_padded_otherwise_says_the_same_as_before(
    more: int, short: Small, tiny_model: Path, tmp_path: Path
) -> None:
    """Its padding is cut, or the last of its rows repeated."""
    padded = tmp_path / "padded"
    padded.mkdir()
    rows = describe(tiny_model)["vocab_size"] + abs(more)
    pad_vocabulary(tiny_model, padded, rows, False)
    original, given = (tiny_model, padded) if more > 0 else (padded, tiny_model)
    words = (f"model.path={original}", f"shrink.student={given}", "shrink.samples=0")
    out = pipeline.run(short("stages=[shrink]", *words))
    wanted = describe(original)["vocab_size"]
    assert f"is padded to the original's {wanted}" in (out / "log.txt").read_text()
    student = load_file(out / "stages" / "shrink" / "model.safetensors")
    assert describe(out / "stages" / "shrink")["vocab_size"] == wanted
    for name, tensor in load_file(original / "model.safetensors").items():
        assert torch.equal(student[name], tensor)
    assert manifest(out, "shrink")["kl"]["before"] == pytest.approx(0, abs=1e-6)
    embedding = load_file(padded / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding[-abs(more) :], embedding[-1].expand(abs(more), -1))


def test_a_student_with_less_than_the_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    own = describe(tiny_model)["vocab_size"]
    pad_vocabulary(tiny_model, tmp_path, own - 8, False)
    with pytest.raises(UserError, match=f"of {own - 8} tokens where the original's has {own}, and"):
        Shrink(student=str(tmp_path)).refuse(read_config(tiny_model, False), tiny_model, False)


def test_every_wrong_setting_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Shrink(blocks=0, fit=1, rate=0.0, hard=2.0, precision="fp8", samples=-1, student="x")
    assert str(error.value).splitlines() == [
        "shrink.blocks is 0; wanted at least 1",
        "shrink.samples is -1; wanted at least 0",
        "shrink.fit is 1; wanted 0, or at least 2, one of them to check by",
        "shrink.rate is 0.0; wanted above 0",
        "shrink.hard is 2.0; wanted 0 to 1",
        "shrink.precision is 'fp8'; wanted one of float32, bfloat16",
        "shrink.student is given with shrink.blocks, mlp or kv_heads; wanted a smaller model or a "
        "cut of the original, not both",
    ]
