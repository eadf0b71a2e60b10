"""Text as it comes from tokens: whole characters, nothing past a stop string, in linear time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from compress.runtime.server.text import OPEN_TOKENS, UNFINISHED, Decoder, Stop


@given(text=st.text(alphabet="aé漢🙂 \n", max_size=30))
def test_text_comes_whole_whatever_its_characters(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER[0])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    decoder = Decoder(tokenizer)
    pieces = [decoder.feed([token]) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + decoder.rest() == tokenizer.decode(ids, skip_special_tokens=True)


FOLDER: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _folder(folder: Path) -> None:
    FOLDER.append(folder)


def test_a_character_that_stays_unfinished_is_shown_at_the_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a🙂", add_special_tokens=False).input_ids[:-1]
    decoder = Decoder(tokenizer)
    before = "".join(decoder.feed([token]) for token in ids)
    assert before + decoder.rest() == tokenizer.decode(ids)
    assert decoder.rest() == ""


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4)),
    strings=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2),
)
def test_nothing_past_a_stop_string_is_shown(pieces: list[str], strings: list[str]) -> None:
    stop = Stop(strings)
    read, shown, wanted = "", "", None
    for piece in pieces:
        read += piece
        shown += stop.feed(piece)
        starts = [at for s in strings if (at := read.find(s)) >= 0]
        if starts:
            wanted = read[: min(starts)]
            break
    assert stop.hit == (wanted is not None)
    shown += stop.feed("a" if stop.hit else "") + stop.rest()
    assert shown == (read if wanted is None else wanted)


class Broken:
    """A tokenizer whose tokens are bytes that no character has; it counts what it decodes."""

    decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return UNFINISHED * len(tokens)


def test_a_text_of_broken_characters_is_not_decoded_over_and_over() -> None:
    tokenizer = Broken()
    decoder = Decoder(tokenizer)  # type: ignore[arg-type]
    text = "".join(decoder.feed([7]) for _ in range(1000)) + decoder.rest()
    assert text == UNFINISHED * 1000
    assert tokenizer.decoded <= 1000 * 3 * OPEN_TOKENS


def test_a_long_stop_string_costs_no_more_than_what_is_written() -> None:
    class Counted(str):
        compared = 0

        def startswith(self, text: str) -> bool:  # type: ignore[override]
            Counted.compared += 1
            return super().startswith(text)

        def __getitem__(self, where: object) -> str:
            raise AssertionError("a stop string is not to be cut up")

    stop = Stop([Counted("x" * 1_000_000)] * 4)
    assert "".join(stop.feed("ab ") for _ in range(100)) == "ab " * 100
    assert Counted.compared <= 4 * 300
    assert stop.feed("xxx") == ""
    assert stop.rest() == "xxx"
