"""`python -m compress recipe=NAME [model.path=PATH] [field=value ...]`: the whole way."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from safetensors import SafetensorError

from compress import arguments
from compress.arguments import CONF, Job
from compress.errors import GateError, UserError

RECIPES = CONF / "recipe"


def recipes() -> dict[str, str]:
    """The recipes that come with the project, each with its first line."""
    found = {}
    for file in sorted(RECIPES.glob("*.yaml")):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("# @")]
        found[file.stem] = lines[0].lstrip("# ")
    return found


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
    except Exception:
        if not _first_to_tell():
            sys.exit(1)  # what was told before brought this about
        raise


def _end(message: str, status: int = 2) -> None:
    if _first_to_tell():
        print(f"compress: {message}", file=sys.stderr)
    sys.exit(status)


def _launched() -> bool:
    """Whether `accelerate launch` started this process, beside others perhaps."""
    return "LOCAL_RANK" in os.environ


def _first_to_tell() -> bool:
    """Whether it is for this process to say how the run ends."""
    if not _launched():
        return True
    from compress import processes

    return processes.first_to_tell()


@dataclass(frozen=True)
class Jobs:
    """The jobs of a command so far: folders of those that ended, and what breaks their gates."""

    folders: list[Path] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def compare(self) -> None:
        """Put the runs of a sweep side by side, those that have a report."""
        from compress import compare

        folders = dict.fromkeys(self.folders)  # jobs of one stage each may share one
        reported = [folder for folder in folders if (folder / "report.json").exists()]
        if len(reported) > 1:
            print(f"side by side: {compare.write(reported)}")


def runner(asked: Sequence[Job], jobs: Jobs) -> Callable[[], None]:
    """What runs the jobs of the command line, one after another, and notes how they end."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(composed: DictConfig) -> None:
        from compress import pipeline, sweep

        with told_plainly():
            given = HydraConfig.get()
            job = asked[given.job.num if given.mode == RunMode.MULTIRUN else 0]
            if job.count > 1:
                print(job, file=sys.stderr)
            settings = sweep.settled(composed, job)
            jobs.folders.append(Path(settings.out or ""))
            try:
                pipeline.run(settings)
            except GateError as error:  # the other jobs of a sweep still run
                jobs.broken.append(f"{settings.out}: {error}")

    return run


def main() -> None:
    """Entry of `python -m compress`, in each of the processes that `accelerate launch` starts."""
    with told_plainly():
        if _launched():
            from compress import processes

            processes.lead(command)
        else:
            command()


def command() -> None:
    """Do what the command line says.

    Status 2 and one line on stderr: a user's mistake. Status 3: all was run and written, and a
    result breaks the recipe's own limits (score.gate); the reasons are on stderr.
    """
    words = sys.argv[1:]
    shows_help = any(word in ("--help", "-h", "--hydra-help", "--version") for word in words)
    if "recipe=?" in words:
        print(arguments.listed(recipes()))
        return
    if not shows_help:
        arguments.check_early(words, recipes())
    from compress import config as schema  # seconds, with all that the stages work with

    schema.register()
    words = arguments.prepared(words)
    asked = [] if shows_help else arguments.check(words)
    if len(asked) > 1:
        from compress import sweep

        sweep.check(asked)
    if shows_help and not any(word.startswith("recipe=") for word in words):
        words.append("recipe=tiny")  # Hydra shows a whole configuration, so it needs one
    sys.argv[1:] = words
    jobs = Jobs()
    runner([job for job, _ in asked], jobs)()
    jobs.compare()
    if jobs.broken:
        _end("\ncompress: ".join(jobs.broken), status=3)


if __name__ == "__main__":
    main()
