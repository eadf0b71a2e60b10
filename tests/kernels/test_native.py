"""The CPU's kernels in C++ as a library: how it is built, and what its operators take."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kernels import dense
from compress.kernels.native import build
from compress.log import logger


@pytest.fixture
def ops() -> Any:
    if not build.available():
        pytest.skip("no C++ compiler here")
    return torch.ops.compress_cpu


def test_a_compiler_that_is_there_builds_them() -> None:
    """What skips without one would also skip where it does not compile."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler here")
    assert build.available()


def test_the_operators_are_sound_for_compilers(ops: Any) -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    scales, sums = torch.ones(8), torch.zeros(8, dtype=torch.int32)
    grid = (torch.zeros(8, 8, dtype=torch.int32), torch.ones(8, 2), 4)
    ints, qkv = weight.to(torch.int8), torch.randn(1, 8 * 16).bfloat16()
    turns = torch.ones(2, 16).bfloat16()
    kept = torch.randn(2, 2, 5, 16).bfloat16()
    by_amx = (
        (ops.dense_amx, (x, [weight, weight])),
        (ops.w8a8_amx, (x, [ints] * 2, [sums] * 2, [scales] * 2, None)),
        (ops.w4a16_amx, (x, [grid[0]] * 2, [scales[:, None]] * 2)),
    )
    for operator, arguments in (
        *(by_amx if build.has_amx() else ()),
        (ops.dense, (x, [weight, weight])),
        (ops.w8a8, (x, [ints] * 2, [sums] * 2, [scales] * 2, None)),
        (ops.w8a8, (x.float(), [ints], [sums], [scales], scales)),
        (ops.quantize, (x,)),
        (ops.rescale, (torch.ones(3, 8, dtype=torch.int32), scales, scales[:3].clone(), x.dtype)),
        (ops.wna16, (x, [grid[0]] * 2, [grid[1]] * 2, grid[2])),
        (ops.dequantize, grid),
        (ops.rmsnorm, (x, x[0].clone(), 1e-5)),
        (ops.swiglu, (x,)),
        (ops.attend, (qkv, *turns, *kept, 3, 0.25)),
    ):
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator.default, arguments, test_utils=tests)


def test_no_input_channels_give_zeros(ops: Any) -> None:
    x, scales, sums = torch.ones(1, 0).bfloat16(), torch.ones(4), torch.zeros(4, dtype=torch.int32)
    ints = torch.ones(4, 0, dtype=torch.int8)
    assert not ops.dense(x, [ints.bfloat16()]).any()
    assert not ops.w8a8(x, [ints], [sums], [scales], None).any()
    if build.has_amx():
        assert not ops.dense_amx(x, [ints.bfloat16()]).any()
        assert not ops.w8a8_amx(x, [ints], [sums], [scales], None).any()


def test_operands_that_do_not_fit_are_refused(ops: Any) -> None:
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    words, scales, sums = torch.zeros(64, 8, dtype=torch.int32), torch.ones(64, 1), torch.zeros(64)
    for refused in (
        lambda: ops.dense(x, [weight, weight.t()]),
        lambda: ops.dense(x[:, :32], [weight]),
        lambda: ops.w8a8(x, [weight.to(torch.int8)], [sums.int()], [scales], None),
        lambda: ops.quantize(weight.t()),
        lambda: ops.rescale(words, scales, scales[:, 0], torch.bfloat16),
        lambda: ops.wna16(x[:, :32], [words], [scales], 4),
        lambda: ops.wna16(x, [words, words[:, :4]], [scales[:, 0:1]] * 2, 4),
        lambda: ops.dequantize(words, scales[:3], 4),
    ):
        with pytest.raises(RuntimeError, match="wanted contiguous"):
            refused()
    with pytest.raises(RuntimeError, match="2 weights, 1 scales; wanted as many of each"):
        ops.wna16(x, [words, words], [scales], 4)
    with pytest.raises(RuntimeError, match="no weight; wanted one or more"):
        ops.dense(x, [])
    for cut, groups in ((words, 4), (words[:, :0].contiguous(), 1)):
        with pytest.raises(RuntimeError, match=rf" words in {groups} groups; wanted whole vectors"):
            ops.dequantize(cut, torch.ones(64, groups), 4)
    assert not dense.takes(weight.t())


def test_amx_where_there_is_none_is_refused(ops: Any) -> None:
    if build.has_amx():
        pytest.skip("there is")
    with pytest.raises(RuntimeError, match="no AMX for this process"):
        ops.dense_amx(torch.ones(1, 32).bfloat16(), [torch.ones(1, 32).bfloat16()])


def test_what_keeps_the_kernels_from_being_built_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", "compress")
    file, empty, spoilt = tmp_path / "file", tmp_path / "empty", tmp_path / "spoilt"
    file.touch()
    false = shutil.which("false")
    assert false is not None
    monkeypatch.setenv("COMPRESS_CACHE", str(spoilt))
    binary = build.binary_of([false])
    binary.parent.mkdir(parents=True)
    binary.write_bytes(build.ELF.pack(b"\x7fELF", build.ELF.size, 0, 0))  # whole, and nothing in it
    for compiler, cache, said in (
        ("nothing++", empty, "no C++ compiler, 'nothing++'"),
        ("g++ '-O2", empty, 'no C++ compiler, "g++ \'-O2"'),
        ("false", empty, "does not build the CPU's kernels, torch's serve: exit status 1"),
        ("false", file, f"Not a directory: '{file / 'native'}'"),
        ("false", spoilt, f"Could not load this library: {binary}"),
        (f"'{false}' g++", empty, "false g++ does not build the CPU's kernels"),
    ):
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setenv("COMPRESS_CACHE", str(cache))
        assert not build.available.__wrapped__()
        assert said in caplog.messages[-1]
        assert caplog.records[-1].levelname == "WARNING"  # shown where no log was begun, too
        assert "\n" not in caplog.messages[-1]
    assert list((empty / "native").iterdir()) == []


def test_a_binary_that_was_cut_short_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not build.available():
        pytest.skip("no C++ compiler here")
    compiler = build.compiler()
    assert compiler is not None
    built = build.binary_of(compiler).read_bytes()
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path))
    binary = build.binary_of(compiler)
    binary.parent.mkdir(parents=True)
    asked = []

    def build_again(program: list[str], where: Path) -> None:
        asked.append(where)
        where.write_bytes(built)

    monkeypatch.setattr(build, "_build", build_again)
    # Its operators are there already, and are there once in a process.
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    monkeypatch.setattr(build, "_register_fakes", lambda: None)
    for kept in (0, 63, 64, len(built) // 2, len(built) - 1):
        binary.write_bytes(built[:kept])
        assert not build.is_whole(binary)
        assert build.available.__wrapped__()
        assert binary.read_bytes() == built
    assert asked == [binary] * 5
    assert build.available.__wrapped__()
    assert len(asked) == 5


@pytest.mark.slow
def test_int4_without_the_instruction_for_pairs_of_bf16(tmp_path: Path) -> None:
    """Where this machine has it, in a build of its own that may not use it."""
    if "avx512_bf16" not in build._cpu() or not build.available():
        pytest.skip("no such instruction here, so the other tests are without it")
    environ = os.environ | {"CXX": "g++ -mno-avx512bf16", "COMPRESS_CACHE": str(tmp_path)}
    chosen = "test_wna16 and own or batch_of_few"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("test_cpu.py"))],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "36 passed" in done.stdout
    assert len(list((tmp_path / "native").glob("*.so"))) == 1


def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    env = shutil.which("env")
    for given, words in (("env g++ -g0", [env, "g++", "-g0"]), ("no-such++ g++", None)):
        monkeypatch.setenv("CXX", given)
        assert build.compiler() == words
    assert env is not None
    assert build.binary_of([env, "true"]) != build.binary_of([env, "true", "-g0"])
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not any(flag.startswith("-mprefer") for flag in build.flags())
