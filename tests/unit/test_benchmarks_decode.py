"""The benchmark of decoding, on a tiny model."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from compress.qtensor import QuantSpec
from tests.unit.test_runtime import quantized

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, no package
decode = import_module("decode")


def test_all_are_asked_and_compared(
    stories260k: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantized(stories260k, tmp_path / "w4", QuantSpec(4, 4))
    out = tmp_path / "out.json"
    command = f"decode --original {stories260k} --checkpoint {tmp_path / 'w4'} --rounds 1"
    monkeypatch.setattr(sys, "argv", f"{command} --prompt 5 --new 4 --out {out}".split())
    decode.main()
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == [decode.BASE, "ours bf16", "ours W4A16 g4"]
    assert rows[decode.BASE]["decode_ratio"] == rows[decode.BASE]["prefill_ratio"] == 1
    for row in rows.values():
        assert row["decode_ms"] > 0
        assert row["prefill_ms"] > 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + len(rows)


def test_a_ratio_is_that_of_rounds() -> None:
    seconds = {decode.BASE: [2.0, 9.0, 4.0], "ours": [1.0, 3.0, 4.0]}
    assert decode.ratio(seconds, "ours") == 2
