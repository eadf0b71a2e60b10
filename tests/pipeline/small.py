"""What the pipeline's tests share: a run small enough to be made many times, and its killing."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch
from hydra import compose, initialize_config_dir

from compress import config as schema
from compress.__main__ import CONF
from compress.config import Config

SMALL = (
    "data.samples=4",
    "data.length=64",
    "calibrate.rows=32",
    "calibrate.heldout_windows=2",
    "calibrate.heldout_length=64",
    "calibrate.batch=2",
    "distill.samples=24",
    "distill.length=32",
    "distill.measures=2",
    "extend.steps=12",
    "extend.heldout_windows=1",
    "extend.batch=1",
    "extend.length=160",
    "extend.keys=0",
    "serve.prompt_tokens=8",
    "serve.new_tokens=4",
    "serve.requests=2",
    "serve.warmup=1",
    "serve.answer_tokens=4",
    "score.windows=1",
    "score.window_tokens=64",
    "score.tasks=[knowledge]",
    "score.limit=4",
)


def composed(*overrides: str) -> Config:
    """The configuration that the command line would make of these arguments."""
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.typed(compose("config", overrides=list(overrides)))


def forked(work: Callable[[], object]) -> int:
    """Do `work` in a child process; its exit status, or minus the signal that ended it.

    A fork shares what is imported and loaded, which takes a process of its own seconds.
    """
    torch.set_num_threads(1)  # a fork copies one thread; OpenMP must not wait for others
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def die() -> None:
    """What `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
