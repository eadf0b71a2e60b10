"""Faults planted into the text of the CPU's kernels are found by their tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compress.kernels.native import build

HERE = Path(__file__).parent
FAULTS = (
    (
        "w8a8/cpu.h",
        "acc - weight.sums[row]",
        "acc - weight.sums[row] + 1",
        r"test_w8a8_has_the_bits\S*own",
    ),
    ("dense/cpu.h", "j = whole; j < k;", "j = whole; j < k - 1;", "test_dense"),
    ("wna16/cpu.h", "integers(stored, 128)", "integers(stored, 127)", r"test_wna16\[own.*bits=8"),
    ("wna16/cpu.h", "(*stored & 15) - 8", "(*stored & 15) - 7", "test_the_dequantized_weight"),
    ("w8a8/cpu.h", "scales + i) * scale", "scales + i) * 2 * scale", "test_many_tokens_have"),
    # INT4 goes by one of the two, as the machine has it.
    ("wna16/cpu.h", "integers(stored >> 4, 8)", "integers(stored >> 4, 7)", "test_int4_where"),
    ("wna16/pairs.h", "-136 * total", "-135 * total", "test_int4_where"),
    ("token/cpu.h", "squares / k + eps", "squares / (k + 1) + eps", "test_rmsnorm"),
    ("native/rows.h", "bits + 0x7FFF + even", "bits + 0x7FFF", r"test_w8a8_has_the_bits\S*own"),
    ("native/rows.h", "first += weight.rows", "first += weight.rows - 1", "test_linears_of_one"),
    ("token/cpu.h", "1.f + exp(-x)", "1.001f + exp(-x)", "test_swiglu"),
    ("token/cpu.h", "i < half ? -float", "i < half ? float", "test_attention"),
)
"""File, what stands there, the fault in its place, and the test that must fail."""
OF_AMX = (
    ("native/amx.h", "std::min(LINE, bytes - from)", "std::min(LINE, bytes / 2)", "test_amx"),
    ("native/amx.h", "put(right, y + second", "put(right, y + first", "test_by_amx"),
    ("native/amx.h", "load_shapes(before_)", "", "test_amx_leaves_the_tiles"),
    ("w8a8/amx.h", "* tokens;", "* tokens * 2.f;", "test_w8a8_by_amx"),
    ("wna16/amx.h", "(stored, 4 * i)", "(stored, 4 * i + 1)", "test_w4a16_by_amx"),
)
"""The same where the CPU has AMX."""
RUN = """
import sys
from pathlib import Path
import pytest
from compress.kernels.native import build
build.HERE = Path(sys.argv[1])
assert build.available()
sys.exit(pytest.main(sys.argv[2:]))
"""
CHOSEN = (
    "bits_of or many_tokens or dense or amx or wna16 or dequantized_weight or int4_where or "
    "one_input or rmsnorm or swiglu or attention"
)


@pytest.mark.slow
def test_each_fault_is_found(tmp_path: Path) -> None:
    if not build.available():
        pytest.skip("no C++ compiler here")
    faults = FAULTS + OF_AMX if build.has_amx() else FAULTS
    for name in build.TEXTS:
        text = (build.HERE.parent / name).read_text()
        for file, old, new, _ in faults:
            if file == name:
                assert old in text, f"no {old!r} in {file} to break"
                text = text.replace(old, new)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files = [str(HERE / name) for name in ("test_cpu.py", "test_token.py")]
    options = ["-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow", "-k", CHOSEN]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "native"), *options, *files],
        env=os.environ | {"COMPRESS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^FAILED \S*::(.*)$", done.stdout, re.MULTILINE)
    for *_, test in faults:
        assert any(re.match(test, name) for name in failed), f"{test} passed\n{done.stdout[-2000:]}"
    # What has no fault passes: by torch's products, and the reference beside.
    assert not any("aten" in name for name in failed), failed
