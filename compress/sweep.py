"""The jobs of a sweep: the folder of each, and what would end any of them, told before all run."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from compress import config as schema
from compress import pipeline
from compress.arguments import Job, each
from compress.config import Config
from compress.errors import UserError

IN_FOLDER = ("recipe", "model.path")
"""Fields that name the folder in which a job's own lies."""


def settled(composed: DictConfig, job: Job) -> Config:
    """The settings of a job. Raises ConfigError with all that is wrong.

    Unless `out` is given, its folder is named by what tells it from the other jobs.
    """
    settings = schema.typed(composed)
    told = [word for word in job.swept if word.partition("=")[0] not in IN_FOLDER]
    if told and composed.out is None:
        name = ",".join(sorted(told)).replace("/", "-").replace("'", "")
        settings.out = f"{settings.out}/{name}"
    return settings


def check(jobs: Sequence[tuple[Job, DictConfig]]) -> None:
    """Raise UserError, as `each` does, for what the start of any would refuse.

    jobs: each with its configuration, Hydra's own among it. Jobs may share a folder where each runs
    another stage alone (`only`); of those after the first the options are looked at, no more.
    """
    folders: dict[Path, dict[str | None, Job]] = {}

    def refuse(job: Job) -> None:
        _, composed = jobs[job.number - 1]
        alone = OmegaConf.masked_copy(composed, [k for k in map(str, composed) if k != "hydra"])
        settings = settled(alone, job)
        here = folders.setdefault(Path(settings.out or "").resolve(), {})
        if (other := here.setdefault(settings.only, job)) is not job:
            way = "wanted each once"
            if job.swept != other.swept:
                away = "" if alone.out is None else "leave out= away, or "
                way = f"wanted one for each: {away}start them one by one, each with its out="
            raise UserError(f"its folder is {settings.out}, as that of job {other.number}; {way}")
        if len(here) == 1:  # the others read what those before them will leave there
            pipeline.check(settings)

    each([job for job, _ in jobs], refuse)
