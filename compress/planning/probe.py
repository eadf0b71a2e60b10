"""The CPU here as a device: the kernels of each scheme and what else a block does, timed.

Takes some ten seconds. Linears, heads and norms are of the model's own size, their weights random.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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
TOKENS = (1, 4, 16, 64, 256, 2048)
"""The last is many prompts at once, whose activations no cache holds."""
SMALL = 64
"""Channels of a linear so small that its call alone takes time."""
MANY = 1024
"""Tokens from which on reading the weights hardly counts."""
CONTEXTS = (64, 1088)
FEW, MORE = 2, 12
"""Blocks of decoders whose difference is what a block takes."""
ROUNDS = 7
KINDS = {"W8A8": QuantSpec(8, activation_bits=8), "W8A16": QuantSpec(8), "W4A16": QuantSpec(4, 64)}

Timer = Callable[[], float]
Linear = Callable[[Tensor], Tensor]
SETTLING = 10_000_000
"""Bytes that the process takes more once a model has answered: 8 to 13 MB with SmolLM2."""


@dataclass(frozen=True)
class Work:
    """Something to be timed: `repeats` calls of `run` at a time, each of which does `parts`."""

    run: Callable[[], object]
    repeats: int = 1
    parts: int = 1


def fastest(works: Mapping[Hashable, Work], timer: Timer) -> dict[Hashable, float]:
    """Seconds of a part of each: the fastest of ROUNDS, in which all works take turns.

    Other work, also that of other virtual machines, makes a round slower and never faster, and
    comes and goes by the second: what was timed at once would be compared across its moods.
    """
    for work in works.values():
        work.run()  # warms up
    found = dict.fromkeys(works, math.inf)
    for _ in range(ROUNDS):
        for name, work in works.items():
            start = timer()
            for _ in range(work.repeats):
                work.run()
            found[name] = min(found[name], (timer() - start) / (work.repeats * work.parts))
    return found


@torch.inference_mode()
def measure_cpu(shape: Shape, timer: Timer = time.perf_counter) -> Device:
    """The device that this machine is for a model of `shape`, on torch's threads.

    timer: time.process_time, on one thread, leaves out what other programs do meanwhile.
    """
    makers: dict[str, Callable[[int, int], Linear]] = {"16": _plain}
    for kind, spec in KINDS.items():
        fits = shape.hidden % (spec.group_size or 1) == 0
        makers[kind] = partial(_quantized, spec=spec if fits else QuantSpec(spec.bits))
    works: dict[Hashable, Work] = {}
    for kind, make in makers.items():
        works |= _linears(kind, make, shape)
    for tokens in TOKENS[-2:]:
        works |= _values(shape, tokens)
    seconds = fastest(works | _attention(shape) | _steps(), timer)

    block_s = max(0.0, (seconds["blocks", MORE] - seconds["blocks", FEW]) / (MORE - FEW))
    calls = {kind: seconds[kind, "call"] for kind in makers}
    weights = shape.intermediate * shape.hidden

    def curve(kind: str) -> Curve:
        """Of the largest linear in the blocks, less what a call takes."""
        taken = [seconds[kind, tokens] for tokens in TOKENS]
        return Curve(TOKENS, [max(s - calls[kind], s / 10) / weights for s in taken])

    found = hardware()
    return Device(
        name=CPU,
        memory=psutil.virtual_memory().total,
        rates={kind: curve(kind) for kind in makers},
        values={work: _value_curve(work, seconds) for work in ("norm", "rotation", "product")},
        pair_s=seconds["pair"],
        kv_s=max(0.0, _kv_s(shape, seconds)),
        block_s=block_s,
        forward_s=max(0.0, seconds["blocks", FEW] - FEW * block_s),
        call_s={kind: max(0.0, call - calls["16"]) for kind, call in calls.items()},
        source=f"measured on {found['cpu']}, {found['torch_threads']} threads",
    )


def _plain(n: int, k: int) -> Linear:
    """As the runtime has it: ATen's, or where the CPU has AMX ours."""
    linear = torch.nn.Linear(k, n, bias=False, dtype=HALF)
    return dense.Dense(linear.weight, None) if build.has_amx() else linear


def _quantized(n: int, k: int, spec: QuantSpec) -> Linear:
    return bind(random_weight(n, k, spec, "cpu", HALF), "cpu", HALF)


def _linears(kind: str, make: Callable[[int, int], Linear], shape: Shape) -> dict[Hashable, Work]:
    """The largest linear in the blocks at each number of tokens, and what a call takes."""
    n, k = shape.intermediate, shape.hidden
    # No more than the model has: what fits into a cache as a whole is read from there.
    count = max(2, min(3 * shape.blocks, BEYOND_CACHES // (2 * n * k)))
    linears = [make(n, k) for _ in range(count)]
    small = [make(SMALL, SMALL)]
    works: dict[Hashable, Work] = {(kind, "call"): Work(_by_turns(small, 1, SMALL), repeats=100)}
    for tokens in TOKENS:
        # Where reading the weights no longer counts, few of them are enough.
        some = linears if tokens < MANY else linears[:2]
        works[kind, tokens] = Work(_by_turns(some, tokens, k), parts=len(some))
    return works


def _by_turns(linears: Sequence[Linear], tokens: int, k: int) -> Callable[[], None]:
    x = torch.randn((tokens, k)).to(HALF)

    def run() -> None:
        for linear in linears:
            linear(x)

    return run


def _values(shape: Shape, tokens: int) -> dict[Hashable, Work]:
    """A norm with the residual after it, a rotation, the MLP's product; a part is a value."""
    norm = LlamaRMSNorm(shape.hidden).to(HALF)
    hidden = torch.randn((1, tokens, shape.hidden)).to(HALF)
    gate = torch.randn((1, tokens, shape.intermediate)).to(HALF)
    q = torch.randn((1, shape.query_heads, tokens, shape.head_size)).to(HALF)
    k, table = q[:, : shape.kv_heads], torch.ones((1, tokens, shape.head_size), dtype=HALF)

    def rotate() -> object:
        return apply_rotary_pos_emb(q, k, table, table)

    return {
        ("norm", tokens): Work(lambda: hidden + norm(hidden), parts=hidden.numel()),
        ("rotation", tokens): Work(rotate, parts=q.numel() + k.numel()),
        ("product", tokens): Work(lambda: F.silu(gate) * gate, parts=gate.numel()),
    }


def _value_curve(work: str, seconds: Mapping[Hashable, float]) -> Curve:
    """Of so few tokens that a cache holds their values, and of so many that none does."""
    few, many = TOKENS[-2:]
    least = seconds[work, few]
    return Curve((1, few, many), (least, few * least, many * seconds[work, many]))


def _attention(shape: Shape) -> dict[Hashable, Work]:
    """A channel of a query meeting one of a key, in causal attention ("pair"); and decoding steps
    after few and many tokens, in one block with the model's heads and hardly anything else.
    """
    tokens = 512
    q = torch.randn((1, shape.query_heads, tokens, shape.head_size)).to(HALF)
    heads = {
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
    }
    return {
        "pair": Work(
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            parts=shape.query_heads * shape.head_size * tokens * tokens // 2,
        ),
        **{("context", n): Work(small_decoder(1, n, **heads), repeats=10) for n in CONTEXTS},
    }


def _kv_s(shape: Shape, seconds: Mapping[Hashable, float]) -> float:
    """Seconds of a byte of the KV cache in a decoding step: what longer contexts take more."""
    short, long = CONTEXTS
    bytes_more = (long - short) * 2 * shape.kv_heads * shape.head_size * HALF.itemsize
    return (seconds["context", long] - seconds["context", short]) / bytes_more


def _steps() -> dict[Hashable, Work]:
    """Decoding steps of FEW and of MORE blocks that compute hardly anything."""
    return {("blocks", n): Work(small_decoder(n, 64), repeats=10) for n in (FEW, MORE)}


def small_decoder(blocks: int, context: int, **heads: Any) -> Callable[[], None]:
    """A decoder of few channels that holds `context` tokens; called, it makes a decoding step."""
    heads = heads or {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16 * heads["num_attention_heads"], "intermediate_size": SMALL}
    config = LlamaConfig(num_hidden_layers=blocks, vocab_size=SMALL, **sizes, **heads)
    model = LlamaForCausalLM(config).to(HALF).eval()
    attention.install(model)  # as the loader does
    cache = DynamicCache(config=config)

    @torch.inference_mode()
    def feed(tokens: int = 1) -> None:
        ids = torch.zeros((1, tokens), dtype=torch.long)
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    feed(context)
    return feed


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
    small_decoder(blocks=1, context=64)()
    return high_water()
