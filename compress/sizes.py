"""Bytes of a quantized weight, and of the tensors in a model's folder."""

import math
from pathlib import Path

from compress.qtensor import QuantSpec
from compress.tensors import TensorFiles

SHAPE_BYTES = 16
"""Of the `weight_shape`, two int64, that is stored beside a packed weight."""


def stored_bytes(shape: tuple[int, int], spec: QuantSpec, itemsize: int = 2) -> int:
    """Bytes of the integers and scales of a quantized weight [N, K]; a scale takes `itemsize`."""
    n, k = shape
    packed = spec.activation_bits is None  # whole int32 words
    ints = 4 * n * -(-k * spec.bits // 32) if packed else n * k
    return ints + itemsize * n * spec.groups(k)


def saved_bytes(shape: tuple[int, int], spec: QuantSpec) -> int:
    """Bytes that quantizing a 16-bit weight [N, K] saves; its scales take 2 bytes each."""
    n, k = shape
    return 2 * n * k - stored_bytes(shape, spec) - shape_bytes(spec)


def shape_bytes(spec: QuantSpec) -> int:
    """Bytes of the shape that is stored beside a weight of this scheme, where that is packed."""
    return SHAPE_BYTES if spec.activation_bits is None else 0


def tensor_elements(folder: Path) -> dict[str, int]:
    """Weights of each tensor by name, from the headers."""
    return {name: math.prod(shape) for name, (shape, _) in TensorFiles(folder).shapes().items()}


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor by name, in the dtype that it is stored in."""
    shapes = TensorFiles(folder).shapes()
    return {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
