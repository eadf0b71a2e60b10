"""The jobs of a sweep: the folder of each, and what would end any of them, told before all run."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from compress import config as schema
from compress import pipeline
from compress.arguments import Job
from compress.config import Config
from compress.errors import UserError


def settled(composed: DictConfig, swept: str | None) -> Config:
    """The settings of a job. Raises ConfigError with all that is wrong.

    swept: of a job of a sweep, Hydra's name for it; its folder's, unless `out` is given.
    """
    settings = schema.typed(composed)
    if swept is not None and composed.out is None:
        name = swept.replace("/", "-").replace("'", "")
        settings.out = f"{settings.out}/{name}"
    return settings


def check(jobs: Sequence[tuple[Job, DictConfig]]) -> None:
    """Raise UserError, in one line that names the job, for what the start of any would refuse.

    jobs: each with its configuration, Hydra's own among it. Jobs may share a folder where each runs
    another stage alone (`only`); of those after the first the options are looked at, no more.
    """
    folders: dict[Path, dict[str | None, Job]] = {}
    for job, composed in jobs:
        with job.named():
            name = composed.hydra.job.override_dirname
            alone = OmegaConf.masked_copy(composed, [k for k in map(str, composed) if k != "hydra"])
            settings = settled(alone, name)
            here = folders.setdefault(Path(settings.out or "").resolve(), {})
            if (other := here.setdefault(settings.only, job)) is not job:
                raise UserError(
                    f"its folder is {settings.out}, as that of job {other.number}; wanted one for "
                    "each: leave out= away, or start them one by one, each with its out="
                )
            if len(here) == 1:  # the others read what those before them will leave there
                pipeline.check(settings)
