"""Text and chats become windows, and what is held out stays out."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compress.errors import UserError
from compress.text import documents, pieces
from compress.text.documents import Data
from compress.text.windows import Windows, draw


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def cut(docs: list[documents.Document], tokenizer: PreTrainedTokenizerBase, **more: int) -> Windows:
    options = {"count": 4, "length": 32, "seed": 0, **more}
    return draw(docs, tokenizer, description="a text", **options)


def test_python_docs_are_many_and_the_same_each_time() -> None:
    found = documents.python_docs()
    assert len(found) > 100
    assert sum(map(len, found)) > 10**6
    assert found == documents.python_docs()


def test_held_out_documents_are_not_learned_from() -> None:
    rest, held, description = documents.split(Data())
    assert not {str(d) for d in rest} & {str(d) for d in held}
    assert len(rest) + len(held) == len(documents.python_docs())
    assert description.startswith("every tenth document of")


def test_of_one_long_text_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {n}\n" for n in range(1000)))
    rest, held, description = documents.split(Data(path=str(file)))
    assert str(rest[0]) + str(held[0]) == file.read_text()
    assert len(str(held[0])) == len(file.read_text()) // 10
    assert description == "the last tenth of book.txt"


def test_windows_are_slices_of_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    text = " ".join(f"Line {n} of the text." for n in range(200))
    found = cut([text], tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id  # which this tokenizer puts before every text
    slices = [[start, *ids[i : i + 31]] for i in range(0, len(ids) - 30, 31)]
    assert found.ids.shape == (4, 32)
    assert all(row in slices for row in found.ids.tolist())
    assert found.tokens == 4 * 32
    assert torch.equal(found.ids, cut([text], tokenizer).ids)
    assert len(slices) > 20
    assert not torch.equal(found.ids, cut([text], tokenizer, seed=1).ids)


def test_fewer_windows_than_asked_for_are_taken(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(cut(["word " * 40], tokenizer, count=1000).ids) >= 1
    with pytest.raises(UserError, match="wanted at least one window of 32"):
        cut(["word"], tokenizer)


def test_chats_are_padded_masked_and_their_template_counted(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chats: list[documents.Document] = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}],
        [{"role": "user", "content": "What is a list? " * 20}],
    ]
    found = cut(chats, tokenizer, count=2, length=48)
    rendered = str(tokenizer.apply_chat_template(chats[0], tokenize=False))
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert len(ids) < 48
    assert found.ids[0, : len(ids)].tolist() == ids
    assert found.mask[0].tolist() == [1] * len(ids) + [0] * (48 - len(ids))
    assert found.mask[1].tolist() == [1] * 48
    assert 0 < found.template_tokens < found.ids.numel()


def test_chats_that_are_short_cut_or_empty_are_counted(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "What is a list? " * 20
    chats: list[documents.Document] = [
        [{"role": "user", "content": text}] for text in ("Hi", "", words, "Yes")
    ]
    template = "{% for m in messages if m.content %}<|user|>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    found = cut(chats, tokenizer, count=3, length=32)
    assert (found.available, len(found.ids) + found.dropped) == (4, 3)
    whole = cut(chats, tokenizer, count=4, length=32)
    assert (whole.available, whole.short, whole.cut, whole.dropped) == (4, 2, 1, 1)
    assert len(whole.ids) == 3
    assert bool(whole.mask.any(1).all())
    # One token of template each; of the conversation that is cut, the part that is left.
    total = len(tokenizer(f"<|user|>{words}", add_special_tokens=False)["input_ids"])
    assert whole.template_tokens == 2 + round(32 / total)
    with pytest.raises(UserError, match="no token in its conversations"):
        cut([[{"role": "user", "content": ""}]], tokenizer, count=1)


def test_short_texts_are_joined_and_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    docs: list[documents.Document] = ["A short line. " * 2, "A short line. " * 60, " \n"]
    found = cut(docs, tokenizer, count=1)
    body = len(tokenizer("\n\n".join(map(str, docs)), add_special_tokens=False)["input_ids"])
    assert (found.available, found.short, found.dropped) == (body // 31, 1, 1)
    assert int(found.mask.min()) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tables_are_read_by_column(suffix: str, tmp_path: Path) -> None:
    rows = [{"body": f"document {n}"} for n in range(40)]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    rest, held, _ = documents.split(Data(path=str(file), field="body"))
    assert held == ["document 9", "document 19", "document 29", "document 39"]
    assert len(rest) == 36


def test_changed_content_changes_the_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one text " * 50)
    before = documents.fingerprint(Data(path=str(file)))
    copy = tmp_path / "b.txt"
    copy.write_text("one text " * 50)
    assert documents.fingerprint(Data(path=str(copy))) == before
    file.write_text("one text more " * 50)
    assert documents.fingerprint(Data(path=str(file))) != before


def of_bytes() -> PreTrainedTokenizerFast:
    """A token a byte, the same ones whatever the versions of Python and its documentation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    chat = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=chat)


def write(file: Path, lines: list[str]) -> None:
    if file.suffix == ".parquet":
        table = pyarrow.Table.from_pylist([{"text": line} for line in lines])
        pyarrow.parquet.write_table(table, file, row_group_size=max(1, len(lines) // 100))
    elif file.name == "chat.jsonl":
        chats = [
            [{"role": "user", "content": line}, {"role": "assistant", "content": "Yes. " * (n % 7)}]
            for n, line in enumerate(lines)
        ]
        file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    else:
        file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "content", "windows"),
    [
        ("book.txt", "7fba369eba085848", "17e08d120e0106f3"),
        ("rows.jsonl", "269001a2c47197e1", "6c2e066ab71c9239"),
        ("rows.parquet", "269001a2c47197e1", "6c2e066ab71c9239"),
        ("chat.jsonl", "7d0a5be15b07fa93", "8d4e61c83ae65852"),
    ],
)
def test_files_give_the_windows_they_always_gave(
    name: str, content: str, windows: str, tmp_path: Path
) -> None:
    write(tmp_path / name, [f"Line {n} of the text, naïve. " * 3 for n in range(200)])
    messages = "messages" if name == "chat.jsonl" else None
    settings = Data(path=str(tmp_path / name), messages=messages)
    parts = documents.split(settings)[:2]
    cuts = [draw(part, of_bytes(), count=4, length=64, seed=3, description="x") for part in parts]
    found = json.dumps([(c.ids.tolist(), c.mask.tolist(), c.template_tokens) for c in cuts])
    assert documents.fingerprint(settings)[:16] == content
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == windows


@pytest.mark.parametrize("name", ["book.txt", "rows.jsonl", "rows.parquet"])
def test_of_a_large_file_pieces_are_read_from_end_to_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LARGEST", 64 << 10)
    lines = [f"Line {n:06d} of the text, naïve and 漢字. " for n in range(40_000)]
    file = tmp_path / name
    write(file, lines)
    settings = Data(path=str(file))
    rest, held, description = documents.split(settings)
    found = [line for d in [*rest, *held] for line in str(d).splitlines()]
    assert set(found) <= set(lines)
    assert len(found) == len(set(found))  # no piece is read twice
    size = sum(len(line.encode()) for line in found)
    assert 0.5 < size / pieces.LARGEST < 1.5 if name != "rows.parquet" else size < 0.5 * 1_800_000
    numbers = sorted(int(line.split()[1]) for line in found)
    assert numbers[0] < 100
    assert numbers[-1] >= 39_000
    gaps = [b - a for a, b in pairwise(numbers)]
    assert max(gaps) < 40_000 / 32
    assert description == f"every tenth document of {name} (in 64 places)"
    fingerprint = documents.fingerprint(settings)
    assert documents.fingerprint(settings) == fingerprint
    write(file, [line.replace("text", "word") for line in lines])
    assert documents.fingerprint(settings) != fingerprint


def test_a_large_text_of_one_line_is_cut_at_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LARGEST", 64 << 10)
    file = tmp_path / "line.txt"
    file.write_text("漢" * 40_000)
    rest, _, _ = documents.split(Data(path=str(file)))
    assert set("".join(map(str, rest))) == {"漢"}


def test_a_broken_record_of_a_large_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LARGEST", 6400)
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "a"}\n' * 400 + '{"text": \n' * 400)
    with pytest.raises(UserError, match=r"broken.jsonl: cannot be read: Expecting value"):
        documents.split(Data(path=str(file)))


def test_a_long_text_is_tokenized_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"Line {n}.\n" for n in range(3000))
    whole = cut([text], of_bytes(), count=100)
    monkeypatch.setattr("compress.text.windows.BLOCK", 1000)
    assert torch.equal(cut([text], of_bytes(), count=100).ids, whole.ids)
