"""What a stage takes is measured, not guessed."""

import time
from pathlib import Path

from compress.machine import PeakDisk


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
