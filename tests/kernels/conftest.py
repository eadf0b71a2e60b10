"""bfloat16 in Triton's interpreter, which keeps it as uint16 and calculates with those integers.

What the kernels do with it, subtract, multiply matrices and round to it, is put right here: the
first two are exact in float32, and rounding goes to the nearest, as on a GPU.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def bfloat16_in_the_interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _repair(patch)
        yield


def _repair(patch: pytest.MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, subtract, cast = builder.create_dot, builder.create_fsub, builder.cast_impl

    def is_bf16(operand: Any) -> bool:
        return operand.dtype.scalar == tl.bfloat16

    def widened(operand: Any) -> Any:
        bits = operand.data.astype(np.uint32) << 16
        return handle(bits.view(np.float32), tl.float32)

    def narrowed(values: Any) -> Any:
        # Half a unit, less one where the last bit stays even; NaN and infinity do not come up.
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return handle(rounded.astype(np.uint16), tl.bfloat16)

    def repaired_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if is_bf16(a):
            a, b = widened(a), widened(b)
        return dot(self, a, b, *rest)

    def repaired_subtract(self: Any, a: Any, b: Any) -> Any:
        if not is_bf16(a):
            return subtract(self, a, b)
        return narrowed(widened(a).data - widened(b).data)

    def repaired_cast(self: Any, source: Any, wanted: Any) -> Any:
        if source.dtype.scalar == tl.float32 and wanted.scalar == tl.bfloat16:
            return narrowed(source.data)
        return cast(self, source, wanted)

    def constant(self: Any, value: float) -> Any:
        return narrowed([value])

    patch.setattr(builder, "create_dot", repaired_dot)
    patch.setattr(builder, "create_fsub", repaired_subtract)
    patch.setattr(builder, "cast_impl", repaired_cast)
    patch.setattr(builder, "get_bf16", constant, raising=False)
