"""What this runs on, and how much memory it takes."""

import gc
import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.peak = high_water()


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
