"""The quantized linears beside a bf16 linear, on a GPU if there is one, else on CPU.

    python -m compress.kernels.bench [--shapes 4096x4096 576x1536] [--tokens 1 16 128]

Each row is one shape (output x input channels) and number of tokens; the contenders take turns, and
the median of the rounds is printed, in microseconds. A kernel that is off its reference by more
than the tests allow ends the run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from compress.kernels import w8a8, wna16
from compress.kernels.backend import pick_backend
from compress.kernels.check import MAX_RELATIVE_ERROR, check_linear
from compress.kernels.wna16.planar import to_planar
from compress.qtensor import QTensor, QuantSpec, pack_int32, quantize

SPECS = (QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 64), QuantSpec(4))
ROUNDS = 15
ROUND_SECONDS = 0.01


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


def microseconds(contenders: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> dict[str, float]:
    """The median time of a call, over rounds in which the contenders take turns."""
    calls = {name: max(1, int(ROUND_SECONDS / _seconds(f, x, 3))) for name, f in contenders.items()}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            rounds[name].append(_seconds(contender, x, calls[name]))
    return {name: 1e6 * statistics.median(times) for name, times in rounds.items()}


def _seconds(contender: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
    contender(x)
    _wait(x)
    start = time.perf_counter()
    for _ in range(calls):
        contender(x)
    _wait(x)
    return (time.perf_counter() - start) / calls


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


@torch.inference_mode()
def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["1536x576", "576x1536", "2048x2048"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--backend", default=None)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = pick_backend(device, options.backend)
    dtype = torch.bfloat16
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    names = ["bf16", *(spec.scheme for spec in SPECS)]
    sys.stdout.write(f"{backend} on {device} ({name}), torch {torch.__version__}; microseconds\n")
    sys.stdout.write(f"{'NxK':>12} {'M':>5} " + " ".join(f"{n:>10}" for n in names) + "\n")
    for shape in options.shapes:
        n, k = map(int, shape.split("x"))
        weights = [random_weight(n, k, spec, device, dtype) for spec in SPECS]
        contenders: dict[str, Callable[[Tensor], Tensor]] = {}
        contenders["bf16"] = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype)
        contenders |= {w.spec.scheme: bind(w, backend, dtype) for w in weights}
        for tokens in options.tokens:
            x = torch.randn((tokens, k), device=device, dtype=dtype)
            for weight in weights:
                error = check_linear(contenders[weight.spec.scheme], x, weight)
                if error > MAX_RELATIVE_ERROR:
                    sys.exit(f"{weight.spec.scheme} {shape}, {tokens} tokens: error {error:.3g}")
            times = microseconds(contenders, x)
            row = " ".join(f"{times[n]:10.1f}" for n in names)
            sys.stdout.write(f"{shape:>12} {tokens:5} {row}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
