"""`python -m compress.serve` as a process: its mistakes, and how it stops."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from openai import APIError, OpenAI

from compress import options, serve
from compress.errors import UserError
from tests.serving.asking import half_a_body, head
from tests.serving.conftest import CLIENT

ANSWERS = 150


@contextmanager
def process(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """The command on any free port, and a client of it."""
    command = [sys.executable, "-m", "compress.serve", f"checkpoint={folder}", "port=0", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        try:
            said = started.stderr.readline().strip()
            while "kernels" in said:  # which are built, where they were not yet
                said = started.stderr.readline().strip()
            assert said.startswith("compress: tiny is served at http://127.0.0.1:")
            with OpenAI(base_url=said.split()[-1], **CLIENT) as client:
                yield started, client
        finally:
            started.kill()  # a test that fails would wait for it


def wait_for(client: OpenAI, line: str) -> None:
    """Until the metrics say so."""
    where = str(client.base_url).removesuffix("v1/") + "metrics"
    for _ in range(500):
        if line in urlopen(where).read().decode():
            return
        time.sleep(0.02)
    raise AssertionError(f"never {line}")


def test_sigterm_in_the_middle_finishes_what_runs(folder: Path) -> None:
    asked = {"model": "tiny", "max_tokens": ANSWERS, "temperature": 0}
    with process(folder) as (server, client), ThreadPoolExecutor(1) as pool:
        stream = client.completions.create(prompt="Once", stream=True, **asked)
        next(stream)
        whole = pool.submit(client.completions.create, prompt="Lily", **asked)
        wait_for(client, "compress_requests_running 2.0")
        server.send_signal(signal.SIGTERM)
        events = list(stream)
        assert events[-1].choices[0].finish_reason == "length"
        assert whole.result().usage.completion_tokens == ANSWERS
        assert server.wait(30) == 0
        assert server.stderr.read() == "compress: stopping; requests have 30 s to finish\n"


def test_sigterm_at_once_is_not_lost(folder: Path) -> None:
    with process(folder) as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_a_folder_without_a_tokenizer_is_told_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match=r"no tokenizer that loads \(.*\); copy the files") as told:
        serve.main([f"checkpoint={tmp_path}", "port=0"])
    assert "\n" not in str(told.value)


def test_what_does_not_finish_in_time_is_ended(folder: Path) -> None:
    with process(folder, "grace=0") as (server, client):
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=500, temperature=0, stream=True
        )
        next(stream)
        server.send_signal(signal.SIGTERM)
        with stream, pytest.raises(APIError, match="the server is stopping; send it again"):
            list(stream)
        assert server.wait(30) == 0
        assert server.stderr.read() == "compress: stopping; requests have 0 s to finish\n"


def test_half_a_body_does_not_hold_up_the_end(folder: Path) -> None:
    with process(folder) as (server, client), half_a_body(client.base_url.port) as half:
        assert client.models.list().data  # it has come by now
        server.send_signal(signal.SIGTERM)
        with half.makefile("rb") as answer:
            assert b"the server is stopping; send it again" in answer.read()
        assert server.wait(20) == 0
        assert server.stderr.read() == "compress: stopping; requests have 30 s to finish\n"


def test_a_client_that_does_not_read_is_cut_off(folder: Path) -> None:
    # What is refused names the model, which here fills what the kernel holds of an answer.
    body = json.dumps({"model": "x" * 4_000_000, "prompt": "a"}).encode()
    with process(folder, "grace=0") as (server, client), socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", client.base_url.port))
        silent.sendall(head("/v1/completions", len(body)) + body)
        wait_for(client, 'compress_requests_total{outcome="invalid"} 1.0')
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr.read() == (
            "compress: stopping; requests have 0 s to finish\n"
            "compress: cut off 1 that did not read the answer in time\n"
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "checkpoint is not given; wanted checkpoint=…"),
        (["checkpoint=nowhere"], "nowhere: no config.json there; wanted a checkpoint's folder"),
        (["checkpoint=~/nowhere"], f"{Path.home()}/nowhere: no config.json there"),
        (["checkpoint=~no-user/x"], "~no-user/x: no config.json there"),
        (["checkpoint"], "checkpoint: no option; wanted field=value, of checkpoint, name, "),
        (["checkpoint=a", "prt=1"], "prt: no such option; did you mean port?"),
        (["checkpoint=a", "port=x"], "port=x: wanted a whole number"),
        (["checkpoint=a", "port=70000"], "port is 70000; wanted 0 to 65535"),
        (["checkpoint=a", "device=tpu"], "device is 'tpu'; wanted auto, cpu or cuda"),
        (["checkpoint=a", "running=0"], "running is 0; wanted at least 1"),
        (["checkpoint=a", "running=8", "batch_tokens=4"], "batch_tokens is 4; wanted at least 8"),
        (["checkpoint=a", "new_tokens=0"], "new_tokens is 0; wanted at least 1, or null"),
        (["checkpoint=a", "grace=inf"], "grace is inf; wanted seconds, 0 or more"),
        (["checkpoint=${HOME}/a"], "Interpolation key 'HOME' not found; ${…} is not filled in"),
        (["checkpoint=a", "host=256.0.0.1"], "host=256.0.0.1 port=0: "),
        (["checkpoint=a", "host=a..b"], "host=a..b port=0: "),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        serve.main([*words, "port=0"] if not any("port" in word for word in words) else words)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert "port=0 takes" not in str(caught.value)


def test_a_port_that_is_taken_is_told(folder: Path) -> None:
    with serve.listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port={port}: Address already in use; port=0 takes"):
            serve.main([f"checkpoint={folder}", f"port={port}"])


def test_a_mistake_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "checkpoint=nowhere", "port=0"])
    with pytest.raises(SystemExit) as ended:
        options.run(serve.main, "usage")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == "compress: nowhere: no config.json there; wanted a checkpoint's folder\n"
    monkeypatch.setattr(sys, "argv", ["serve", "--help"])
    options.run(serve.main, "usage")
    assert capsys.readouterr().out == "usage"
