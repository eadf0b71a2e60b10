"""Compile the Triton kernels ahead of time, for GPUs that are not there, and look at the result.

`python -m compress.kernels.aot` prints registers, spills, shared memory and tensor-core
instructions of every kernel that the runtime launches, for sm_80, sm_86 and sm_90.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compress.kernels.w8a8 import triton as w8a8
from compress.kernels.wna16 import triton as wna16

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTIONS = ("IMMA", "IGMMA", "HMMA", "HGMMA", "LDGSTS")
# What a block may use of shared memory, in bytes (CUDA C++ Programming Guide, table of technical
# specifications by compute capability).
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}

W8A8_TYPES = {"q_ptr": "*i8", "w_ptr": "*i8", "q_scale_ptr": "*fp32", "w_scale_ptr": "*bf16"}
WNA16_TYPES = {"x_ptr": "*bf16", "w_ptr": "*i32", "scale_ptr": "*bf16"}
ENDS = {"bias_ptr": "*bf16", "y_ptr": "*bf16"}


@dataclass(frozen=True)
class Case:
    """A kernel with the types and constants of one launch; integers without a type are i32."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes, and instructions counted."""

    registers: int
    stack: int
    local: int
    shared: int
    instructions: dict[str, int]

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


def cases() -> Iterator[Case]:
    """Every launch that matters: each tile, each weight format, bf16 in and out."""
    types = {"x_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32"}
    yield Case("quantize", w8a8.quantize_kernel, types, {"BLOCK": 4096}, 8, 3)
    for tile in (w8a8.DECODE, w8a8.SHORT, w8a8.PREFILL):
        name = f"w8a8 {tile.BLOCK_M}x{tile.BLOCK_N}"
        constants = {"HAS_BIAS": True, "EVEN_K": True}
        yield _case(name, w8a8.gemm_kernel, W8A8_TYPES | ENDS, constants, asdict(tile))
    for bits, group in ((4, 32), (4, 64), (4, 128), (4, 0), (8, 0)):
        for planar, wide in ((False, wna16.DECODE), (True, wna16.PREFILL)):
            name = f"w{bits}a16 g{group} {wide.BLOCK_M}x{wide.BLOCK_N}"
            format_ = {"BITS": bits, "GROUP": group, "PLANAR_X": planar, "HAS_BIAS": True}
            yield _case(name, wna16.gemm_kernel, WNA16_TYPES | ENDS, format_, asdict(wide))


def _case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: Mapping[str, int],
    tile: dict[str, int],
) -> Case:
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    return Case(name, kernel, types, {**constants, **tile}, warps, stages)


def resources(case: Case, capability: int) -> Resources:
    """Compile `case` for sm_`capability` and read its resources from the binary."""
    names = case.kernel.arg_names
    signature = {
        name: "constexpr" if name in case.constants else case.types.get(name, "i32")
        for name in names
    }
    # At run time Triton sees that pointers and strides are divisible by 16; here it must be told,
    # or loads are not 128 bits wide. M is any number of tokens, groups any number of scales.
    aligned = [n for n in names if n not in case.constants and n not in ("M", "groups")]
    source = ASTSource(
        case.kernel,
        signature,
        {(names.index(name),): value for name, value in case.constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _output("cuobjdump", "-res-usage", file.name)
        assembly = _output("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {usage}")
    registers, stack, local = map(int, found.groups())
    counts = {i: len(re.findall(rf"\b{i}\b", assembly)) for i in INSTRUCTIONS}
    used = {i: count for i, count in counts.items() if count}
    return Resources(registers, stack, local, compiled.metadata.shared, used)


def _output(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print a line a kernel and GPU."""
    for capability in (80, 86, 90):
        for case in cases():
            r = resources(case, capability)
            instructions = ", ".join(f"{i} {n}" for i, n in r.instructions.items())
            sys.stdout.write(
                f"sm_{capability} {case.name:20} {r.registers:3} registers, "
                f"{'spills' if r.spills else 'no spills'}, {r.shared:6} bytes shared; "
                f"{instructions}\n"
            )


if __name__ == "__main__":
    main()
