"""Python that a model wrote, run where it can do no harm: in bubblewrap, a Linux program.

In there is no network, no file but the interpreter's own and the system's libraries, all read-only,
16 MB of scratch in memory, no environment, no other process, and little time and memory. Where
bubblewrap is not, nothing is run.
"""

import os
import random
import shutil
import subprocess
import sys
from functools import cache, lru_cache

SECONDS = 10
"""A program may take so long, start of the interpreter included."""
LIMITS = """\
import os, resource
for kind, most in (("AS", 1 << 30), ("CPU", {seconds}), ("FSIZE", 1 << 24), ("NPROC", 32)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
del os, resource, kind, most
"""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
CHECK = "raise SystemExit(0)"


@lru_cache(maxsize=4096)
def passes(program: str) -> bool:
    """Whether the program runs to its end, within SECONDS, without an error.

    Its last statement ends the interpreter with a status that it cannot know, so that one which
    exits before its end has not passed. What it prints is dropped.
    """
    status = random.SystemRandom().randrange(64, 128)
    return _status(f"{program}\n\n__import__('os')._exit({status})\n") == status


@cache
def missing() -> str | None:
    """Why no program can be run here, in words, or None."""
    if shutil.which("bwrap") is None:
        return (
            "code is run in bubblewrap alone, which is not installed; "
            "wanted the command bwrap (apt install bubblewrap)"
        )
    if _status(CHECK) != 0:
        return "code is run in bubblewrap alone, and bwrap makes no sandbox on this machine"
    return None


def _status(program: str) -> int | None:
    """The status with which a program ends; None where it takes too long."""
    source = LIMITS.format(seconds=SECONDS) + program
    try:
        ended = subprocess.run(
            _command(),
            input=source.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:  # bwrap is killed, and all in it with it
        return None
    return ended.returncode


def _command() -> list[str]:
    seen = [word for path in (*SYSTEM, sys.base_prefix) for word in ("--ro-bind-try", path, path)]
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
        *("--cap-drop", "ALL", *seen, "--proc", "/proc"),
        *("--size", str(1 << 24), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),
        *(os.path.realpath(sys.executable), "-I", "-S", "-B", "-"),
    ]
