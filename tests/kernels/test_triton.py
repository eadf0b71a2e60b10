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
from compress.kernels import aot
capability = int(sys.argv[1])
found = [[case.name, vars(aot.resources(case, capability))] for case in aot.cases(capability)]
json.dump(found, sys.stdout)
"""

# What a block may use of shared memory, in bytes (CUDA C++ Programming Guide, table of technical
# specifications by compute capability).
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Copies of 16 bytes that a thread makes for the words of a step: 32 words of 4 bytes a channel.
WEIGHT_COPIES = {"16x64": 4, "64x64": 4, "64x128": 4}

# AMD is not excluded: what is its own of a decode launch of each kind.
ELSEWHERE = """
from triton.backends.compiler import GPUTarget
from compress.kernels import aot
for case in aot.cases(0):
    if case.name in ("w8a8 16x64", "w4a16 g128 16x64"):
        print(aot.compiled_for(case, GPUTarget("hip", "gfx942", 64)).asm["amdgcn"])
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
@pytest.mark.parametrize("what", ["parity", "compiled", "faults", "generation"])
def test_in_the_interpreter(what: str, request: pytest.FixtureRequest) -> None:
    if what == "generation":
        request.getfixturevalue("stories260k")  # without it there is nothing to run
    file = str(Path(__file__).with_name(f"triton_{what}.py"))
    interpret = not torch.cuda.is_available()
    output = python("-m", "pytest", "-q", "-p", "no:cacheprovider", file, interpret=interpret)
    assert " passed" in output
    assert "skipped" not in output


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_what_is_compiled_ahead_of_time(capability: int) -> None:
    found = json.loads(python("-c", COMPILE, str(capability), interpret=False))
    assert len(found) == 25
    for name, r in found:
        where = f"{name} on sm_{capability}: {r}"
        assert r["stack"] == r["local"] == 0, where
        assert r["registers"] <= 255, where
        assert r["shared"] <= SHARED_LIMIT[capability], where
        if name.startswith("quantize"):
            continue
        assert total(r["loop"], multiplication(name, capability)) > 0, where
        # Integers become numbers of 16 bit by their bits alone, and wait for the epilogue in W8A8.
        assert total(r["loop"], "I2F") == 0, where
        wide, copies = total(r["loop"], "LDGSTS.E.BYPASS.128"), total(r["loop"], "LDGSTS")
        if name.startswith("w8a8"):
            assert wide == copies > 0, where
        else:
            # Of the weight every copy is 128 bits wide; of few tokens there is less to copy.
            assert wide >= WEIGHT_COPIES[name.split()[-1]] // (2 if " g32 " in name else 1), where
            # Else only scales are read, one a row; on sm_100 what is taken for the loop goes on to
            # where the parts of K are added up.
            others = [n for n in r["loop"] if n.startswith("LDG") and not n.startswith("LDGSTS")]
            parts = ["LDG.E.128.STRONG.GPU"] if capability == 100 else []
            assert all(n in ("LDG.E.U16", "LDGDEPBAR", *parts) for n in others), where
        if " 16x" in name:
            assert r["registers"] <= 128, where


@pytest.mark.slow
def test_other_gpus_are_not_excluded() -> None:
    assembly = python("-c", ELSEWHERE, interpret=False)
    assert "v_mfma_i32" in assembly
    assert "v_mfma_f32" in assembly


def multiplication(name: str, capability: int) -> str:
    """The instruction of the tensor cores that a launch should have."""
    if name.startswith("w8a8"):
        # Tiles of 16 tokens are too small for warpgroups; sm_100's INT8 is IMMA too.
        return "IGMMA" if capability == 90 and not name.startswith("w8a8 16x") else "IMMA"
    return {90: "HGMMA", 100: "UTCHMMA"}.get(capability, "HMMA")


def total(instructions: dict[str, int], start: str) -> int:
    return sum(n for name, n in instructions.items() if name.startswith(start))
