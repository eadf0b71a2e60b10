"""Text and chats become windows, and what is held out stays out."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress import data
from compress.data import Data
from compress.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def cut(docs: list[data.Document], tokenizer: PreTrainedTokenizerBase, **more: int) -> data.Windows:
    options = {"count": 4, "length": 32, "seed": 0, **more}
    return data.windows(docs, tokenizer, description="a text", **options)


def test_python_docs_are_many_and_the_same_each_time() -> None:
    documents = data.python_docs()
    assert len(documents) > 100
    assert sum(map(len, documents)) > 10**6
    assert documents == data.python_docs()


def test_held_out_documents_are_not_learned_from() -> None:
    rest, held, description = data.split(Data())
    assert not {str(d) for d in rest} & {str(d) for d in held}
    assert len(rest) + len(held) == len(data.python_docs())
    assert description.startswith("every tenth document of")


def test_of_one_long_text_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {n}\n" for n in range(1000)))
    rest, held, description = data.split(Data(path=str(file)))
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
    chats: list[data.Document] = [
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


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tables_are_read_by_column(suffix: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"body": f"document {n}"} for n in range(40)]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    rest, held, _ = data.split(Data(path=str(file), field="body"))
    assert held == ["document 9", "document 19", "document 29", "document 39"]
    assert len(rest) == 36


def test_changed_content_changes_the_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one text " * 50)
    before = data.fingerprint(Data(path=str(file)))
    copy = tmp_path / "b.txt"
    copy.write_text("one text " * 50)
    assert data.fingerprint(Data(path=str(copy))) == before
    file.write_text("one text more " * 50)
    assert data.fingerprint(Data(path=str(file))) != before
