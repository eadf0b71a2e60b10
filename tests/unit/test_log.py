"""Words on the console, everything in the file, and no traceback of a full disk."""

import resource
from pathlib import Path

import pytest

from compress import log


def test_console_has_the_words_and_the_file_time_and_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.start(tmp_path / "log.txt")
    for _ in log.progress(range(2), "work", "step"):
        log.logger.info("a line")
    log.logger.debug("for the file")
    log.stop()
    shown = capsys.readouterr().err
    assert shown.count("a line\n") == 2
    assert "for the file" not in shown
    written = (tmp_path / "log.txt").read_text()
    assert written.count("INFO compress: a line") == 2
    assert "DEBUG compress: for the file" in written


def test_a_log_that_cannot_be_written_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.start(tmp_path / "log.txt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        log.logger.info("a line that does not fit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.stop()
    assert capsys.readouterr().err == "a line that does not fit\n"
