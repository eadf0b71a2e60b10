"""The CPU here as a device: the kernels of each scheme and what else a block does, timed.

Takes some ten seconds. Linears, heads and norms are of the model's own size, their weights random.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from compress.kernels import dense
from compress.kernels.bench import bind, random_weight
from compress.kernels.native import build
from compress.machine import hardware, high_water
from compress.planning.devices import CPU, Curve, Device
from compress.planning.shape import Shape
from compress.qtensor import QuantSpec
from compress.runtime import attention

HALF = torch.bfloat16
BEYOND_CACHES = 128 << 20
"""Bytes of weights that are read by turns, so that none is in a cache."""
TOKENS = (1, 4, 16, 64, 256)
SMALL = 64
"""Channels of a linear so small that its call alone takes time."""
CONTEXTS = (64, 1088)
ROUNDS = 7
KINDS = {"W8A8": QuantSpec(8, activation_bits=8), "W8A16": QuantSpec(8), "W4A16": QuantSpec(4, 64)}

Timer = Callable[[], float]
Linear = Callable[[Tensor], Tensor]
SETTLING = 10_000_000
"""Bytes that the process takes more once a model has answered: 8 to 13 MB with SmolLM2."""


@torch.inference_mode()
def measure_cpu(shape: Shape, timer: Timer = time.perf_counter) -> Device:
    """The device that this machine is for a model of `shape`, on torch's threads.

    timer: time.process_time, on one thread, leaves out what other programs do meanwhile.
    """
    makers: dict[str, Callable[[int, int], Linear]] = {"16": _plain}
    for kind, spec in KINDS.items():
        fits = shape.hidden % (spec.group_size or 1) == 0
        makers[kind] = partial(_quantized, spec=spec if fits else QuantSpec(spec.bits))
    calls = {
        kind: _per_call(timer, [make(SMALL, SMALL)], 1, SMALL, repeats=100)
        for kind, make in makers.items()
    }
    few, more = (small_step(timer, blocks, 1) for blocks in (2, 8))
    block_s = max(0.0, (more - few) / 6)
    found = hardware()
    return Device(
        name=CPU,
        memory=psutil.virtual_memory().total,
        rates={k: _curve(timer, make, shape, calls[k]) for k, make in makers.items()},
        value_s=_values(timer, shape),
        pair_s=_pair(timer, shape),
        kv_s=_kv(timer, shape),
        block_s=block_s,
        forward_s=max(0.0, few - 2 * block_s),
        call_s={kind: max(0.0, call - calls["16"]) for kind, call in calls.items()},
        source=f"measured on {found['cpu']}, {found['torch_threads']} threads",
    )


def _plain(n: int, k: int) -> Linear:
    """As the runtime has it: ATen's, or where the CPU has AMX ours."""
    linear = torch.nn.Linear(k, n, bias=False, dtype=HALF)
    return dense.Dense(linear.weight, None) if build.has_amx() else linear


def _quantized(n: int, k: int, spec: QuantSpec) -> Linear:
    return bind(random_weight(n, k, spec, "cpu", HALF), "cpu", HALF)


def _curve(timer: Timer, make: Callable[[int, int], Linear], shape: Shape, call: float) -> Curve:
    """Of the largest linear in the blocks, less what a call takes."""
    n, k = shape.intermediate, shape.hidden
    # No more than the model has: what fits into a cache as a whole is read from there.
    count = min(3 * shape.blocks, BEYOND_CACHES // (2 * n * k))
    linears = [make(n, k) for _ in range(max(2, count))]
    seconds = [_per_call(timer, linears, tokens, k) for tokens in TOKENS]
    return Curve(TOKENS, [max(s - call, s / 10) / (n * k) for s in seconds])


def _per_call(
    timer: Timer, linears: Sequence[Linear], tokens: int, k: int, repeats: int = 1
) -> float:
    x = torch.randn((tokens, k)).to(HALF)

    def by_turns() -> None:
        for linear in linears:
            linear(x)

    return _seconds(timer, by_turns, repeats) / len(linears)


def _values(timer: Timer, shape: Shape) -> dict[str, float]:
    """Seconds a value of a norm with the residual after it, a rotation, the MLP's product."""
    tokens, norm = TOKENS[-1], LlamaRMSNorm(shape.hidden).to(HALF)
    hidden = torch.randn((1, tokens, shape.hidden)).to(HALF)
    gate = torch.randn((1, tokens, shape.intermediate)).to(HALF)
    q = torch.randn((1, shape.query_heads, tokens, shape.head_size)).to(HALF)
    k, table = q[:, : shape.kv_heads], torch.ones((1, tokens, shape.head_size), dtype=HALF)
    return {
        "norm": _seconds(timer, lambda: hidden + norm(hidden)) / hidden.numel(),
        "rotation": _seconds(timer, lambda: apply_rotary_pos_emb(q, k, table, table))
        / (q.numel() + k.numel()),
        "product": _seconds(timer, lambda: F.silu(gate) * gate) / gate.numel(),
    }


def _pair(timer: Timer, shape: Shape) -> float:
    """Seconds of a channel of a query meeting one of a key, in causal attention."""
    tokens = 2 * TOKENS[-1]
    q = torch.randn((1, shape.query_heads, tokens, shape.head_size)).to(HALF)
    seconds = _seconds(timer, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return seconds / (shape.query_heads * shape.head_size * tokens * tokens / 2)


def _kv(timer: Timer, shape: Shape) -> float:
    """Seconds of a byte of the KV cache in a decoding step: what longer contexts take more, in one
    block with the model's heads and hardly anything else.
    """
    heads = {
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
    }
    short, long = (small_step(timer, 1, context, **heads) for context in CONTEXTS)
    per_token = 2 * shape.kv_heads * shape.head_size * HALF.itemsize
    return max(0.0, (long - short) / ((CONTEXTS[1] - CONTEXTS[0]) * per_token))


def small_step(timer: Timer, blocks: int, context: int, **heads: Any) -> float:
    """Seconds of a decoding step after `context` tokens, in a decoder of few channels."""
    heads = heads or {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16 * heads["num_attention_heads"], "intermediate_size": SMALL}
    config = LlamaConfig(num_hidden_layers=blocks, vocab_size=SMALL, **sizes, **heads)
    model = LlamaForCausalLM(config).to(HALF).eval()
    attention.install(model)  # as the loader does
    cache = DynamicCache(config=config)

    def feed(tokens: int) -> None:
        ids = torch.zeros((1, tokens), dtype=torch.long)
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    feed(context)
    return _seconds(timer, lambda: feed(1))


@cache
def serving_process() -> int:
    """Bytes that Python, torch, transformers and our kernels take on this machine without a model:
    in a process of its own that has answered with a very small one.
    """
    code = "from compress.planning import probe; print(probe.held())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) + SETTLING


def held() -> int:
    """Bytes resident at most in this process, once libraries have loaded what a forward needs."""
    small_step(time.perf_counter, blocks=1, context=64)
    return high_water()


def _seconds(timer: Timer, work: Callable[[], object], repeats: int = 10) -> float:
    """The median of some rounds of `repeats` each, after one that warms up."""
    work()
    rounds = []
    for _ in range(ROUNDS):
        start = timer()
        for _ in range(repeats):
            work()
        rounds.append((timer() - start) / repeats)
    return statistics.median(rounds)
