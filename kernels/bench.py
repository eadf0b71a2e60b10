"""The quantized linears beside a 16-bit linear, on a GPU if there is one, else on CPU.

    python -m compress.kernels.bench [--shapes 4096x4096 14336x4096] [--tokens 1 16 2048]

Each row is one shape (output x input channels) and number of tokens: the median microseconds of a
call, and how many times as fast as 16 bit (on a GPU cuBLAS) it is. One token adds the fraction of
the copy bandwidth that is reached, 2048 and more that of the INT8 peak (of `torch._int_mm`), both
measured first. A kernel that is off its reference by more than the tests allow ends the run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from compress.kernels import w8a8, wna16
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


def random_weight(n: int, k: int, spec: QuantSpec, device: str, dtype: torch.dtype) -> QTensor:
    """A random weight [n, k], rounded to the nearest of the grid that its largest values set."""
    weight = torch.randn((n, k), device=device)
    peaks = weight.reshape(n, spec.groups(k), -1).abs().amax(-1)
    scales = (peaks / spec.qmax).to(dtype)
    return QTensor(quantize(weight, scales, spec), scales, spec)


def bind(weight: QTensor, backend: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The linear of `weight` on `backend`, without bias, for inputs of `dtype`."""
    if weight.spec.activation_bits is not None:
        return w8a8.prepare(weight.ints, weight.scales, None, backend)
    packed = pack_int32(weight.ints, weight.spec.bits)
    if backend == "triton":
        packed = to_planar(packed, weight.spec.bits, weight.spec.group_size)
    return wna16.prepare(
        packed,
        weight.scales,
        None,
        spec=weight.spec,
        in_features=weight.ints.shape[1],
        backend=backend,
        dtype=dtype,
    )


def median_us(
    contenders: Mapping[str, Callable[[], object]], device: str | torch.device
) -> dict[str, float]:
    """The median microseconds of a call.

    On a GPU between two events, the L2 cache cleared before; else over rounds by turns.
    """
    if torch.device(device).type != "cpu":
        from triton.testing import do_bench

        return {name: 1e3 * do_bench(f, return_mode="median") for name, f in contenders.items()}
    calls = {name: max(1, int(ROUND_SECONDS / _seconds(f, 3))) for name, f in contenders.items()}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            rounds[name].append(_seconds(contender, calls[name]))
    return {name: 1e6 * statistics.median(times) for name, times in rounds.items()}


def _seconds(contender: Callable[[], object], calls: int) -> float:
    contender()
    start = time.perf_counter()
    for _ in range(calls):
        contender()
    return (time.perf_counter() - start) / calls


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
    """`4096x11008` as (N, K)."""
    n, k = map(int, text.split("x"))
    return n, k


def specs_for(k: int) -> list[QuantSpec]:
    """The formats that a weight of K input channels can have; groups must divide K."""
    return [spec for spec in SPECS if spec.group_size is None or k % spec.group_size == 0]


def measure(
    n: int, k: int, tokens: int, *, backend: str, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Median microseconds by scheme, and of `16 bit`; ends the run where a kernel is wrong."""
    x = torch.randn((tokens, k), device=device, dtype=dtype)
    dense = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype)
    contenders: dict[str, Callable[[], object]] = {"16 bit": partial(dense, x)}
    for spec in specs_for(k):
        weight = random_weight(n, k, spec, device, dtype)
        linear = bind(weight, backend, dtype)
        error = check_linear(linear, x, weight)
        if error > MAX_RELATIVE_ERROR:
            sys.exit(f"{spec.scheme} {n}x{k}, {tokens} tokens: off the reference by {error:.3g}")
        contenders[spec.scheme] = partial(linear, x)
    return median_us(contenders, device)


def cell(us: float, dense_us: float, share: float | None) -> str:
    """`12.3 1.85x 71%`: microseconds, times as fast as 16 bit, share of the bound that counts."""
    bound = "" if share is None else f" {share:.0%}"
    return f"{us:.1f} {dense_us / us:.2f}x{bound}"


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
    parser.add_argument("--tokens", nargs="+", type=int, default=tokens)
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
    names = ["16 bit", *(spec.scheme for spec in SPECS)]
    sys.stdout.write(f"{'NxK':>12} {'M':>5} " + " ".join(f"{n:>18}" for n in names) + "\n")
    for n, k in options.shapes or CPU_SHAPES:
        for m in options.tokens:
            times = measure(n, k, m, backend=backend, device=device, dtype=DTYPES[options.dtype])
            cells = {"16 bit": f"{times['16 bit']:.1f}"}
            for spec in specs_for(k):
                us, share = times[spec.scheme], None
                if m == 1:
                    share = weight_bytes(n, k, spec) / us * 1e6 / copy
                elif m >= PEAK_TOKENS and spec.activation_bits == 8:
                    share = operations(m, n, k) / us * 1e6 / peak
                cells[spec.scheme] = cell(us, times["16 bit"], share)
            row = " ".join(f"{cells.get(name, '-'):>18}" for name in names)
            sys.stdout.write(f"{f'{n}x{k}':>12} {m:5} {row}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
