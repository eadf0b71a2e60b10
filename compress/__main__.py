"""`python -m compress recipe=NAME [model.path=PATH] [field=value ...]`: the whole way."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from compress import config as schema
from compress.errors import UserError

CONF = Path(__file__).parent / "conf"
RECIPES = CONF / "recipe"
HYDRA_KEYS = ("hydra", "recipe")


def recipes() -> dict[str, str]:
    """The recipes that come with the project, each with its first line."""
    found = {}
    for file in sorted(RECIPES.glob("*.yaml")):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("# @")]
        found[file.stem] = lines[0].lstrip("# ")
    return found


def check_arguments(arguments: list[str]) -> None:
    """Raise UserError, in one line, for arguments that Hydra would answer with several."""
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    values = dict(a.lstrip("+~").split("=", 1) for a in overrides)
    listing = "\n".join(f"  {name:16} {line}" for name, line in recipes().items())
    wanted = values.get("recipe")
    if wanted is None:
        raise UserError(
            f"no recipe given; python -m compress recipe=NAME, with NAME one of\n{listing}"
        )
    for name in wanted.split(","):
        if name not in recipes():
            raise UserError(f"recipe={name}: no such recipe; there are\n{listing}")
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    for name in values:
        bare = name.split("@")[0]
        if bare.split(".")[0] not in HYDRA_KEYS and bare not in groups:
            schema.check_field(bare)
    if not {"-m", "--multirun"} & set(arguments):
        try:
            with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
                hydra.compose("config", overrides=overrides)
        except (HydraException, OmegaConfBaseException) as error:
            parts = [error, error.__cause__] if error.__cause__ else [error]
            said = [str(part).strip().splitlines()[0] for part in parts if str(part).strip()]
            raise UserError(": ".join(dict.fromkeys(said))) from error


@contextmanager
def told_plainly() -> Iterator[None]:
    """End the program on a user's mistake, a full disk or Ctrl-C with one line and no traceback.

    Inside Hydra's job too, since Hydra prints a traceback of what leaves it.
    """
    try:
        yield
    except UserError as error:
        _end(str(error))
    except OSError as error:
        if error.errno is None:
            raise
        _end(f"{error.filename or 'disk'}: {os.strerror(error.errno)}; what is done stays on disk")
    except SafetensorError as error:  # a full disk, where safetensors itself writes
        _end(f"{error}; what is done stays on disk")
    except KeyboardInterrupt:
        _end("stopped; the same command goes on from here", status=130)


def _end(message: str, status: int = 2) -> None:
    print(f"compress: {message}", file=sys.stderr)
    sys.exit(status)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(composed: DictConfig) -> None:
    """One job: composed by Hydra, checked, run."""
    from compress import pipeline

    with told_plainly():
        settings = schema.typed(composed)
        job = HydraConfig.get()
        if job.mode == RunMode.MULTIRUN and composed.out is None:
            # Each job of a sweep has a folder of its own, named by what it sweeps.
            swept = job.job.override_dirname.replace("/", "-")
            settings.out = f"{settings.out}/{swept}"
        pipeline.run(settings)


def main() -> None:
    """Entry of `python -m compress`; a user's mistake is one line on stderr and status 2."""
    shows_help = any(a in ("--help", "-h", "--hydra-help", "--version") for a in sys.argv[1:])
    schema.register()
    with told_plainly():
        if not shows_help:
            check_arguments(sys.argv[1:])
        elif not any(a.startswith("recipe=") for a in sys.argv[1:]):
            sys.argv.append("recipe=tiny")  # Hydra shows a whole configuration, so it needs one
        run()


if __name__ == "__main__":
    main()
