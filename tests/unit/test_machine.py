"""What a stage takes is measured, not guessed."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from compress.machine import PeakDisk, disk_bytes


def test_the_peak_of_disk_outlives_what_made_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "kept").write_bytes(bytes(100))
    with PeakDisk(tmp_path, interval=0.005) as disk:
        (tmp_path / "gone").write_bytes(bytes(1000))
        waited = time.monotonic() + 5
        while disk.peak < 1100 and time.monotonic() < waited:
            time.sleep(0.005)
        (tmp_path / "gone").unlink()
    assert disk.peak == 1100


def test_the_end_is_looked_at_however_short_it_was(tmp_path: Path) -> None:
    with PeakDisk(tmp_path, interval=60) as disk:
        (tmp_path / "file").write_bytes(bytes(7))
    assert disk.peak == 7


def test_what_goes_while_it_is_looked_at_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(bytes(7))
    (tmp_path / "gone").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    scandir = os.scandir

    def gone(path: Any) -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert disk_bytes(tmp_path) == 7
