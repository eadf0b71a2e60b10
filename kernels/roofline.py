"""The least time that a linear can take on a GPU, by its bytes and operations.

`python -m compress.kernels.roofline` prints the tables of docs/kernels.md, in Markdown.
"""

import sys
from dataclasses import dataclass

from compress.qtensor import QuantSpec


@dataclass(frozen=True)
class Peak:
    """What the maker publishes: bytes a second, dense 16-bit and INT8 operations a second."""

    name: str
    memory: float
    half: float
    int8: float
    source: str


PEAKS = (
    Peak("A100", 2.039e12, 312e12, 624e12, "NVIDIA A100 datasheet, 80 GB SXM"),
    Peak("H100", 3.35e12, 989.4e12, 1978.9e12, "NVIDIA H100 datasheet, SXM"),
    Peak("H200", 4.8e12, 989.4e12, 1978.9e12, "NVIDIA H200 datasheet, SXM"),
    Peak(
        "RTX 4090",
        1.008e12,
        165.2e12,
        660.6e12,
        "NVIDIA Ada GPU architecture whitepaper, appendix A, accumulating in 32 bit",
    ),
)

SHAPES = {
    "Llama-7B": ((4096, 4096), (11008, 4096), (4096, 11008)),
    "Llama-3-8B": ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    "Qwen2.5-7B": ((512, 3584), (3584, 3584), (18944, 3584), (3584, 18944)),
}
"""(N, K) of the linears that are quantized: V where it is smaller than O, O, gate or up, down."""

SPECS = (None, QuantSpec(8, activation_bits=8), QuantSpec(4, 128))
"""None: bfloat16."""
TOKENS = (1, 2048)


def weight_bytes(n: int, k: int, spec: QuantSpec | None) -> int:
    """Bytes of a weight [n, k] with its scales of 16 bit."""
    if spec is None:
        return 2 * n * k
    return n * k * spec.bits // 8 + 2 * n * spec.groups(k)


def launch_bytes(m: int, n: int, k: int, spec: QuantSpec | None) -> int:
    """Bytes that must be moved once: weight, scales, activations in, output.

    W8A8 reads its activations as INT8 with a float32 scale a token; quantizing them is another
    launch. Outputs are of 16 bit.
    """
    int8 = spec is not None and spec.activation_bits == 8
    inputs = m * (k + 4) if int8 else 2 * m * k
    return weight_bytes(n, k, spec) + inputs + 2 * m * n


def operations(m: int, n: int, k: int) -> int:
    """Multiplications and additions."""
    return 2 * m * n * k


def floor_us(peak: Peak, m: int, n: int, k: int, spec: QuantSpec | None) -> float:
    """The least microseconds of a launch: by memory or by arithmetic, whichever takes longer."""
    int8 = spec is not None and spec.activation_bits == 8
    arithmetic = operations(m, n, k) / (peak.int8 if int8 else peak.half)
    return 1e6 * max(launch_bytes(m, n, k, spec) / peak.memory, arithmetic)


def main() -> None:
    """Print the sources and a table for each number of tokens."""
    for peak in PEAKS:
        sys.stdout.write(
            f"- {peak.name}: {peak.memory / 1e9:.0f} GB/s, {peak.half / 1e12:.0f} TFLOP/s (bf16), "
            f"{peak.int8 / 1e12:.0f} TOP/s (INT8): {peak.source}\n"
        )
    names = [spec.scheme if spec else "bf16" for spec in SPECS]
    for m in TOKENS:
        sys.stdout.write(f"\nM = {m}: {', '.join(names)}\n\n")
        titles = ["model", "N × K", "GOP", "MB", *(f"{peak.name}, µs" for peak in PEAKS)]
        sys.stdout.write("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|\n")
        for model, shapes in SHAPES.items():
            for n, k in shapes:
                megabytes = [f"{launch_bytes(m, n, k, spec) / 1e6:.1f}" for spec in SPECS]
                cells = [model, f"{n} × {k}", f"{operations(m, n, k) / 1e9:.2f}"]
                cells.append(", ".join(megabytes))
                for peak in PEAKS:
                    floors = (floor_us(peak, m, n, k, spec) for spec in SPECS)
                    cells.append(", ".join(f"{floor:.1f}" for floor in floors))
                sys.stdout.write("| " + " | ".join(cells) + " |\n")


if __name__ == "__main__":
    main()
