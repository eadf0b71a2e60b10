"""A longer window, end to end: what is shipped turns, generates and resumes as it should."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import forked
from test_kill import killed_in_bar
from test_run import files
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress import pipeline
from compress.algorithms import rope
from compress.config import Config
from compress.errors import UserError
from compress.runtime.loader import load
from compress.source import describe, read_config

Small = Callable[..., Config]

STAGES = "stages=[calibrate,quantize,distill,extend,export]"
LONGER = (
    STAGES,
    "extend.method=yarn",
    "extend.search=true",
    "extend.steps=12",
    "extend.passkey=0.25",
    "extend.keys=1",
    "extend.depths=2",
)
INT4 = (
    STAGES,
    "quantize=w4a16",
    "quantize.group_size=32",
    "extend.method=ntk",
    "extend.factor=4",
    "extend.steps=4",
    "extend.length=64",
    "extend.labels=false",
    "extend.near=0",
    "extend.rate=2e-5",
    "extend.precision=bfloat16",
)

Run = tuple[Path, Any]
"""The folder of a run, and what extend said."""


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """A run with W8A8 and yarn that was killed in its fine-tune and gone on with."""
    from small import SMALL, composed

    out = tmp_path_factory.mktemp("longer") / "run"

    def settings(*more: str) -> Config:
        given = ["recipe=tiny", f"model.path={tiny_model}", f"out={out}", *SMALL, *LONGER, *more]
        return composed(*given)

    assert forked(lambda: pipeline.run(settings())) == 0
    alone = files(out / "checkpoint")
    assert forked(lambda: killed_in_bar("extend", 11, settings("force=[extend]"))) == -9
    work = out / "stages" / "extend.partial" / "work"
    assert {f.name for f in work.iterdir()} >= {"before.json", "scaled.json", "extend.state"}
    assert forked(lambda: pipeline.run(settings())) == 0
    assert files(out / "checkpoint") == alone
    return out, told(out, "extend")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """A run with W4A16, distilled, four times the window by NTK-aware."""
    from small import SMALL, composed

    out = tmp_path_factory.mktemp("int4") / "run"
    given = ["recipe=tiny", f"model.path={tiny_model}", f"out={out}", *SMALL, *INT4]
    assert forked(lambda: pipeline.run(composed(*given))) == 0
    assert told(out, "distill")["kept"]
    return out, told(out, "extend")


@pytest.fixture(params=["int8", "int4"])
def extended(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


def told(out: Path, stage: str) -> Any:
    return json.loads((out / "stages" / f"{stage}.json").read_text())["metrics"]


def test_the_checkpoint_turns_by_the_formulae_in_its_window(extended: Run) -> None:
    out, told = extended
    before, after = told["window"]["before"], told["window"]["after"]
    assert after == told["factor"] * before > before
    assert describe(out / "checkpoint")["max_position_embeddings"] == after
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoint", dtype=torch.float32)
    assert model.config.max_position_embeddings == after
    wanted, temperature = rope.frequencies(model.config.rope_parameters, 32, after)
    turner = model.model.rotary_emb
    torch.testing.assert_close(turner.inv_freq.double(), wanted, rtol=1e-5, atol=0)
    assert turner.attention_scaling == pytest.approx(temperature)


def test_the_model_turns_by_what_the_search_found(int8: Run) -> None:
    _, told = int8
    original = told["rope_parameters"]["original_max_position_embeddings"]
    assert original == round(told["window"]["before"] / told["stretch"])
    assert told["stretch"] == float(min(told["search"], key=lambda k: told["search"][k]))
    assert told["rope_parameters"]["factor"] == 2 * told["stretch"]


def test_the_checkpoint_generates_past_the_old_window(extended: Run) -> None:
    out, told = extended
    folder, window = out / "checkpoint", told["window"]["before"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length >= told["window"]["after"]
    ids = tokenizer("The file is read line by line. " * 100, return_tensors="pt")["input_ids"]
    ids = ids[:, : window + 20]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    written = theirs.generate(ids, max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
    assert written.shape == (1, window + 28)
    ours = load(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted, found = (model(written).logits[:, window:] for model in (theirs, ours))
    assert float((wanted - found).abs().max()) < 0.02 * float(wanted.abs().max())


def test_the_stage_says_how_the_window_is_read(int8: Run) -> None:
    _, told = int8
    states = ("before", "scaled", "after")
    for key in ("ppl", "short_ppl", "retrieval"):
        assert set(told[key]) == set(states)
    assert told["ppl"]["after"] <= told["ppl"]["scaled"]
    exact = told["retrieval"]["after"]["passkey"]["exact"]
    assert [len(row) for row in exact] == [3, 3]  # half and whole of the old window, the new one
    assert told["curve"][0]["step"] == 0
    assert told["kl"]["after"] != told["kl"]["before"]


def test_it_learns_from_the_labels_of_the_original_or_from_the_text(int8: Run, int4: Run) -> None:
    for _, told in (int8, int4):
        assert not any("no fine-tuning step" in note for note in told["notes"])
    out, told = int8
    assert 0.8 * 9 * 160 < told["labels"]["tokens"] <= 9 * 160  # a number is hidden in 3 of 12
    assert list((out / "stages" / "extend_labels").glob("*.arrow"))
    out, told = int4
    assert told["labels"] is None
    assert not (out / "stages" / "extend_labels").exists()


def test_a_model_whose_rope_cannot_be_stretched_is_refused_with_the_reason(
    small: Small, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).symlink_to(file)
    changed = json.loads((tiny_model / "config.json").read_text())
    changed["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(changed))
    config = small(f"model.path={folder}", "extend.method=yarn")
    with pytest.raises(UserError, match="stretched by linear, whose config does not say"):
        config.extend.refuse(read_config(folder, False))
