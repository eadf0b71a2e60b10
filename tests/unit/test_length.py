"""Numbers hidden in long texts, and what a fine-tune for them is made of."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress.algorithms import rope
from compress.artifact import Artifact
from compress.errors import UserError
from compress.eval import length, length_needles
from compress.eval.length_judge import length_judge
from compress.eval.length_needles import ASKED, TAUGHT, find, hide, retrieve
from compress.runtime.loader import load
from compress.text.windows import leading_ids
from compress.training import labels, long_training, long_window
from compress.training.teacher import Teacher

FILLER = list(range(60, 90))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


class Oracle(nn.Module):
    """Knows each next token of one text but those in `wrong`; enough of a model to be judged."""

    device = torch.device("cpu")

    def __init__(self, ids: Tensor, wrong: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.next = ids.roll(-1)
        self.next[[i - 1 for i in wrong]] = 0


@pytest.fixture
def oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(model: Oracle, _: Any, part: slice) -> Tensor:
        return 20.0 * nn.functional.one_hot(model.next[part], 4096).unsqueeze(0).float()

    monkeypatch.setattr(length_needles, "before_head", lambda *_: None)
    monkeypatch.setattr(length_needles, "logits", logits)


@pytest.mark.parametrize("depths", [[0.0], [0.5], [1.0], [0.0, 0.5, 1.0]])
def test_needles_lie_at_their_depths_and_are_all_asked_for(
    tokenizer: PreTrainedTokenizerBase, depths: list[float]
) -> None:
    text = hide(tokenizer, FILLER, 600, depths, ASKED, 3)
    assert text is not None
    assert len(text.ids) == 600
    whole = tokenizer.decode(text.ids)
    keys = [tokenizer.decode(text.ids[span]).strip() for span in text.answers]
    assert all(len(key) == 5 and key.isdigit() for key in keys)
    assert len(set(keys)) == len(depths)
    firsts = [whole.index(key) / len(whole) for key in keys]
    assert firsts == sorted(firsts)
    for key, first, depth in zip(keys, firsts, depths, strict=True):
        assert whole.count(key) == 2  # hidden once, and once as the answer
        assert abs(first - depth) < 0.3
        named = whole.split(f" is {key}")[0].rpartition("the ")[2]
        assert whole.count(f"The number of the {named} is {key}") == 2


def test_texts_are_the_same_by_seed_and_none_where_there_is_no_room(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    one, same, other = (hide(tokenizer, FILLER, 300, [0.5], ASKED, seed) for seed in (1, 1, 2))
    assert one is not None
    assert same is not None
    assert other is not None
    assert torch.equal(one.ids, same.ids)
    assert not torch.equal(one.ids, other.ids)
    assert hide(tokenizer, FILLER, 60, [0.0, 0.25, 0.5, 0.75, 1.0], ASKED, 1) is None


@pytest.mark.usefixtures("oracles")
def test_an_answer_counts_where_every_token_is_the_likeliest(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = hide(tokenizer, FILLER, 600, [0.2, 0.8], ASKED, 5)
    assert text is not None
    knows: Any = Oracle(text.ids)
    assert [right for right, _ in find(knows, text)] == [True, True]
    last = text.answers[1].stop - 1
    errs: Any = Oracle(text.ids, wrong=(last,))
    found = find(errs, text)
    assert [right for right, _ in found] == [True, False]
    assert found[0][1] == pytest.approx(0, abs=1e-4)
    tokens = text.answers[1].stop - text.answers[1].start
    assert found[1][1] == pytest.approx(-20 / tokens, abs=1e-4)


def test_retrieval_by_depth_and_length_of_a_real_model(
    tokenizer: PreTrainedTokenizerBase, tiny_model: Path
) -> None:
    model = load(tiny_model, dtype=torch.float32)
    found = retrieve(model, tokenizer, FILLER, [80, 240], [0.0, 1.0], 2, 0)
    assert (found["lengths"], found["depths"], found["keys"]) == ([80, 240], [0.0, 1.0], 2)
    assert found["needles"]["exact"][0][0] is None  # no room in 80 tokens
    for kind in ("passkey", "needles"):
        chances = [row[1] for row in found[kind]["chance"]]
        assert all(0 < chance < 1 for chance in chances)
    text = hide(tokenizer, FILLER, 240, [0.0], ASKED, 0)
    assert text is not None
    (_, chance), span = find(model, text)[0], text.answers[0]
    with torch.no_grad():
        likely = model(text.ids.unsqueeze(0)).logits[0].log_softmax(-1)
    before = likely[span.start - 1 : span.stop - 1]
    wanted = before.gather(1, text.ids[span].unsqueeze(1)).mean()
    assert chance == pytest.approx(float(wanted), rel=1e-4)
    again = retrieve(model, tokenizer, FILLER, [240], [0.0], 1, 0)
    assert again["passkey"]["chance"] == [[pytest.approx(math.exp(chance))]]


def test_windows_lie_all_over_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "\n\n".join(f"paragraph {i} of many" for i in range(60))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    start = leading_ids(tokenizer)
    found = length.sliding_windows(text, tokenizer, 3, 200, "words")
    assert found.shape == (3, 200)
    assert found[0].tolist() == start + ids[: 200 - len(start)]
    assert found[-1].tolist()[len(start) :] == ids[-(200 - len(start)) :]
    with pytest.raises(UserError, match=r"words: \d+ tokens; wanted at least one window of 99999"):
        length.sliding_windows(text, tokenizer, 3, 99999, "words")


def test_a_batch_is_made_of_the_longest_documents_each_for_itself(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    docs = ["short " * 3, "a long document " * 200, "one of middle length " * 15]
    made = long_training.batches(docs, tokenizer, steps=3, batch=2, length=128, passkey=0.0, seed=0)
    assert [sum(len(p.ids) for p in batch) > 2 * 112 for batch in made] == [True] * 3
    assert all(sum(len(p.ids) for p in batch) <= 2 * 128 for batch in made)
    texts = [tokenizer.decode(piece.ids) for batch in made for piece in batch]
    assert not any("long" in text and "middle" in text for text in texts)
    assert not any("short" in text for text in texts)
    with pytest.raises(UserError, match="no document of 16 tokens"):
        long_training.batches(["a"], tokenizer, steps=1, batch=1, length=64, passkey=0, seed=0)


def test_a_stated_share_of_the_windows_hides_a_number(tokenizer: PreTrainedTokenizerBase) -> None:
    made = long_training.batches(
        ["a long document " * 400], tokenizer, steps=10, batch=2, length=256, passkey=0.25, seed=0
    )
    hidden = [piece for batch in made for piece in batch if piece.answer is not None]
    assert len(hidden) == 5
    for piece in hidden:
        assert len(piece.ids) == 256
        assert piece.answer is not None
        key = tokenizer.decode(piece.ids[piece.answer]).strip()
        said = f"you need {key}"
        assert tokenizer.decode(piece.ids).count(said) == 2
    assert not {*TAUGHT.things} & {*ASKED.things}
    with pytest.raises(UserError, match="a training window of 40 tokens has no room"):
        long_training.batches(
            ["a long document " * 40], tokenizer, steps=1, batch=1, length=40, passkey=1, seed=0
        )


def test_what_is_labelled_is_numbered_once_and_a_share_of_it_stays_near(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    docs = [
        "a long document of words " * 90,
        *(f"one of half a window, {i} " * 9 for i in range(9)),
    ]
    made = long_training.batches(
        docs,
        tokenizer,
        steps=10,
        batch=2,
        length=128,
        passkey=0.1,
        seed=0,
        labelled=True,
        near=0.5,
    )
    pieces = [piece for batch in made for piece in batch]
    labelled = [piece for piece in pieces if piece.row is not None]
    rows = [piece.row for piece in labelled if piece.row is not None]
    assert list(dict.fromkeys(rows)) == list(range(max(rows) + 1))
    assert len(rows) > max(rows) + 1  # text that is taken again is not labelled again
    assert all((piece.row is None) == (piece.answer is not None) for piece in pieces)
    windows = long_training.to_label(made)
    assert windows is not None
    assert len(windows.ids) == max(rows) + 1
    for piece, row in zip(labelled, rows, strict=True):
        assert windows.ids[row, : len(piece.ids)].tolist() == piece.ids.tolist()
    longest = [max(len(p.ids) for p in labelled if p.row == row) for row in range(max(rows) + 1)]
    assert windows.mask.sum(1).tolist() == longest
    hidden = [piece for piece in pieces if piece.answer is not None]
    assert len(hidden) == 2
    assert not any(piece.near for piece in hidden)
    near = sum(len(piece.ids) for piece in pieces if piece.near)
    assert near / sum(len(p.ids) for p in pieces if p.answer is None) == pytest.approx(0.5, abs=0.1)
    plain = long_training.batches(docs, tokenizer, steps=2, batch=1, length=128, passkey=0, seed=0)
    assert long_training.to_label(plain) is None


@pytest.mark.parametrize("near", [True, False])
def test_a_labelled_piece_learns_what_the_original_makes_of_its_first_positions(
    tiny_model: Path, tmp_path: Path, near: bool
) -> None:
    original, student = (load(tiny_model, dtype=torch.float32) for _ in range(2))
    vocabulary = original.config.vocab_size
    ids = torch.arange(60, 90)
    pieces = [long_training.Piece(ids, row=0, near=near)]
    windows = long_training.to_label([pieces])
    assert windows is not None
    teacher = Teacher(tiny_model, vocabulary, vocabulary, torch.float32, "cpu")
    made = labels.make(Artifact("labels", tmp_path / "labels", tmp_path), teacher, windows)
    with torch.no_grad():
        student.model.norm.weight.mul_(1.5)
        found = long_training.loss_of(student, pieces, 256, torch.Generator().manual_seed(1), made)
        positions = rope.skipping(30, 256, torch.Generator().manual_seed(1))
        where = torch.arange(30) if near else positions
        q = student(
            ids[None], position_ids=where[None], attention_mask=torch.ones(1, 30)
        ).logits.log_softmax(-1)
        p = original(ids[None]).logits.log_softmax(-1)
    assert not torch.equal(positions, torch.arange(30))
    wanted = (p.exp() * (p - q)).sum(-1).mean()
    assert float(found) == pytest.approx(float(wanted), rel=1e-2)
    assert float(wanted) > 0.01


def test_checkpointing_changes_no_gradient_and_switches_no_dropout_on(tiny_model: Path) -> None:
    model = load(tiny_model, dtype=torch.float32)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    pieces = [long_training.Piece(torch.arange(60, 100)), long_training.Piece(torch.arange(9, 29))]
    found = []
    for kept in (True, False):
        generator = torch.Generator().manual_seed(0)
        if kept:
            with long_window.checkpointing(model):
                loss = long_training.loss_of(model, pieces, 256, generator)
                loss.backward()
        else:
            loss = long_training.loss_of(model, pieces, 256, generator)
            loss.backward()
        assert weight.grad is not None
        found.append((loss.detach(), weight.grad.clone()))
        weight.grad = None
        assert not model.training
    torch.testing.assert_close(found[0], found[1])


def test_in_bfloat16_a_window_reads_nearly_as_in_float32(
    tiny_model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model, found = load(tiny_model, dtype=torch.float32), {}
    for precision in (torch.float32, torch.bfloat16):
        judge = length_judge(
            tokenizer,
            "Once upon a time there was a little girl who had a red ball. " * 60,
            window=128,
            longer=256,
            windows=2,
            lengths=[128],
            keys=0,
            depths=1,
            seed=0,
            description="text",
            precision=precision,
        )
        found[precision] = judge.perplexities(model)
    exact, rounded = found[torch.float32]["long"], found[torch.bfloat16]["long"]
    assert 0 < abs(rounded / exact - 1) < 0.02
