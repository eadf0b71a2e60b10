"""A run of the pipeline small enough to be made many times over."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small import SMALL, composed

from compress.config import Config


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """A recipe=tiny on the shared tiny model, in a folder of this test's own."""

    def make(*overrides: str, out: str = "run") -> Config:
        arguments = ["recipe=tiny", f"model.path={tiny_model}", f"out={tmp_path / out}"]
        return composed(*arguments, *SMALL, *overrides)

    return make
