"""Bytes of weights, KV cache and activations, and the largest batch and length that fit.

docs/planning.md has the formulas with a worked example.
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from compress import engines
from compress.errors import UserError
from compress.kernels.native import build
from compress.kernels.wna16.cpu import int4_op_group, native_takes
from compress.planning.shape import Shape
from compress.qtensor import QuantSpec
from compress.sizes import shape_bytes, stored_bytes

HALF = 2  # bytes of an activation in 16 bit
HEAP = 3  # bytes that a process on CPU takes for each of activations: the heap keeps what was freed
LOGIT = 4  # bytes of a logit
OVERHEAD = 0.05
"""Share of the card that the driver, the allocator's gaps and the engine keep for themselves."""
LONGEST = 1 << 24
"""Tokens beyond which no length is looked for."""
SCHEMES = (
    QuantSpec(8),
    QuantSpec(8, activation_bits=8),
    QuantSpec(4, 32),
    QuantSpec(4, 64),
    QuantSpec(4, 128),
    QuantSpec(4),
)
"""The mildest first: by what rounding alone costs."""
PARTS = ("embeddings", "attention", "mlp", "norms", "lm_head", "other")


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to, one of PARTS."""
    if "norm" in name or ".ln_" in name:
        return "norms"
    if name.startswith(("lm_head", "embed_out")):
        return "lm_head"
    if "embed" in name or ".wte." in name or ".wpe." in name:
        return "embeddings"
    if "attn" in name or "attention" in name:
        return "attention"
    if "mlp" in name or "feed_forward" in name:
        return "mlp"
    return "other"


def by_part(figures: Mapping[str, int]) -> dict[str, int]:
    """Figures of tensors by name, summed over the parts."""
    sums = dict.fromkeys(PARTS, 0)
    for name, figure in figures.items():
        sums[part_of(name)] += figure
    return sums


@dataclass(frozen=True)
class Weights:
    """A model's weights in one scheme.

    kind: of the linears that are quantized: `16`, W8A8, W8A16 or W4A16. parts: bytes by part; with
    `copies` for what our own runtime on CPU keeps beside the weights. widest: bytes that
    one token takes in the widest moment of a prefill. quantized: how many linears are, with their
    weights and bytes. plain_weights: of the linears in the blocks that stay in 16 bit.
    """

    scheme: str
    kind: str
    parts: Mapping[str, int]
    widest: int
    plain_weights: int
    quantized: int = 0
    quantized_weights: int = 0
    quantized_bytes: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def weights_of(
    shape: Shape, spec: QuantSpec | None, engine: str = "any", *, on_cpu: bool = False
) -> Weights:
    """The weights where all linears that `engine` serves in `spec` are; None: all in 16 bit.

    on_cpu: as our own runtime holds them there. Raises UserError where the engine serves none.
    """
    itemsize = shape.dtype.itemsize
    parts = by_part({name: itemsize * count for name, count in shape.tensors.items()})
    inside = sum(n * k for n, k in shape.linears.values())
    widest = token_bytes(shape.hidden, shape.intermediate) * (HEAP if on_cpu else 1)
    if spec is None:
        return Weights("16 bit", "16", parts, widest, inside)
    chosen = engines.choose(shape.linears, spec, engine, heads=shape.heads, dtype=shape.dtype)
    sizes = [shape.linears[name] for name in chosen.quantize]
    stored = [stored_bytes(size, chosen.spec, itemsize) for size in sizes]
    for name, (n, k), count in zip(chosen.quantize, sizes, stored, strict=True):
        parts[part_of(name)] += count + shape_bytes(chosen.spec) - itemsize * n * k
    if on_cpu:
        parts["copies"] = sum(_copy_bytes(size, chosen.spec) for size in sizes)
    held = sum(n * k for n, k in sizes)
    return Weights(
        scheme=chosen.spec.scheme,
        kind=f"W{spec.bits}A{spec.activation_bits or 16}",
        parts=parts,
        widest=widest,
        plain_weights=inside - held,
        quantized=len(sizes),
        quantized_weights=held,
        quantized_bytes=sum(stored),
    )


def _copy_bytes(size: tuple[int, int], spec: QuantSpec) -> int:
    """What kernels/wna16/cpu.py and kernels/w8a8/cpu.py keep beside a weight [N, K] here."""
    n, k = size
    if spec.activation_bits is not None:
        return 8 * n  # scales in float32, sums of rows in int32
    if native_takes(k, spec) and build.available():
        return 4 * n * spec.groups(k)  # scales in float32
    if spec.bits == 8:
        return n * k + HALF * n if spec.group_size is None and k % 16 == 0 else 0
    group = int4_op_group(n, k, spec)
    return 0 if group is None else n * k // 2 + 2 * HALF * n * k // group  # scales and zeros


def all_schemes(
    shape: Shape, engine: str = "any", *, on_cpu: bool = False
) -> tuple[list[Weights], dict[str, str]]:
    """16 bit and every scheme that can be, and why each of the others cannot.

    A group size that does not divide is lowered as the quantizer lowers it, and listed once.
    """
    found = {"16 bit": weights_of(shape, None, on_cpu=on_cpu)}
    refused = {}
    for spec in SCHEMES:
        try:
            weights = weights_of(shape, spec, engine, on_cpu=on_cpu)
        except UserError as error:
            refused[spec.scheme] = str(error).removeprefix(f"{spec.scheme} ")
            continue
        if weights.scheme != spec.scheme:
            refused[spec.scheme] = f"its groups do not divide this model; see {weights.scheme}"
        found.setdefault(weights.scheme, weights)
    return list(found.values()), refused


def kv_bytes(shape: Shape, kind: str, tokens: float) -> float:
    """The KV cache of one request of `tokens`: layers with a sliding window keep no more than it.

    A layer that keeps all has 2 * KV heads * head size * 2 bytes a token in 16 bit. Windows stay in
    16 bit whatever the `kind`.
    """
    row = 2 * shape.kv_heads * shape.head_size * HALF
    bounded = sum(min(tokens, window) * row for window in shape.windows if window is not None)
    return tokens * shape.kv_per_token[kind] + bounded


def kv_sliding(shape: Shape) -> list[dict[str, int]]:
    """What layers with a sliding window keep beside `kv_per_token`: by window, how many there are,
    and their bytes of each token that is in it.
    """
    row = 2 * shape.kv_heads * shape.head_size * HALF
    counts = Counter(window for window in shape.windows if window is not None)
    return [{"window": w, "layers": n, "bytes": n * row} for w, n in sorted(counts.items())]


def request_bytes(shape: Shape, kind: str, tokens: float) -> float:
    """What one more request of `tokens` takes: its KV cache, and the logits of its next token."""
    return kv_bytes(shape, kind, tokens) + logit_bytes(shape)


def logit_bytes(shape: Shape) -> int:
    """The logits of a request's next token, in float32."""
    return shape.vocabulary * LOGIT


def token_bytes(hidden: int, intermediate: int) -> int:
    """Of one token in the widest moment of a prefill, in 16 bit: the residual and the MLP's input,
    and gate, up and their product.
    """
    return HALF * (2 * hidden + 3 * intermediate)


def needed(
    shape: Shape, weights: Weights, kind: str, batch: int, tokens: int, *, prompts: int = 1
) -> dict[str, float]:
    """Bytes by what they are for, of `batch` requests of `tokens` each, without overhead.

    prompts: how many of them are prefilled in one forward; engines take one. The logits of a step
    are in float32.
    """
    return {
        "weights": weights.total,
        "kv_cache": batch * kv_bytes(shape, kind, tokens),
        "activations": prompts * tokens * weights.widest + batch * logit_bytes(shape),
    }


def largest_batch(shape: Shape, weights: Weights, kind: str, tokens: int, memory: int) -> int:
    """Requests of `tokens` each that fit into `memory` bytes, overhead taken off; 0 where none."""
    room = (1 - OVERHEAD) * memory - sum(needed(shape, weights, kind, 0, tokens).values())
    return max(0, math.floor(room / request_bytes(shape, kind, tokens)))


def largest_length(shape: Shape, weights: Weights, kind: str, batch: int, memory: int) -> int:
    """Tokens of each of `batch` requests that fit, whatever window the model has; 0 where none."""
    room = (1 - OVERHEAD) * memory

    def taken(tokens: int) -> float:
        return sum(needed(shape, weights, kind, batch, tokens).values())

    return max(0, bisect.bisect_right(range(LONGEST), room, key=taken) - 1)


def cache_room(shape: Shape, weights: Weights, memory: int, longest: int) -> float:
    """Bytes left for requests where prompts up to `longest` tokens are prefilled one at a time."""
    return (1 - OVERHEAD) * memory - sum(needed(shape, weights, "16", 0, longest).values())
