"""The quantized linears beside a 16-bit linear, on a GPU if there is one, else on CPU.

    python -m compress.kernels.bench [--shapes 4096x4096 14336x4096] [--tokens 1 16 2048]

Each row is one shape (output x input channels) and number of tokens: the median microseconds of a
call, and how many times as fast as 16 bit (on a GPU cuBLAS) it is. One token adds the fraction of
the copy bandwidth that is reached, 2048 and more that of the INT8 peak (of `torch._int_mm`), both
measured first. A kernel that is off its reference by more than the tests allow ends the run.

Calls go over copies of the weight, twice what the last cache holds, so that each is read from
memory as in a model. On a GPU they are replayed from a CUDA graph; on CPU seconds are the clock's,
or with one thread (OMP_NUM_THREADS=1) the process's, as a shared core tells no others. Rows below
ours are GemLite's, torchao's and vLLM's where these are installed.
"""

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UserError
from compress.kernels import peers, w8a8, wna16
from compress.kernels.backend import pick_backend
from compress.kernels.check import MAX_RELATIVE_ERROR, check_linear
from compress.kernels.roofline import SHAPES, operations, weight_bytes
from compress.kernels.wna16.planar import to_planar
from compress.qtensor import QTensor, QuantSpec, pack_int32, quantize

SPECS = (QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 128), QuantSpec(4))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS = 15
ROUND_SECONDS = 0.01
PEAK_TOKENS = 2048
GPU_SHAPES = sorted({shape for shapes in SHAPES.values() for shape in shapes})
CPU_SHAPES = [(1536, 576), (576, 1536), (2048, 2048)]
DENSE, OURS = "16 bit", "ours"
MOST_COPIES = 1024
OTHER_PRODUCT = 0.1
"""Relative error from which a peer has multiplied something else; it may round the weight anew."""

Call = Callable[[], object]


def random_weight(n: int, k: int, spec: QuantSpec, device: str, dtype: torch.dtype) -> QTensor:
    """A random weight [n, k], rounded to the nearest of the grid that its largest values set."""
    weight = torch.randn((n, k), device=device)
    peaks = weight.reshape(n, spec.groups(k), -1).abs().amax(-1)
    scales = (peaks / spec.qmax).to(dtype)
    return QTensor(quantize(weight, scales, spec), scales, spec)


def bind(
    weight: QTensor, backend: str, dtype: torch.dtype, bias: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """The linear of `weight` on `backend` for inputs of `dtype`."""
    if weight.spec.activation_bits is not None:
        return w8a8.prepare(weight.ints, weight.scales, bias, backend)
    packed = pack_int32(weight.ints, weight.spec.bits)
    if backend == "triton":
        packed = to_planar(packed, weight.spec.bits, weight.spec.group_size)
    return wna16.prepare(
        packed,
        weight.scales,
        bias,
        spec=weight.spec,
        in_features=weight.ints.shape[1],
        backend=backend,
        dtype=dtype,
    )


def median_us(contenders: Mapping[str, Call], device: str | torch.device) -> dict[str, float]:
    """The median microseconds of a call: of many in a CUDA graph, or of rounds by turns on CPU."""
    kind = torch.device(device).type
    if kind != "cpu":
        from triton import testing

        bench = testing.do_bench_cudagraph if kind == "cuda" else testing.do_bench
        return {name: 1e3 * bench(call, return_mode="median") for name, call in contenders.items()}
    calls = {name: max(1, int(ROUND_SECONDS / _seconds(f, 3))) for name, f in contenders.items()}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            rounds[name].append(_seconds(contender, calls[name]))
    return {name: 1e6 * statistics.median(times) for name, times in rounds.items()}


def _seconds(contender: Call, calls: int) -> float:
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    for _ in range(calls):
        contender()
    return (now() - start) / calls


def rotating(calls: Sequence[Call]) -> Call:
    """A call of one after the other; each is made once, as the first may compile or tune."""
    for call in calls:
        call()
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def copies(size: int, device: str | torch.device) -> int:
    """How many weights of `size` bytes are twice what the last cache of `device` holds."""
    return min(MOST_COPIES, 2 * last_cache(torch.device(device)) // size + 1)


def last_cache(device: torch.device) -> int:
    """Bytes of the L2 of a GPU, of the largest cache that Linux tells of on CPU; else 64 MiB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(file.read_text().strip().removesuffix("K")) * 1024 for file in files]
    return max(sizes, default=64 * 2**20)


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.empty(2**30 if device == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (us,) = median_us({"": lambda: target.copy_(source)}, device).values()
    return 2 * source.nbytes / us * 1e6


def int8_peak(device: str) -> float:
    """INT8 operations a second of a large square product by `torch._int_mm`."""
    side = 8192 if device == "cuda" else 1024
    a, b = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device) for _ in "ab")
    (us,) = median_us({"": lambda: torch._int_mm(a, b.t())}, device).values()
    return operations(side, side, side) / us * 1e6


def shape_of(text: str) -> tuple[int, int]:
    """`4096x11008` as (N, K); raises UserError for what is no shape."""
    try:
        n, k = map(int, text.split("x"))
    except ValueError:
        n = k = 0
    if min(n, k) < 1:
        raise UserError(f"--shapes {text}: no shape; wanted NxK, such as 4096x11008")
    return n, k


def tokens_of(text: str) -> int:
    """A number of tokens; raises UserError for what is none."""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--tokens {text}: wanted a whole number, 1 or more")
    return int(text)


def specs_for(k: int) -> list[QuantSpec]:
    """The formats that a weight of K input channels can have; groups must divide K."""
    return [spec for spec in SPECS if spec.group_size is None or k % spec.group_size == 0]


def measure(
    n: int, k: int, tokens: int, *, backend: str, device: str, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Median microseconds by maker and scheme, of `16 bit` too; a wrong kernel ends the run."""
    x = torch.randn((tokens, k), device=device, dtype=dtype)
    dense = torch.randn((n, k), device=device, dtype=dtype)
    number = copies(dense.nbytes, device)
    contenders = {
        (OURS, DENSE): rotating(
            [functools.partial(F.linear, x, dense.clone()) for _ in range(number)]
        )
    }
    for spec in specs_for(k):
        weight = random_weight(n, k, spec, device, dtype)
        number = copies(weight_bytes(n, k, spec), device)
        linears = [bind(copy_of(weight), backend, dtype) for _ in range(number)]
        error = check_linear(linears[0], x, weight)
        if error > MAX_RELATIVE_ERROR:
            sys.exit(f"{spec.scheme} {n}x{k}, {tokens} tokens: off the reference by {error:.3g}")
        contenders[OURS, spec.scheme] = rotating(
            [functools.partial(linear, x) for linear in linears]
        )
        for name in peers.PEERS:
            theirs = _peers(name, weight, x, number)
            if theirs:
                contenders[name, spec.scheme] = theirs
    times = median_us({"/".join(key): call for key, call in contenders.items()}, device)
    found: dict[str, dict[str, float]] = {}
    for maker, scheme in contenders:
        found.setdefault(maker, {})[scheme] = times[f"{maker}/{scheme}"]
    return found


def copy_of(weight: QTensor) -> QTensor:
    """The same integers and scales elsewhere in memory."""
    return QTensor(weight.ints.clone(), weight.scales.clone(), weight.spec)


def _peers(name: str, weight: QTensor, x: Tensor, number: int) -> Call | None:
    """The peer's linear over `number` copies; None, and once a line that says why, without it."""
    make, why = peers.PEERS[name], ""
    try:
        linears = [make(copy_of(weight), x.dtype) for _ in range(number)]
        error = check_linear(linears[0], x, weight)
        if error < OTHER_PRODUCT:
            return rotating([functools.partial(linear, x) for linear in linears])
        why = f"off the reference by {error:.3g}"
    except ImportError as missing:
        return _told(f"{name}: {missing}")
    except peers.Unsupported as error:
        why = str(error)
    except Exception as error:  # another version of it, or a GPU that it does not know
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return _told(f"{name} {weight.spec.scheme}: {why}")


@functools.cache
def _told(line: str) -> None:
    sys.stdout.write(f"- {line}\n")


def share(
    us: float, m: int, n: int, k: int, spec: QuantSpec, *, copy: float, peak: float
) -> float | None:
    """Of the copy bandwidth at one token, of the INT8 peak for W8A8 of many; None between."""
    if m == 1:
        return weight_bytes(n, k, spec) / us * 1e6 / copy
    if m >= PEAK_TOKENS and spec.activation_bits == 8:
        return operations(m, n, k) / us * 1e6 / peak
    return None


def cell(us: float, dense_us: float, of_bound: float | None) -> str:
    """`12.3 1.85x 71%`: microseconds, times as fast as 16 bit, share of the bound that counts."""
    bound = "" if of_bound is None else f" {of_bound:.0%}"
    return f"{us:.1f} {dense_us / us:.2f}x{bound}"


def run(main: Callable[[], None]) -> None:
    """`main`; a user's mistake is one line on stderr and status 2."""
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"compress: {error}\n")
        sys.exit(2)


@torch.inference_mode()
def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = device == "cuda"
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=GPU_SHAPES if gpu else None)
    tokens = [1, 4, 16, 64, 256, 1024, 2048, 4096] if gpu else [1, 16, 128]
    parser.add_argument("--tokens", nargs="+", type=tokens_of, default=tokens)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--backend", default=None)
    options = parser.parse_args()
    backend = pick_backend(device, options.backend)
    where = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} threads"
    copy, peak = copy_bandwidth(device), int8_peak(device)
    sys.stdout.write(
        f"{backend} on {device} ({where}), torch {torch.__version__}, {options.dtype}; copy "
        f"{copy / 1e9:.0f} GB/s, INT8 {peak / 1e12:.2f} TOP/s\n"
        "microseconds, times as fast as 16 bit, and at 1 token the share of the copy bandwidth, "
        f"from {PEAK_TOKENS} on W8A8's of the INT8 peak\n"
    )
    names = [DENSE, *(spec.scheme for spec in SPECS)]
    sys.stdout.write(f"{'NxK':>12} {'M':>5} {'':>8}" + " ".join(f"{n:>18}" for n in names) + "\n")
    for n, k in options.shapes or CPU_SHAPES:
        for m in options.tokens:
            found = measure(n, k, m, backend=backend, device=device, dtype=DTYPES[options.dtype])
            for maker, times in found.items():
                cells = {DENSE: f"{times[DENSE]:.1f}"} if DENSE in times else {}
                for spec in specs_for(k):
                    if us := times.get(spec.scheme):
                        bound = share(us, m, n, k, spec, copy=copy, peak=peak)
                        cells[spec.scheme] = cell(us, found[OURS][DENSE], bound)
                row = " ".join(f"{cells.get(name, '-'):>18}" for name in names)
                sys.stdout.write(f"{f'{n}x{k}':>12} {m:5} {maker:>8}{row}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    run(main)
