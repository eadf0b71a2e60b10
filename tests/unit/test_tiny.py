"""The small Llama: it learns, it is whole, and it is the same every time."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from compress import tiny
from compress.errors import UserError
from compress.text.documents import Data, split
from compress.tiny import CONTEXT, VOCABULARY, heldout_loss, main, make_tiny

STEPS = 3


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the text, for tests that ask nothing of what is learned."""
    learn, held, words = split(Data())
    monkeypatch.setattr(tiny, "split", lambda _: (learn[:20], held, words))


def test_learns_more_than_frequencies(tiny_model: Path) -> None:
    learn, held, _ = split(Data())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = [
        torch.tensor(tokenizer("\n\n".join(part), add_special_tokens=False)["input_ids"])
        for part in (learn, held)
    ]
    counts = torch.bincount(ids[0], minlength=VOCABULARY).double()
    frequencies = counts[counts > 0] / counts.sum()
    entropy = float(-(frequencies * frequencies.log()).sum())
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    loss = heldout_loss(model, ids[1])
    assert entropy == pytest.approx(5.9, abs=0.2)
    assert loss < entropy - 1.0


def test_folder_is_complete(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "The following methods can be defined: naïve, 漢字."
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert GenerationConfig.from_pretrained(tiny_model).eos_token_id == tokenizer.eos_token_id
    with safe_open(tiny_model / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert "lm_head.weight" not in names  # tied: stored once
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16
        for name in names:
            shape = weights.get_slice(name).get_shape()
            assert all(size % 32 == 0 for size in shape), name


def test_chat_template_marks_turns(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": "A sequence."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == ("<|begin|><|user|>What is a list?<|end|><|assistant|>A sequence.<|end|>")
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)
    assert prompt.endswith("<|assistant|>")


def test_generates_within_its_context(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    prompt = tokenizer("The following", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert tokens.shape[1] == prompt["input_ids"].shape[1] + 12
    assert model.config.max_position_embeddings == CONTEXT


@pytest.mark.usefixtures("little_text")
def test_same_seed_same_bytes(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        losses = make_tiny(tmp_path / name, steps=STEPS, seed=seed)
        assert math.isfinite(losses.heldout)
    assert torch.equal(torch.random.get_rng_state(), before)
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert files == {p.name for p in (tmp_path / "b").iterdir()}
    contents = {
        name: {f: (tmp_path / name / f).read_bytes() for f in files} for name in ("a", "b", "c")
    }
    assert contents["a"] == contents["b"]
    assert contents["a"]["model.safetensors"] != contents["c"]["model.safetensors"]
    assert contents["a"]["tokenizer.json"] == contents["c"]["tokenizer.json"]


@pytest.mark.usefixtures("little_text")
def test_interrupted_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def interrupted(steps: range, *_: object, **__: object) -> Iterator[int]:
        begun.append(steps.start)
        yield from (step for step in steps if step < 3)
        if len(begun) == 1:
            raise KeyboardInterrupt
        yield from (step for step in steps if step >= 3)

    make_tiny(tmp_path / "a", steps=5)
    monkeypatch.setattr(tiny, "progress", interrupted)
    monkeypatch.setattr(tiny, "KEEP_EVERY", 2)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path / "b", steps=5, state=tmp_path / "state")
    make_tiny(tmp_path / "b", steps=5, state=tmp_path / "state")
    assert begun == [0, 2]
    one, other = (tmp_path / name / "model.safetensors" for name in "ab")
    assert one.read_bytes() == other.read_bytes()


@pytest.fixture
def bars() -> Iterator[list[str]]:
    """What the bars of transformers' that are drawn, or would be on a console, are called."""
    drawn: list[str] = []

    def note(bar: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        drawn.append(given.get("desc", ""))
        return bar(*args, **given)

    before = transformers.utils.logging.set_tqdm_hook(note)
    yield drawn
    transformers.utils.logging.set_tqdm_hook(before)


@pytest.mark.usefixtures("little_text")
def test_command_prints_the_loss(
    tmp_path: Path, bars: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"out={tmp_path / 'model'}", f"steps={STEPS}"])
    shown = capsys.readouterr()
    assert f"nats a token after {STEPS} steps" in shown.out
    assert shown.err == ""
    assert bars == []  # no "Writing model shards"
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert bars == ["Loading weights"]  # it draws again
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_command_takes_a_folder_of_nobody_s_home_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[Path, int, int]] = []

    def make(folder: Path, *, steps: int, seed: int) -> tiny.TinyLosses:
        asked.append((folder, steps, seed))
        return tiny.TinyLosses(6.0, 4.0, steps)

    monkeypatch.setattr(tiny, "make_tiny", make)
    main(["out=~no-user/x", "steps=2"])
    assert asked == [(Path("~no-user/x"), 2, 0)]
    assert capsys.readouterr().out.startswith("~no-user/x: held-out loss 4.00 nats a token after 2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps=many"], "^steps=many: wanted a whole number$"),
        (["steps=-1", "seed=-2"], "^steps is -1; wanted 0 or more\nseed is -2; wanted 0 or more$"),
        (["seed=1", "seed=2"], "^seed is given twice, as 1 and 2; wanted one$"),
        (["size=7"], "size: no such option; there are out, steps, seed"),
        (["out=."], "is there already; remove it, or name another folder"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(arguments)
