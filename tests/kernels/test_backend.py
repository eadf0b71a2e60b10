"""Which backend is picked, and that an explicit choice is never replaced by another."""

from contextlib import nullcontext

import pytest
import torch

from compress.errors import UserError
from compress.kernels.backend import pick_backend
from compress.kernels.current import current


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda", "triton"), ("cuda:1", "triton"), ("cpu", "cpu")]
)
def test_the_device_decides_where_nothing_is_asked(device: str, backend: str) -> None:
    assert pick_backend(device, None, {}) == backend


def test_the_argument_goes_before_the_environment() -> None:
    environ = {"COMPRESS_BACKEND": "reference"}
    assert pick_backend("cpu", "cpu", environ) == "cpu"
    assert pick_backend("cpu", None, environ) == "reference"


def test_intel_gpus_are_asked_for() -> None:
    assert pick_backend("xpu", None, {}) == "reference"
    assert pick_backend("xpu", "triton", {}) == "triton"


def test_triton_runs_on_cpu_in_its_interpreter_only() -> None:
    assert pick_backend("cpu", "triton", {"TRITON_INTERPRET": "1"}) == "triton"
    with pytest.raises(UserError, match="triton needs a cuda or xpu device, found cpu; leave"):
        pick_backend("cpu", "triton", {})


@pytest.mark.parametrize(
    ("device", "requested", "message"),
    [
        ("cuda", "cpu", "cpu runs on the CPU only"),
        ("cpu", "cuda", "'cuda'; wanted one of triton, cpu, reference"),
    ],
)
def test_a_choice_that_cannot_run_is_refused(device: str, requested: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pick_backend(device, requested, {})


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="triton is not installed"):
        pick_backend("cuda", None, {})


def test_the_current_gpu_is_changed_where_the_operands_are_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(
        torch.accelerator, "device_index", lambda index: made.append(index) or nullcontext()
    )
    for name in ("cpu", "cuda:0", "cuda:1"):
        with current(torch.device(name)):
            pass
    assert made == [1]
