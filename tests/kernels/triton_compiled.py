"""The Triton kernels as torch.compile sees them: operators with fakes; run by test_triton.py.

Without a GPU what is compiled runs in Triton's interpreter.
"""

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compress.kernels.bench import bind, random_weight
from compress.kernels.quantize import triton as quantize
from compress.kernels.splits import new_locks
from compress.kernels.w8a8 import triton as w8a8_triton
from compress.kernels.wna16 import triton as wna16_triton
from compress.kernels.wna16.planar import to_planar
from compress.qtensor import QuantSpec, pack_int32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16 = torch.float16
W8A8 = QuantSpec(8, activation_bits=8)


def test_the_operators_are_sound_for_compilers() -> None:
    x = torch.randn(3, 32, device=DEVICE, dtype=FP16)
    locks = new_locks(torch.device(DEVICE))
    weight = random_weight(16, 32, W8A8, DEVICE, FP16)
    q = (*quantize.per_token(x), weight.ints, weight.scales, None, locks, FP16)
    packed = pack_int32(random_weight(16, 32, QuantSpec(4, 32), DEVICE, FP16).ints, 4)
    words = to_planar(packed, 4, 32)
    operators = [
        (quantize.per_token_op, (x,)),
        (quantize.rmsnorm_op, (x, x[0].clone(), 1e-5)),
        (quantize.swiglu_op, (x, x.clone())),
        (w8a8_triton.linear_op, (x, weight.ints, weight.scales, None, locks)),
        (w8a8_triton.quantized_linear_op, q),
        (wna16_triton.linear_op, (x, words, weight.scales, None, locks, 4, 32)),
    ]
    for operator, arguments in operators:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_takes_a_step_of_several_operators_whole() -> None:
    first, second = (random_weight(n, k, W8A8, DEVICE, FP16) for n, k in ((64, 32), (8, 32)))
    locks = new_locks(torch.device(DEVICE))
    last = bind(random_weight(16, 8, QuantSpec(4), DEVICE, FP16), "triton", FP16)
    norm = torch.ones(32, device=DEVICE, dtype=FP16)

    def step(x: Tensor) -> Tensor:
        q, scale = quantize.rmsnorm_op(x, norm, 1e-5)
        form = (None, locks, FP16)
        both = w8a8_triton.quantized_linear_op(q, scale, first.ints, first.scales, *form)
        q, scale = quantize.swiglu_op(both[:, :32], both[:, 32:])
        y = w8a8_triton.quantized_linear_op(q, scale, second.ints, second.scales, *form)
        return last(y)

    x = torch.randn(3, 32, device=DEVICE, dtype=FP16)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), step(x))


def test_operators_are_compiled_once_for_any_number_of_tokens() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    weight = random_weight(16, 32, W8A8, DEVICE, FP16)
    locks = new_locks(torch.device(DEVICE))
    words = to_planar(pack_int32(random_weight(8, 16, QuantSpec(4), DEVICE, FP16).ints, 4), 4, None)
    form = (words, torch.ones(8, 1, device=DEVICE, dtype=FP16), None, locks, 4, None)

    def step(x: Tensor) -> Tensor:
        q, scale = quantize.per_token_op(x)
        y = w8a8_triton.quantized_linear_op(q, scale, weight.ints, weight.scales, None, locks, FP16)
        y = y + w8a8_triton.linear_op(x, weight.ints, weight.scales, None, locks)
        return wna16_triton.linear_op(y, *form)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (3, 5, 9):
        x = torch.randn(tokens, 32, device=DEVICE, dtype=FP16)
        assert torch.equal(compiled(x), step(x))
    assert counter.frame_count == 1
