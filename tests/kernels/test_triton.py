"""Triton without a GPU: the kernels run in the interpreter, and compile for GPUs that exist.

Both in processes of their own, since Triton reads TRITON_INTERPRET once, when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed on Linux only")

ROOT = Path(__file__).parents[2]

COMPILE = """
import json, sys
from compress.kernels.aot import SHARED_LIMIT, cases, resources
found = []
for capability in (80, 90):
    for case in cases():
        r = resources(case, capability)
        fits = r.shared <= SHARED_LIMIT[capability]
        found.append([case.name, capability, r.registers, r.spills, fits, r.instructions])
json.dump(found, sys.stdout)
"""


def python(*arguments: str, interpret: bool) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_kernels_agree_with_the_reference() -> None:
    file = str(Path(__file__).with_name("triton_parity.py"))
    interpret = not torch.cuda.is_available()
    output = python("-m", "pytest", "-q", "-p", "no:cacheprovider", file, interpret=interpret)
    assert " passed" in output


@pytest.mark.slow
def test_the_kernels_compile_without_spills_onto_tensor_cores() -> None:
    found = json.loads(python("-c", COMPILE, interpret=False))
    assert len(found) == 2 * 14
    for name, capability, registers, spills, fits, instructions in found:
        where = f"{name} on sm_{capability}"
        assert not spills, where
        assert registers <= 255, where
        assert fits, where
        if name == "quantize":
            continue
        # Tiles of 16 rows are too small for the warpgroup instructions of sm_90.
        warpgroup = capability == 90 and " 16x" not in name
        kind = "GMMA" if warpgroup else "MMA"
        wanted = ("I" if name.startswith("w8a8") else "H") + kind
        assert instructions.get(wanted, 0) > 0, f"{where}: {instructions}"
        assert instructions.get("LDGSTS", 0) > 0, f"{where}: loads are not pipelined"
