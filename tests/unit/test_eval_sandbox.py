"""Code of a model runs in a sandbox or not at all: what passes, what is kept out of its reach."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compress.errors import UserError
from compress.eval import checks, sandbox
from compress.eval.own import read
from compress.eval.rules import broken

needs_sandbox = pytest.mark.skipif(
    sandbox.missing() is not None, reason="bubblewrap is not here, or not allowed to work"
)
DOUBLE = {"rule": "runs", "tests": "assert double(2) == 4\nassert double('a') == 'aa'"}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What is known of this machine and of programs, forgotten before and after."""
    for once in (sandbox.missing, sandbox.passes):
        once.cache_clear()
    yield
    for once in (sandbox.missing, sandbox.passes):
        once.cache_clear()


@needs_sandbox
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("def double(x):\n    return x + x", True),
        ("```python\ndef double(x):\n    return x + x\n```", True),
        ("Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", True),
        ("def double(x):\n    return x + 2", False),
        ("def double(x): return x + x\nraise SystemExit(0)", False),
        ("def double(x): return x + x\nimport os; os._exit(0)", False),
        ("I cannot write code.", False),
        ("def double(x)\n    return x + x", False),
        ("", False),
    ],
)
def test_an_answer_that_passes_its_tests_is_right(answer: str, right: bool) -> None:
    assert broken((DOUBLE,), answer) == ([] if right else ["runs"])


@needs_sandbox
def test_an_answer_may_go_on_where_the_prompt_ends() -> None:
    rule = {**DOUBLE, "before": "def double(x):\n"}
    assert broken((rule,), "    return x + x\n") == []
    assert broken((rule,), "    return x\n") == ["runs"]


@needs_sandbox
def test_what_is_outside_is_neither_read_nor_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    monkeypatch.setenv("TOKEN", "x")
    assert not sandbox.passes(f"open({str(secret)!r})")
    assert not sandbox.passes(f"open({str(secret)!r}, 'w')")
    assert sandbox.passes("import os\nassert 'TOKEN' not in os.environ")
    assert sandbox.passes("import os\nassert sum(n.isdigit() for n in os.listdir('/proc')) < 5")
    for folder in ("/", "/usr"):
        assert not sandbox.passes(f"open({folder!r} + '/made-by-a-test', 'w')")
    assert secret.read_text() == "x"
    scratch = "open('made', 'w').write('a')\nassert open('/tmp/made').read() == 'a'"
    assert sandbox.passes(scratch)
    assert not Path("/tmp/made").exists()


@needs_sandbox
def test_no_network_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert not sandbox.passes(program)


@needs_sandbox
def test_time_and_memory_have_an_end(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    assert not sandbox.passes("x = 'a' * (2 << 30)")
    assert not sandbox.passes("open('/tmp/x', 'wb').write(b'0' * (1 << 25))")
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    start = time.monotonic()
    assert not sandbox.passes("while True: pass")
    assert not sandbox.passes("import time\ntime.sleep(60)")
    assert time.monotonic() - start < 20


def test_without_a_sandbox_nothing_is_run_and_the_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *_, **__: pytest.fail("was run"))
    (tmp_path / "code.yaml").write_text("data: code.jsonl\nkind: rules\nprompt: '{text}'\n")
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": "Double it.", "rules": [DOUBLE]}))
    with pytest.raises(UserError, match=r"code\.jsonl:1: code is run in bubblewrap alone") as error:
        read(tmp_path / "code.yaml")
    assert str(error.value).endswith("wanted the command bwrap (apt install bubblewrap)")


def test_tests_that_do_not_parse_are_told(tmp_path: Path) -> None:
    rule = {"rule": "runs", "tests": "assert double(2 == 4"}
    (tmp_path / "code.yaml").write_text("data: code.jsonl\nkind: rules\nprompt: '{text}'\n")
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": "Double it.", "rules": [rule]}))
    with pytest.raises(UserError, match=r"code\.jsonl:1: .*wanted Python that parses"):
        read(tmp_path / "code.yaml")


def test_the_code_of_an_answer_is_its_first_fenced_block() -> None:
    assert checks.code("x = 1") == "x = 1"
    assert checks.code("So:\n```py\nx = 1\n```\nor\n```\nx = 2\n```") == "x = 1\n"
    assert checks.code("So:\n```\nx = 1") == "x = 1"  # cut at its longest
