"""The comparison of the server with offline answers, in its parts."""

import sys
from importlib import import_module
from pathlib import Path

from tests.serving.conftest import NAME, Running

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, no package
serving = import_module("serving")


def test_questions_are_of_mixed_lengths_and_the_same_by_seed() -> None:
    asked = serving.questions(100, 0)
    assert asked == serving.questions(100, 0) != serving.questions(100, 1)
    assert {len(text.split()) - 4 for text, _ in asked} == set(serving.WORDS)
    assert {most for _, most in asked} == set(serving.NEW_TOKENS)


def test_an_answer_is_the_same_streamed_and_a_lost_one_says_why(server: Running) -> None:
    whole = serving.ask(server.client, NAME, "Once upon a time", 12, False)
    streamed = serving.ask(server.client, NAME, "Once upon a time", 12, True)
    assert whole["text"] == streamed["text"] != ""
    assert 0 < streamed["ttft_s"] < streamed["whole_s"]
    lost = serving.ask(server.client, NAME, "word " * 600, 12, True)
    assert lost["lost"].startswith("BadRequestError: ")
