"""What is wrong with a checkpoint's own files is told at the start, in one line."""

import json
import shutil
from pathlib import Path

import pytest

from compress import serve
from compress.errors import UserError
from compress.runtime.loader import load
from compress.runtime.server import lifetime


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def refusal(folder: Path) -> str:
    """What is said about the folder at the start, without its path."""
    with pytest.raises(UserError) as told:
        lifetime.served(serve.Options(checkpoint=str(folder), device="cpu"))
    assert "\n" not in str(told.value)
    return str(told.value).removeprefix(str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "Unrecognized model in "),
        ("{", "It looks like the config file at "),
        ('{"model_type": "llama", "hidden_size": "a"}', "Validation error for field 'hidden_size'"),
    ],
)
def test_a_broken_config_is_blamed_itself(copied: Path, text: str, message: str) -> None:
    (copied / "config.json").write_text(text)
    said = refusal(copied)
    assert said.startswith(f": config.json: not a causal language model that loads: {message}")


def test_a_file_is_no_folder(copied: Path) -> None:
    said = refusal(copied / "config.json")
    assert said == ": is a file; wanted a checkpoint's folder"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot", "do_sample": True}, "temperature is 'hot'; wanted 0 or more"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature is nan; wanted 0 or more"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; wanted true or false"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1; wanted a whole number, 0 or more"),
        ({"do_sample": True, "top_p": 2}, "top_p is 2; wanted 0 to 1"),
        ({"eos_token_id": [1, "a"]}, "eos_token_id is [1, 'a']; wanted a token id, or a list of"),
        ([], "'list' object is not a mapping; mend it, or take it away"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused(
    copied: Path, fields: object, message: str
) -> None:
    (copied / "generation_config.json").write_text(json.dumps(fields))
    assert refusal(copied).startswith(f"/generation_config.json: {message}")


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1, "eos_token_id": 2},
        {"do_sample": False, "top_k": -1},  # of which nothing is read
    ],
)
def test_a_generation_config_that_can_be_is_kept(copied: Path, fields: dict[str, object]) -> None:
    (copied / "generation_config.json").write_text(json.dumps(fields))
    found = load(copied).generation_config.to_dict()
    assert {name: found[name] for name in fields} == fields


def test_a_chat_template_that_does_not_parse_is_refused(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("\n{% for message in %}")
    said = refusal(copied)
    assert said.startswith(": the chat template does not parse: line 2: Expected an expression")
    assert said.endswith("; mend it, or take it away")
