"""The two configurations of a checkpoint, read and checked before anything is built from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from compress.errors import UserError


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value)


def _tokens(value: Any) -> bool:
    return all(_whole(token) for token in (value if isinstance(value, list) else [value]))


Check = tuple[str, Callable[[Any], bool], str]
"""A field of a generation config, whether a value of it can be, and what can."""
ALWAYS: tuple[Check, ...] = (
    ("do_sample", lambda value: isinstance(value, bool), "true or false"),
    ("bos_token_id", _tokens, "a token id"),
    ("eos_token_id", _tokens, "a token id, or a list of them"),
    ("pad_token_id", _tokens, "a token id"),
)
SAMPLED: tuple[Check, ...] = (
    ("temperature", lambda value: _number(value) and 0 <= value < float("inf"), "0 or more"),
    ("top_k", lambda value: _whole(value) and value >= 0, "a whole number, 0 or more"),
    ("top_p", lambda value: _number(value) and 0 <= value <= 1, "0 to 1"),
)
"""Read where `do_sample` is true alone."""


def model_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """config.json. Raises UserError where it is of no model that transformers knows."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        reason = first_line(error)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())  # of two lines: the field, and what is wrong with it
    raise UserError(f"{folder}: config.json: not a causal language model that loads: {reason}")


def generation_config(folder: Path) -> GenerationConfig | None:
    """generation_config.json, None where there is none. Raises UserError for one that cannot be."""
    file = folder / "generation_config.json"
    if not file.exists():
        return None
    try:
        found = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: {first_line(error)}; mend it, or take it away") from error
    for name, can_be, wanted in (*ALWAYS, *(SAMPLED if found.do_sample else ())):
        value = getattr(found, name, None)
        if value is not None and not can_be(value):
            raise UserError(f"{file}: {name} is {value!r}; wanted {wanted}")
    return found


def first_line(error: Exception) -> str:
    """Of what `error` says; libraries go on over pages."""
    return next(iter(str(error).strip().splitlines()), repr(error))
