"""The recipes of docs/scenarios.md fit the cards that they are for, and the page names them."""

import re
from pathlib import Path
from typing import Any

import pytest
from small import composed
from transformers import AutoConfig

from compress.given import parse_size
from compress.planning.memory import OVERHEAD, needed, weights_of
from compress.planning.requests import read_requests
from compress.planning.shape import shape_of
from tests.unit.test_planning import LLAMA_2_7B, QWEN25_7B

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/scenarios.md").read_text(encoding="utf-8")
SCENARIOS: dict[str, tuple[dict[str, Any], str]] = {
    "one_card": (LLAMA_2_7B, "chat"),
    "questions": (QWEN25_7B, "questions"),
    "long_documents": (QWEN25_7B, "documents"),
}
"""The 7B that the page plans for, and its requests."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_7b_fits_as_the_recipe_says_and_in_16_bit_it_would_not(name: str) -> None:
    config = composed(f"recipe={name}")
    shape = shape_of(AutoConfig.for_model(**SCENARIOS[name][0]), name)
    plan, memory = config.plan, parse_size(config.plan.memory or "")

    def taken(quantized: bool) -> float:
        weights = weights_of(shape, config.quantize.spec if quantized else None, config.engine)
        return sum(needed(shape, weights, "16", plan.batch, plan.tokens).values())

    assert taken(True) <= (1 - OVERHEAD) * memory < taken(False)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_longest_request_of_the_page_fits_the_recipe(name: str) -> None:
    requests = read_requests(str(ROOT / f"docs/lengths/{SCENARIOS[name][1]}.jsonl"))
    assert max(r.total for r in requests) <= composed(f"recipe={name}").plan.tokens


@pytest.mark.parametrize("name", [*SCENARIOS, "edge_student"])
def test_the_page_names_the_recipe(name: str) -> None:
    assert f"recipe={name}" in PAGE


def test_a_small_device_has_the_time_of_a_token_that_the_page_names() -> None:
    assert composed("recipe=edge_student").score.gate.token_ms == 200
    assert "200 ms a token" in PAGE


def test_the_files_of_the_page_are_there() -> None:
    named = set(re.findall(r"lengths/\w+\.jsonl", PAGE))
    assert named == {f"lengths/{lengths}.jsonl" for _, lengths in SCENARIOS.values()}
    assert all((ROOT / "docs" / file).is_file() for file in named)
