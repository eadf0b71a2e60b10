"""Text to calibrate and distill on, and the part of it that is held out to measure on.

Local `.txt`, `.jsonl`, `.parquet` or a hub data set, all read through `datasets`; plain text or
chat messages. With nothing given: the English that comes with every Python.
"""

import ast
import hashlib
import importlib
import json
import sysconfig
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from compress.errors import ConfigError, UserError
from compress.model_path import home
from compress.text import pieces

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
HELD_OUT = 10  # one part in ten is held out
PYTHON_DOCS = "the documentation in Python's standard library"
PYTHON_DOCS_CHARACTERS = 2_000_000
HUB_DOCUMENTS = 10_000


@dataclass(kw_only=True)
class Data:
    """What to calibrate and distill on.

    path: a local .txt, .jsonl or .parquet file, or the name of a hub data set; null: the
        documentation of Python itself, which every machine has. Real use brings real data. Of a
        file above 16 MiB that much is read, in pieces spread evenly over it.
    field: the column that holds the text. messages: the column that holds chat messages
        ({role, content}), sent through the chat template; wins over `field`.
    split, subset, revision: of a hub data set.
    heldout: another file to measure on; null: one part in ten of the data.
    samples, length: windows to calibrate on, and tokens a window. seed: picks the windows.
    """

    path: str | None = None
    field: str = "text"
    messages: str | None = None
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    heldout: str | None = None
    samples: int = 64
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"data.{name} is {value}; wanted at least {least}"
            for name, value, least in (("samples", self.samples, 1), ("length", self.length, 16))
            if value < least
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def source(self) -> str:
        """Words for where the text comes from."""
        if not self.path:
            return PYTHON_DOCS
        name = Path(self.path).name
        return f"{name} (in {pieces.PIECES} places)" if pieces.is_large(self.path) else name


Document = str | list[dict[str, str]]


@cache
def python_docs() -> tuple[str, ...]:
    """English every machine has: Python's help topics, then the library's longer docstrings."""
    topics = importlib.import_module("pydoc_data.topics").topics
    documents = [topics[name].strip() for name in sorted(topics)]
    size = sum(map(len, documents))
    # Read, not imported: importing the whole library runs it (antigravity opens a browser).
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(source.read_text(encoding="utf-8", errors="replace"))
        definitions = (ast.Module, ast.ClassDef, ast.FunctionDef)
        strings = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, definitions)]
        text = "\n\n".join(s for s in strings if s and len(s) > 80)
        if text and size < PYTHON_DOCS_CHARACTERS:
            documents.append(text)
            size += len(text)
    return tuple(documents)


def documents(data: Data, path: str | None) -> list[Document]:
    """The documents of a file or a hub data set, in their order: texts, or lists of messages."""
    if path is None:
        return list(python_docs())
    rows = _rows(data, path)
    column = data.messages or data.field
    found: list[Document] = []
    for number, row in enumerate(rows, 1):
        if column not in row:
            way_out = "data.messages" if data.messages else "data.field"
            raise UserError(
                f"{path}: record {number} has no field {column!r}, only "
                f"{', '.join(map(repr, row))}; name the right one with {way_out}=..."
            )
        value = row[column]
        if data.messages and not _is_chat(value):
            raise UserError(
                f"{path}: record {number}: {column!r} holds {type(value).__name__}, "
                "wanted a list of {role, content}, both text; plain text goes by data.field=..."
            )
        if not data.messages and not isinstance(value, str):
            raise UserError(
                f"{path}: record {number}: {column!r} holds {type(value).__name__}, wanted text; "
                "chat messages go by data.messages=..."
            )
        if value:
            found.append(value)
    if not any(isinstance(d, list) or d.strip() for d in found):
        raise UserError(f"{path}: no text in it; wanted documents to calibrate on")
    return found


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )


def _rows(data: Data, path: str) -> list[dict[str, Any]]:
    import datasets

    local = home(path)
    if pieces.is_large(path):
        return _pieces(path, data.messages or data.field)
    if local.is_file():
        loader = LOADERS.get(local.suffix)
        if loader is None:
            raise UserError(f"{path}: ends in {local.suffix!r}; wanted .txt, .jsonl or .parquet")
        name = loader
        arguments: dict[str, str | None] = {"data_files": str(local), "split": "train"}
        if loader == "text":
            arguments["sample_by"] = "document"
    elif local.suffix in LOADERS or local.is_absolute() or path.startswith("."):
        raise UserError(f"{path}: no such file; wanted a .txt, .jsonl or .parquet file for data")
    else:
        name = path
        arguments = {"split": data.split, "name": data.subset, "revision": data.revision}
    # Its readers log what they also raise, with a traceback.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        # Streaming: nothing is copied to a cache, and of a large data set only the start is read.
        stream = datasets.load_dataset(name, streaming=True, **arguments)
        return list(islice(stream, None if local.is_file() else HUB_DOCUMENTS))
    except Exception as error:  # `datasets` raises whatever its readers raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if local.is_file() and local.suffix != ".parquet":
            reason = _wrong_in(local) or reason
        raise UserError(f"data.path={path}: cannot be read: {reason}") from error


def _wrong_in(file: Path) -> str | None:
    """What keeps a text file from being read, and where; None where that is not seen."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8; save it as UTF-8"
    except OSError:
        return None
    if not text.strip():
        return "no text in it; wanted documents to calibrate on"
    for number, line in enumerate(text.split("\n") if file.suffix == ".jsonl" else [], 1):
        try:
            json.loads(line or "0")
        except ValueError as error:
            return f"line {number} is not JSON ({error}); wanted one record a line"
    return None


def _pieces(path: str, column: str) -> list[dict[str, Any]]:
    try:
        return list(pieces.rows(home(path), column))
    except (OSError, ValueError) as error:  # pyarrow's are among them
        raise UserError(f"data.path={path}: cannot be read: {error}") from error


def split(data: Data) -> tuple[list[Document], list[Document], str]:
    """Documents to learn from, documents held out, and words for where the latter come from.

    Of many documents every tenth is held out; of a few long texts, the last tenth.
    """
    everything = documents(data, data.path)
    if data.heldout is not None:
        return everything, documents(data, data.heldout), Path(data.heldout).name
    if len(everything) >= 2 * HELD_OUT:
        held = everything[HELD_OUT - 1 :: HELD_OUT]
        rest = [d for i, d in enumerate(everything) if i % HELD_OUT != HELD_OUT - 1]
        return rest, held, f"every tenth document of {data.source}"
    if data.messages:
        raise UserError(
            f"{data.source}: {len(everything)} conversations; wanted at least {2 * HELD_OUT}, "
            "or another file to measure on by data.heldout=..."
        )
    text = "\n\n".join(str(d) for d in everything)
    cut = len(text) - len(text) // HELD_OUT
    return [text[:cut]], [text[cut:]], f"the last tenth of {data.source}"


def heldout_text(data: Data) -> tuple[str, str]:
    """The held-out part as one string, with words for where it comes from."""
    _, held, description = split(data)
    return "\n\n".join(plain(d) for d in held), description


def plain(document: Document) -> str:
    """A document as text: a conversation is what was said, a line a message."""
    if isinstance(document, str):
        return document
    return "\n".join(message["content"] for message in document)


def on_hub(data: Data) -> bool:
    """Whether `data.path` is taken for a data set of the hub: no file, nor named like one."""
    path = home(data.path or "")
    return bool(data.path) and not path.exists() and path.suffix == ""


def fingerprint(data: Data) -> str:
    """A hash of what the data say, so that a changed file is noticed; of its name, for the hub."""
    if on_hub(data):
        name = f"hub:{data.path}@{data.revision}:{data.subset}:{data.split}"
        file = home(data.heldout or "")
        if not file.is_file():
            return name
        with file.open("rb") as opened:
            return f"{name}:{hashlib.file_digest(opened, 'sha256').hexdigest()}"
    rest, held, _ = split(data)
    content = json.dumps([rest, held], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()
