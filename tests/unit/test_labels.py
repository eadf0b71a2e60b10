"""Soft labels on disk: what the teacher says, made once, and only by one that can be a teacher."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.artifact import Artifact
from compress.errors import UserError
from compress.runtime.loader import load
from compress.text.windows import Windows
from compress.training import labels
from compress.training.labels import CHUNK, make
from compress.training.teacher import Teacher, shared_vocabulary

COUNT, LENGTH, K = CHUNK + 3, 12, 5


@pytest.fixture
def windows() -> Windows:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200, (COUNT, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, 7:] = 0
    return Windows(ids, mask, 0, "made up")


@pytest.fixture
def place(tmp_path: Path) -> Artifact:
    return Artifact("labels", tmp_path / "labels", tmp_path)


def teacher(folder: Path, k: int = K, vocabulary: int = 256) -> Teacher:
    return Teacher(folder, vocabulary, k, torch.float32, "cpu")


def test_labels_are_what_the_teacher_says(
    place: Artifact, windows: Windows, tiny_model: Path
) -> None:
    made = make(place, teacher(tiny_model), windows)
    assert len(made) == COUNT
    assert made.figures["tokens"] == windows.tokens == COUNT * LENGTH - 5
    rows = torch.tensor([COUNT - 1, 2])
    batch = made.batch(rows)
    assert torch.equal(batch.ids, windows.ids[rows])
    assert torch.equal(batch.mask, windows.mask[rows])
    said = load(tiny_model, dtype=torch.float32)(batch.ids).logits[..., :256].softmax(-1)
    real = batch.mask.bool()
    exact = said[real].topk(K)
    assert torch.equal(batch.kept[real], exact.indices)
    found = batch.teacher[real].exp()
    assert torch.allclose(found[:, :K], exact.values, atol=1e-3)
    assert torch.allclose(found[:, K], 1 - exact.values.sum(-1), atol=1e-3)
    every = made.batch(torch.arange(COUNT))
    mass = every.teacher[every.mask.bool()].exp()[:, :K].sum(-1).mean()
    assert made.figures["mass"] == pytest.approx(float(mass), abs=1e-3)


def files(place: Artifact) -> dict[str, tuple[int, bytes]]:
    return {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in place.folder.glob("*.arrow")}


def test_labels_are_made_once_for_a_teacher_and_a_text(
    place: Artifact, windows: Windows, tiny_model: Path
) -> None:
    first = make(place, teacher(tiny_model), windows)
    made = files(place)
    assert sorted(made) == ["000000.arrow", f"{CHUNK:06d}.arrow"]
    assert make(place, teacher(tiny_model), windows).figures == first.figures
    assert files(place) == made
    other = Windows(windows.ids.flip(0), windows.mask.flip(0), 0, "made up")
    for changed in ((teacher(tiny_model), other), (teacher(tiny_model, k=4), windows)):
        make(place, *changed)
        assert files(place) != made


def test_a_killed_pass_goes_on_after_its_last_part(
    place: Artifact, windows: Windows, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(place, teacher(tiny_model), windows)
    wanted = {name: data for name, (_, data) in files(place).items()}
    shutil.rmtree(place.folder)
    place.manifest_file.unlink()
    write, calls = labels._write_part, []

    def dying(file: Path, *others: object) -> float:
        calls.append(file.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(file, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(labels, "_write_part", dying)
    with pytest.raises(KeyboardInterrupt):
        make(place, teacher(tiny_model), windows)
    assert not place.folder.exists()
    make(place, teacher(tiny_model), windows)
    assert calls == ["000000.arrow", *[f"{CHUNK:06d}.arrow"] * 2]
    assert {name: data for name, (_, data) in files(place).items()} == wanted


@pytest.fixture
def renamed(tiny_model: Path, tmp_path: Path) -> Callable[[Callable[[str], str]], Path]:
    """The tiny model with its tokenizer.json changed."""

    def make(change: Callable[[str], str]) -> Path:
        folder = tmp_path / "other"
        shutil.copytree(tiny_model, folder)
        file = folder / "tokenizer.json"
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
        return folder

    return make


def test_a_teacher_with_another_vocabulary_is_refused(
    tiny_model: Path, renamed: Callable[[Callable[[str], str]], Path]
) -> None:
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))
    words = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    one, other = (word for word, _ in words[-2:])

    def swapped(text: str) -> str:
        changed = json.loads(text)
        vocabulary = changed["model"]["vocab"]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        return json.dumps(changed)

    with pytest.raises(UserError, match=r"another vocabulary, of .* tokens where the model has"):
        shared_vocabulary(renamed(swapped), tiny_model, False)


def test_a_teacher_without_a_tokenizer_is_refused(
    tiny_model: Path, renamed: Callable[[Callable[[str], str]], Path]
) -> None:
    folder = renamed(lambda text: text)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"distill\.teacher=.*: no tokenizer that loads"):
        shared_vocabulary(folder, tiny_model, False)


def test_a_teacher_whose_output_is_padded_shares_what_the_tokenizer_knows(
    tiny_model: Path, renamed: Callable[[Callable[[str], str]], Path]
) -> None:
    padded = renamed(lambda text: text)
    config = json.loads((padded / "config.json").read_text())
    config["vocab_size"] += 64
    (padded / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    assert shared_vocabulary(padded, tiny_model, False) == max(ids) + 1
