"""The CPU's kernels in C++, compiled for this machine when they are first wanted, and kept.

A binary belongs to one text of the kernels, one torch, one compiler and one kind of CPU; it lies in
$COMPRESS_CACHE, else in ~/.cache/compress. Where there is no compiler, torch's own products serve.
"""

import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from compress.kernels.tuned import cache_folder
from compress.log import logger

HERE = Path(__file__).parent
TEXTS = (
    "native/ops.cpp",
    "native/amx.h",
    "native/rows.h",
    "dense/amx.h",
    "dense/cpu.h",
    "token/cpu.h",
    "w8a8/amx.h",
    "w8a8/cpu.h",
    "wna16/amx.h",
    "wna16/cpu.h",
    "wna16/pairs.h",
)
COMPILER = "CXX"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
X86_FLAGS = ("-mprefer-vector-width=512",)
ELF = struct.Struct("<4s36xQ10xHH2x")
"""The header of a 64-bit ELF file: magic; where its table of sections is, their size and number."""


@functools.cache
def available() -> bool:
    """Whether `torch.ops.compress_cpu` is there to be called, which may take building it.

    Says in one line why it is not, as a warning, which Python shows where no log was begun.
    """
    program = compiler()
    if program is None:
        logger.warning(
            f"  no C++ compiler, {_asked()!r}: a token on CPU takes torch's products, which are "
            f"slower; install g++, or name one in {COMPILER}"
        )
        return False
    try:
        binary = binary_of(program)
        if not is_whole(binary):
            _build(program, binary)
        torch.ops.load_library(binary)
    except (OSError, RuntimeError) as error:  # no home, no room, a folder that runs nothing
        logger.warning(
            f"  {shlex.join(program)} does not build the CPU's kernels, torch's serve: {error}"
        )
        return False
    _register_fakes()
    return True


def compiler() -> list[str] | None:
    """The words that call the C++ compiler: $CXX, such as `ccache g++`, or g++; None: not found."""
    try:
        words = shlex.split(_asked())
    except ValueError:  # a quote that does not end: no program is called so
        return None
    program = shutil.which(words[0]) if words else None
    return None if program is None else [program, *words[1:]]


def _asked() -> str:
    return os.environ.get(COMPILER) or "g++"


def flags() -> tuple[str, ...]:
    """Those of this kind of machine."""
    return FLAGS + X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else FLAGS


def binary_of(program: list[str]) -> Path:
    """Where the kernels built by `program` for this machine lie.

    Raises OSError where `program` does not run, RuntimeError where there is no home folder.
    """
    version = subprocess.run([*program, "--version"], capture_output=True, check=False).stdout
    texts = [(HERE.parent / name).read_bytes() for name in TEXTS]
    parts = [
        *texts,
        version,
        shlex.join([*program[1:], *flags()]).encode(),
        _cpu().encode(),
        torch.__version__.encode(),
    ]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_folder() / "native" / f"{key}.so"


def is_whole(binary: Path) -> bool:
    """Whether the file is there with all that its ELF header says: to load one that a full disk or
    a bad copy cut short can end the process by SIGBUS. The table of sections is the last of it.
    """
    if not binary.exists() or sys.platform != "linux":
        return binary.exists()
    with binary.open("rb") as file:
        header = file.read(ELF.size)
    if len(header) < ELF.size:
        return False
    magic, sections_at, section_bytes, sections = ELF.unpack(header)
    return magic == b"\x7fELF" and binary.stat().st_size >= sections_at + sections * section_bytes


def has(instructions: str) -> bool:
    """Whether Linux lists these `instructions`, such as amx_int8, of this CPU."""
    return instructions in _cpu().split()


@functools.cache
def has_amx() -> bool:
    """Whether the products of amx.h are there, which may take building them."""
    return has("amx_bf16") and available() and bool(torch.ops.compress_cpu.amx())


@functools.cache
def _cpu() -> str:
    """What -march=native goes by: the instructions that Linux lists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(program: list[str], binary: Path) -> None:
    """Build `binary`, whole or not at all. Raises OSError or RuntimeError, one line that says why.

    Processes that build at once, on whatever machine, each do so in a folder of their own.
    """
    root = Path(torch.__file__).parent
    start = time.perf_counter()
    binary.parent.mkdir(parents=True, exist_ok=True)
    logger.info("  building the CPU's kernels, once for this machine")
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        aside = Path(folder) / binary.name
        command = [*program, *flags(), str(HERE / "ops.cpp"), "-o", str(aside)]
        command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise RuntimeError(next((line for line in lines if "error" in line), lines[0]))
        aside.replace(binary)
    logger.info(f"  built the CPU's kernels in {time.perf_counter() - start:.0f} s: {binary}")


def _register_fakes() -> None:
    def product(x: Tensor, weights: list[Tensor], *_: object) -> Tensor:
        return x.new_empty((x.shape[0], sum(len(weight) for weight in weights)))

    for name in ("dense", "dense_amx", "w8a8", "w8a8_amx", "wna16", "w4a16_amx"):
        torch.library.register_fake(f"compress_cpu::{name}", product)

    @torch.library.register_fake("compress_cpu::quantize")
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)

    @torch.library.register_fake("compress_cpu::rescale")
    def _(sums: Tensor, scales: Tensor, token_scales: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(sums, dtype=dtype)

    @torch.library.register_fake("compress_cpu::dequantize")
    def _(words: Tensor, scales: Tensor, bits: int) -> Tensor:
        n, count = words.shape
        return scales.new_empty((n, count * 32 // bits), dtype=torch.bfloat16)

    @torch.library.register_fake("compress_cpu::rmsnorm")
    def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("compress_cpu::swiglu")
    def _(gate_up: Tensor) -> Tensor:
        return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))

    @torch.library.register_fake("compress_cpu::attend")
    def _(qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, *_: object) -> Tensor:
        return qkv.new_empty((1, qkv.shape[1] - 2 * keys.shape[0] * keys.shape[2]))
