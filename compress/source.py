"""The model in the Hugging Face layout: made where it is not, described, told from others."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from compress.errors import UserError
from compress.log import logger, quiet_bars
from compress.model_path import TINY, Model, locate
from compress.stage import Run
from compress.support import refuse_unsupported
from compress.tensors import TensorFiles

UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    AssertionError,
    ImportError,
    ZeroDivisionError,
    StrictDataclassError,
)
"""What transformers raises for a configuration, or a model of it, that it cannot make."""
SIZES = {
    "hidden_size": 100_000,
    "intermediate_size": 1_000_000,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 10_000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
    "sliding_window": 1_000_000_000,
}
"""What a configuration has at most, by its own names: beyond what any model has."""
SAMPLE = 1 << 20  # bytes of each end and of each 64th part that a large file's fingerprint reads


def read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The model's configuration; raises UserError for what is no model that can be compressed."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder}: no config.json; wanted a model in the Hugging Face layout")
    needs_code = (
        f"{file}: the model is Python code in its folder, which is not run unasked; "
        "read it, and add model.trust_remote_code=true"
    )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        if not trust_remote_code and "AutoConfig" in _auto_map(folder):
            raise UserError(needs_code) from error
        raise UserError(
            f"{file}: not a model that transformers knows ({reason_of(error)})"
        ) from error
    if (
        not trust_remote_code
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and "AutoModelForCausalLM" in _auto_map(folder)
    ):
        raise UserError(needs_code)
    refuse_unsupported(config, str(folder))
    if getattr(config.get_text_config(), "max_position_embeddings", None) is None:
        raise UserError(
            f"{file}: {config.model_type} has no max_position_embeddings; wanted a model with "
            "rotary positions such as Llama, Mistral or Qwen"
        )
    refuse_sizes(config, describe(folder), str(file))
    return config


def refuse_sizes(config: PretrainedConfig, fields: Mapping[str, Any], where: str) -> None:
    """Raise UserError for sizes that no model has, and where the `fields` of config.json give none:
    transformers would take those of a model of its own.
    """
    text = config.get_text_config()
    names = {name: text.attribute_map.get(name, name) for name in SIZES}
    inner = [value for value in fields.values() if isinstance(value, Mapping)]
    given = {name for part in (fields, *inner) for name in part}
    wanted = {name for size in ("hidden_size", "num_hidden_layers") for name in (size, names[size])}
    if not wanted & given:
        raise UserError(
            f"{where}: model_type is {config.model_type}, no sizes are given; wanted the "
            f"config.json of a model, with {names['num_hidden_layers']}, {names['hidden_size']} "
            "and the like"
        )
    problems = [
        f"{names[name]} is {value}; wanted 1 to {most:,}"
        for name, most in SIZES.items()
        if {name, names[name]} & given  # not what follows from another, as head_dim may
        and isinstance(value := getattr(text, name, None), int)
        and not 1 <= value <= most
    ]
    heads, kv_heads = (
        getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if not problems and isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        problems = [
            f"{names['num_key_value_heads']} is {kv_heads}; wanted one that divides the "
            f"{heads} of {names['num_attention_heads']}"
        ]
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}")


def configuration(model: Model, folder: Path | None) -> PretrainedConfig:
    """The configuration of a model that is in `folder`, or still to be made; see `Source`.

    Raises UserError for what is no model that can be compressed.
    """
    if folder is not None:
        return read_config(folder, model.trust_remote_code)
    if model.path == TINY:
        from compress.tiny import architecture

        return architecture()
    file = locate(model)
    with _reading_gguf(file):
        return deepcopy(_gguf_configuration(file, file.stat().st_mtime_ns))


@cache
def _gguf_configuration(file: Path, changed: int) -> PretrainedConfig:
    """Kept, since the file is read for seconds and every job of a sweep asks; `changed`: when."""
    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


def shortest_window(folders: Iterable[Path], trust_remote_code: bool) -> int:
    """The tokens that all of the models in these folders hold."""
    configs = (AutoConfig.from_pretrained(f, trust_remote_code=trust_remote_code) for f in folders)
    return min(config.get_text_config().max_position_embeddings for config in configs)


def head_dim(config: PretrainedConfig) -> int:
    """Channels of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def reason_of(error: Exception) -> str:
    """The two lines of an error that name the field and what is wrong with it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    bare = isinstance(error, KeyError) and " " not in str(error)  # the name alone
    return " ".join(lines[:2]) + ": no such name" * bare or type(error).__name__


def _auto_map(folder: Path) -> dict[str, Any]:
    """What config.json has the folder's own Python for; nothing where it cannot be read."""
    try:
        return describe(folder).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):
        return {}


def fingerprint(path: Path) -> str:
    """A hash of the model's configuration and weights by content: a copy has the same.

    Small files count whole; large ones by their size, header and a sample, so that 14 GB take
    well under a second.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    for file in files:
        if file.suffix in (".json", ".safetensors", ".jinja", ".model", ".gguf", ".txt", ".py"):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            _update(digest, file)
    return digest.hexdigest()


def _update(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= 64 * SAMPLE:
            digest.update(opened.read())
            return
        for part in range(64):
            opened.seek(part * (size - SAMPLE) // 63)
            digest.update(opened.read(SAMPLE))


@dataclass(kw_only=True)
class Source:
    """Turn a GGUF file into a Hugging Face folder, or train the tiny model, once.

    Runs by itself before the first stage where `model.path` is not a folder already.
    """

    name: ClassVar[str] = "source"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[str | None] = "dense"
    shares: ClassVar[tuple[str, ...]] = ("model",)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        if run.config.model.path == TINY:
            from compress.tiny import make_tiny

            folder = out / "tiny"
            make_tiny(folder, state=run.work / "training.state")
            for file in folder.iterdir():
                file.rename(out / file.name)
            folder.rmdir()
        else:
            convert_gguf(locate(run.config.model), out, run.config.model.dtype)
        return {"bytes": sum(f.stat().st_size for f in TensorFiles.files(out))}


@quiet_bars()
def convert_gguf(file: Path, out: Path, dtype: str) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder, weights in `dtype`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info(f"  {file.name}: from GGUF to safetensors")
    kept = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    with _reading_gguf(file):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=kept,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # What GGUF carries as a name is no path to load from.
    model.config._name_or_path = ""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@contextmanager
def _reading_gguf(file: Path) -> Iterator[None]:
    """Raise UserError for what transformers raises where it cannot read `file`."""
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file}: cannot be read as GGUF ({reason})") from error


def describe(path: Path) -> dict[str, Any]:
    """config.json as it stands on disk."""
    return json.loads((path / "config.json").read_text())
