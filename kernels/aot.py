"""Compile the Triton kernels ahead of time, for GPUs that are not there, and look at the result.

`python -m compress.kernels.aot` prints the table of docs/kernels.md: what every launch that is
shipped takes on sm_80, sm_89, sm_90 and sm_100; `--all` adds what tuning tries.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compress.kernels.quantize import triton as quantize
from compress.kernels.tiles import Gpu, Tile, space
from compress.kernels.w8a8 import triton as w8a8
from compress.kernels.wna16 import triton as wna16
from compress.kernels.wna16.planar import block_words

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITIES = (80, 89, 90, 100)
TOKENS = {"decode": 16, "middle": 64, "prefill": 2048}
FORMATS = ((4, 128), (4, 64), (4, 32), (4, 0), (8, 128), (8, 0))
"""Bits and group size of weight-only launches; 0: a scale a row."""

QUANTIZE = (
    ("quantize", quantize.quantize_kernel, 4096),
    ("quantize", quantize.quantize_kernel, 18944),
    ("quantize after RMSNorm", quantize.rmsnorm_kernel, 8192),
    ("quantize after SwiGLU", quantize.swiglu_kernel, 18944),
)
"""Rows as long as the inputs of linears in a 7B; of a 70B, those after RMSNorm."""

TYPES = {
    "x_ptr": "*bf16",
    "y_ptr": "*bf16",
    "gate_ptr": "*bf16",
    "up_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "bias_ptr": "*bf16",
    "scale_ptr": "*bf16",
    "w_scale_ptr": "*bf16",
    "q_ptr": "*i8",
    "q_scale_ptr": "*fp32",
    "lock_ptr": "*i32",
    "magic_ptr": "*i32",
    "eps": "fp32",
}


@dataclass(frozen=True)
class Case:
    """A launch: a kernel with types and constants; integers without a type are i32."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes, and instructions counted.

    `loop` counts those of the innermost loop that multiplies on tensor cores.
    """

    registers: int
    stack: int
    local: int
    shared: int
    instructions: Counter[str]
    loop: Counter[str]

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


def count(instructions: Counter[str], start: str) -> int:
    """How many instructions have a name that begins with `start`, such as LDGSTS."""
    return sum(n for name, n in instructions.items() if name.startswith(start))


def cases(capability: int, *, tuning: bool = False) -> Iterator[Case]:
    """Every launch that is shipped for sm_`capability`; with `tuning`, every one that is tried."""
    types = TYPES | {"scale_ptr": "*fp32"}
    for name, kernel, k in QUANTIZE:
        launch = quantize.launch(k)
        yield Case(f"{name} {k}", kernel, types, {"BLOCK": launch.pop("BLOCK")}, launch)
    gpu = Gpu("", capability, 0)
    for regime, tokens in TOKENS.items():
        for tile in space("w8a8", tokens, gpu)[: None if tuning else 1]:
            yield _w8a8(_split(tile, regime))
        for bits, group in FORMATS:
            for tile in space(f"w{bits}a16", tokens, gpu)[: None if tuning else 1]:
                yield _wna16(bits, group, _split(tile, regime))


def _split(tile: Tile, regime: str) -> Tile:
    """With the code that adds up parts, where launches of the regime commonly have it."""
    return tile if regime == "prefill" else replace(tile, SPLITS=4)


def _w8a8(tile: Tile) -> Case:
    constants = {"HAS_BIAS": True, "EVEN_K": True, "BLOCK_K": w8a8.BLOCK_K}
    types = TYPES | {"w_ptr": "*i8", "parts_ptr": "*i32"}
    return _case("w8a8", w8a8.gemm_kernel, types, constants, tile)


def _wna16(bits: int, group: int, tile: Tile) -> Case:
    width = block_words(group or None)
    constants = {"BITS": bits, "GROUP": group, "WORDS": width, "EVEN_K": True, "HAS_BIAS": True}
    types = TYPES | {"w_ptr": "*i32", "parts_ptr": "*fp32"}
    name = f"w{bits}a16 {f'g{group}' if group else 'channel'}"
    return _case(name, wna16.gemm_kernel, types, constants, tile)


def _case(
    name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile
) -> Case:
    blocks = {name: n for name, n in tile.arguments().items() if name.isupper()}
    options = {name: n for name, n in tile.arguments().items() if name.islower()}
    return Case(f"{name} {tile.BLOCK_M}x{tile.BLOCK_N}", kernel, types, constants | blocks, options)


def compiled_for(case: Case, target: GPUTarget) -> Any:
    """`case` as Triton compiles it: its `asm` holds ptx and cubin, or amdgcn and hsaco."""
    names = case.kernel.arg_names
    signature = {
        name: "constexpr" if name in case.constants else case.types.get(name, "i32")
        for name in names
    }
    # At run time Triton sees that pointers and strides are divisible by 16; here it must be told,
    # or loads are not 128 bits wide. M is any number of tokens, groups any number of scales.
    unknown = (*case.constants, "M", "groups", "eps")
    source = ASTSource(
        case.kernel,
        signature,
        {(names.index(name),): value for name, value in case.constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in unknown},
    )
    return triton.compile(source, target=target, options=case.options)


def resources(case: Case, capability: int) -> Resources:
    """Compile `case` for sm_`capability` and read its resources from the binary."""
    compiled = compiled_for(case, GPUTarget("cuda", capability, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _output("cuobjdump", "-res-usage", file.name)
        assembly = _output("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {usage}")
    registers, stack, local = map(int, found.groups())
    lines = assembly.splitlines()
    every, loop = _instructions(lines), _instructions(_inner_loop(lines))
    return Resources(registers, stack, local, compiled.metadata.shared, every, loop)


def _output(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _instructions(lines: list[str]) -> Counter[str]:
    """Instructions by name; `/*0ca0*/ @!P0 LDGSTS.E.128 [R1], ...` is an LDGSTS.E.128."""
    pattern = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)")
    return Counter(found[1] for line in lines if (found := pattern.match(line)))


def _inner_loop(lines: list[str]) -> list[str]:
    """The shortest stretch with an MMA between a label and a branch back to it."""
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = i
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in labels:
            body = lines[labels[branch[1]] : i + 1]
            if any("MMA" in inner for inner in body):
                loops.append(body)
    return min(loops, key=len, default=[])


def cell(r: Resources) -> str:
    """Registers, KiB of shared memory, MMAs by name, wide copies of all, instructions in the loop.

    `96, 48, HMMA 32, 32/32, 419`; what no launch should have is said too.
    """
    parts = [str(r.registers), f"{r.shared / 1024:.0f}"]
    for name in ("IMMA", "IGMMA", "HMMA", "HGMMA", "UTCHMMA"):
        if number := count(r.instructions, name):
            parts.append(f"{name} {number}")
    if copies := count(r.instructions, "LDGSTS"):
        parts.append(f"{count(r.instructions, 'LDGSTS.E.BYPASS.128')}/{copies}")
    if r.loop:
        parts.append(str(r.loop.total()))
    faults = ["**spills**"] * r.spills + ["**I2F**"] * (count(r.loop, "I2F") > 0)
    return ", ".join(parts + faults)


def main() -> None:
    """Print a table in Markdown, a row a launch and a column a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="add what tuning tries")
    options = parser.parse_args()
    rows: dict[str, dict[int, str]] = {}
    for capability in CAPABILITIES:
        for case in cases(capability, tuning=options.all):
            how = "".join(f", {name} {n}" for name, n in case.options.items())
            label = case.name + how * options.all
            rows.setdefault(label, {})[capability] = cell(resources(case, capability))
    sys.stdout.write("| launch | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |\n")
    sys.stdout.write("|---" * (1 + len(CAPABILITIES)) + "|\n")
    for name, cells in rows.items():
        columns = (cells.get(capability, "") for capability in CAPABILITIES)
        sys.stdout.write(f"| {name} | " + " | ".join(columns) + " |\n")


if __name__ == "__main__":
    main()
