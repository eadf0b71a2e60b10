"""Words on the console, everything in the file, and no traceback of a full disk."""

import itertools
import resource
import sys
from pathlib import Path

import pytest

from compress import log, options


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


def test_the_small_commands_show_what_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "port=1"])
    options.run(lambda words: log.logger.warning(f"  no compiler, {words}"), "usage")
    assert capsys.readouterr().err == "compress: no compiler, ['port=1']\n"
    assert log.logger.handlers == []


def test_where_no_terminal_draws_a_bar_lines_come_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "compress")
    monkeypatch.setattr("time.monotonic", itertools.count(step=14).__next__)
    assert list(log.progress(range(5, 10), "distill", "step", total=10, done=5)) == [5, 6, 7, 8, 9]
    assert caplog.messages == ["  distill: step 8 of 10, 00:28 left"]
    bar = log.progress(itertools.count(), "leave out", "trial")
    assert [next(bar) for _ in range(4)] == [0, 1, 2, 3]
    assert caplog.messages[1:] == ["  leave out: trial 3"]


def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(log.progress(range(3), "distill", "step")) == [0, 1, 2]
    assert "distill:   0%|" in capsys.readouterr().err


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
