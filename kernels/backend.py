"""Which implementation of the kernels runs: decided in one place, by one pure function."""

import importlib.util
import os
from collections.abc import Mapping

import torch

from compress.errors import UserError

BACKENDS = ("triton", "cpu", "reference")
VARIABLE = "COMPRESS_BACKEND"


def pick_backend(
    device: str | torch.device,
    requested: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The backend for tensors on `device`: the argument, then COMPRESS_BACKEND, then the device's.

    The device's own is `triton` on cuda, as which PyTorch knows AMD's GPUs too, `cpu` on cpu and
    `reference` elsewhere; on Intel's xpu, where it was never tried, `triton` has to be asked for.
    Raises UserError for a backend that is unknown or cannot run there: another one is never taken
    in its place.
    """
    kind = torch.device(device).type
    automatic = {"cuda": "triton", "cpu": "cpu"}.get(kind, "reference")
    backend = requested or environ.get(VARIABLE) or automatic
    if backend not in BACKENDS:
        raise UserError(f"backend is {backend!r}; wanted one of {', '.join(BACKENDS)}")
    if backend == "cpu" and kind != "cpu":
        raise UserError(f"backend cpu runs on the CPU only, not on {kind}; leave backend unset")
    if backend == "triton":
        _require_triton(kind, environ)
    return backend


def _require_triton(kind: str, environ: Mapping[str, str]) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError("backend triton is not installed; pip install triton, or backend=reference")
    # Its interpreter is for the tests, which put its bfloat16 right: by itself that is garbage.
    if kind not in ("cuda", "xpu") and environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"backend triton needs a cuda or xpu device, found {kind}; leave backend unset"
        )
