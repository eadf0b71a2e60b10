"""What this runs on, and how much memory it takes."""

import contextlib
import ctypes
import functools
import gc
import os
import platform
import resource
import sys
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = (
    "torch",
    "transformers",
    "compressed-tensors",
    "safetensors",
    "accelerate",
    "datasets",
    "triton",
    "numpy",
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """The most resident memory that the process had inside the `with`, in bytes, as `peak`.

    Linux can reset the high-water mark; elsewhere it is that of the whole process so far.
    """

    peak = 0

    def __enter__(self) -> "PeakMemory":
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = high_water()


class PeakDisk:
    """The most bytes that the files under `folder` held inside the `with`, as `peak`: looked at
    every `interval` seconds, and at the end.
    """

    def __init__(self, folder: Path, interval: float = 0.5) -> None:
        self.folder, self.interval, self.peak = folder, interval, 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> "PeakDisk":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def _look_on(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self.interval)
            self.peak = max(self.peak, disk_bytes(self.folder))


def disk_bytes(folder: Path) -> int:
    """Bytes of all files under `folder`; of what goes meanwhile, folders too, none."""
    total = 0
    for place, _, files in os.walk(folder):  # rglob raises on a folder that went
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size
    return total


def high_water() -> int:
    """The process's peak resident memory in bytes, since the last reset."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_memory() -> None:
    """Give back the GPU memory of models that are gone, for other processes and the free count."""
    gc.collect()
    torch.cuda.empty_cache()


@functools.cache
def keep_heap() -> None:
    """Have freed memory stay with this process, up to 256 MB at the end of the heap, where the C
    library can (glibc). Tensors below 32 MB lie there: a forward of many tokens would else give
    their pages back and be given new ones, zeroed, block after block.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is not None:
        adjust(M_TRIM_THRESHOLD, 256 << 20)
        adjust(M_MMAP_THRESHOLD, 32 << 20)


def trim_heap() -> None:
    """Give the free pages of the heap back to the system, where the C library can (glibc).

    Tensors below 32 MB that come and go block after block leave it in pieces, and a process grows
    with the number of blocks: docs/log.md.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def packages() -> dict[str, str]:
    """Versions of what the result depends on."""
    found = {"python": platform.python_version()}
    for name in ("compress-llm", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine in words and numbers."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "torch_threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
