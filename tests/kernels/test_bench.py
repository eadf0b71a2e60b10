"""What the benchmark prints on CPU, and the floors that docs/kernels.md names."""

import re
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from compress.kernels import bench, peers
from compress.kernels.check import reference_linear
from compress.kernels.roofline import PEAKS, floor_us, launch_bytes, main, weight_bytes
from compress.qtensor import QTensor, QuantSpec

A100, H100 = PEAKS[0], PEAKS[1]
W8A8 = QuantSpec(8, activation_bits=8)


def test_bytes_of_a_launch() -> None:
    # 4 bits a weight, and 32 groups of 128 a row with a scale of 2 bytes.
    assert weight_bytes(4096, 4096, QuantSpec(4, 128)) == 4096 * 4096 // 2 + 4096 * 32 * 2
    assert weight_bytes(4096, 4096, None) == 2 * 4096 * 4096
    # Two tokens in INT8 with a float32 scale each, and their outputs in 16 bit.
    assert launch_bytes(2, 100, 50, W8A8) == 100 * 50 + 100 * 2 + 2 * (50 + 4) + 2 * 2 * 100


def test_floors() -> None:
    # Bound by memory: 8 650 752 bytes of weight, 16 384 of input and output, at 2.039 TB/s.
    assert floor_us(A100, 1, 4096, 4096, QuantSpec(4, 128)) == pytest.approx(4.2507, rel=1e-4)
    # Bound by arithmetic: 2 * 2048 * 4096^2 operations at 624 TOP/s, and at 989.4 TFLOP/s.
    assert floor_us(A100, 2048, 4096, 4096, W8A8) == pytest.approx(110.13, rel=1e-4)
    assert floor_us(H100, 2048, 4096, 4096, None) == pytest.approx(69.46, rel=1e-4)


def test_the_tables_have_a_row_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| Llama-3-8B | 14336 × 4096 |") for line in lines) == 2
    assert sum(line.startswith("- ") for line in lines) == len(PEAKS)


def test_the_benchmark_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("what it does on CPU")
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "ROUND_SECONDS", 0)
    monkeypatch.setattr(bench, "last_cache", lambda _: 10_000)
    monkeypatch.setitem(peers.PEERS, "vLLM", lambda weight, _: doubled(weight))
    arguments = ["bench", "--shapes", "32x64", "16x128", "--tokens", "1", "2", "2048"]
    monkeypatch.setattr("sys.argv", arguments)
    bench.main()
    head, _, titles, *lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("- ")]
    # Installed or not, GemLite has nothing for CPUs; each thing is told once.
    assert sum(line == "- GemLite W8A8: it is for GPUs" for line in told) == 1
    assert any(re.match(r"- vLLM W8A16: off the reference by 1", line) for line in told)
    rows = [line for line in lines if " ours" in line]
    assert len(rows) == 6
    assert re.match(r"cpu on cpu .*; copy \d+ GB/s, INT8 \d+\.\d\d TOP/s$", head)
    assert re.split(r"\s{2,}", titles.strip())[1:] == [
        "M",
        "16 bit",
        "W8A8",
        "W8A16",
        "W4A16 g128",
        "W4A16",
    ]
    found = [re.split(r"\s{2,}", row.strip()) for row in rows]
    assert [row[0].split()[0] for row in found] == ["32x64"] * 3 + ["16x128"] * 3
    by_tokens = {row.split()[1]: row for row in rows if "32x64" in row}
    # Groups of 128 do not fit 64 channels; one token has four shares less that one, 2048 has one.
    assert all(" - " in row for row in by_tokens.values())
    assert [by_tokens[m].count("%") for m in ("1", "2", "2048")] == [3, 0, 1]


def doubled(weight: QTensor) -> Callable[[Tensor], Tensor]:
    """A peer that is wrong."""
    return lambda x: 2 * reference_linear(x, weight)


def test_calls_go_over_more_weights_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "last_cache", lambda _: 1000)
    assert [bench.copies(size, "cpu") for size in (1, 300, 1000, 5000)] == [1024, 7, 3, 1]
    made: list[int] = []
    turns = bench.rotating([partial(made.append, i) for i in range(3)])
    for _ in range(4):
        turns()
    assert made == [0, 1, 2, 0, 1, 2, 0]


def test_a_peer_gets_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "last_cache", lambda _: 10_000)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    right = {"right": lambda weight, _: partial(reference_linear, weight=weight)}
    monkeypatch.setattr(peers, "PEERS", right)
    found = bench.measure(8, 128, 2, backend="cpu", device="cpu", dtype=torch.bfloat16)
    assert list(found["ours"]) == ["16 bit", "W8A8", "W8A16", "W4A16 g128", "W4A16"]
    assert list(found["right"]) == ["W8A8", "W8A16", "W4A16 g128", "W4A16"]
    assert all(us > 0 for us in found["right"].values())


def test_a_wrong_kernel_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "check_linear", lambda *_: 0.5)
    monkeypatch.setattr(bench, "last_cache", lambda _: 0)
    form = {"backend": "cpu", "device": "cpu", "dtype": torch.bfloat16}
    with pytest.raises(SystemExit, match=r"W8A8 8x16, 2 tokens: off the reference by 0\.5"):
        bench.measure(8, 16, 2, **form)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "foo"], "backend is 'foo'; wanted one of triton, cpu, reference"),
        (["--shapes", "0x5"], "--shapes 0x5: no shape; wanted NxK, such as 4096x11008"),
        (["--shapes", "64x-64"], "--shapes 64x-64: no shape; wanted NxK, such as 4096x11008"),
        (["--shapes", "64"], "--shapes 64: no shape; wanted NxK, such as 4096x11008"),
        (["--tokens", "0"], "--tokens 0: wanted a whole number, 1 or more"),
        (["--tokens", "-3"], "--tokens -3: wanted a whole number, 1 or more"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(bench, words, monkeypatch) == 2
    assert capsys.readouterr().err == f"compress: {message}\n"


def test_a_mistake_in_tuning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from compress.kernels import tune

    assert ended(tune, ["--shapes", "64x64", "--tokens", "0"], monkeypatch) == 2
    assert capsys.readouterr().err == "compress: --tokens 0: wanted a whole number, 1 or more\n"
    assert ended(tune, ["--help"], monkeypatch) == 0
    assert "compress.kernels.tune --shapes 4096x4096" in capsys.readouterr().out


def ended(command: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The status with which the command ends."""
    monkeypatch.setattr("sys.argv", ["command", *words])
    with pytest.raises(SystemExit) as caught:
        bench.run(command.main)
    return int(caught.value.code or 0)
