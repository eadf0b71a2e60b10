"""The CPU here as a device: the kernels of each scheme and what else a block does, timed.

Takes some ten seconds. Linears, heads and norms are of the model's own size, their weights random.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
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
from compress.report.words import several
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


class Probe:
    """What this machine takes for a model of `shape`, on torch's threads: the fastest of the rounds
    taken so far, in which all works take turns.

    Other work, also that of other virtual machines, makes a round slower and never faster, and
    comes and goes by the second: what was timed at once would be compared across its moods.
    timer: time.process_time, on one thread, leaves out what other programs do meanwhile.
    """

    @torch.inference_mode()
    def __init__(self, shape: Shape, timer: Timer = time.perf_counter) -> None:
        makers: dict[str, Callable[[int, int], Linear]] = {"16": _plain}
        for kind, spec in KINDS.items():
            fits = shape.hidden % (spec.group_size or 1) == 0
            makers[kind] = partial(_quantized, spec=spec if fits else QuantSpec(spec.bits))
        works = _attention(shape) | _steps()
        for kind, make in makers.items():
            works |= _linears(kind, make, shape)
        for tokens in TOKENS[-2:]:
            works |= _values(shape, tokens)
        for work in works.values():
            work.run()  # warms up
        self._shape, self._timer, self._works = shape, timer, works
        self._seconds = dict.fromkeys(works, math.inf)

    @torch.inference_mode()
    def take(self, rounds: int) -> None:
        """So many rounds more."""
        for _ in range(rounds):
            for name, work in self._works.items():
                start = self._timer()
                for _ in range(work.repeats):
                    work.run()
                taken = (self._timer() - start) / (work.repeats * work.parts)
                self._seconds[name] = min(self._seconds[name], taken)

    def device(self) -> Device:
        """The device that the machine is, by the rounds so far."""
        seconds, found = self._seconds, hardware()
        block_s = max(0.0, (seconds["blocks", MORE] - seconds["blocks", FEW]) / (MORE - FEW))
        calls = {kind: seconds[kind, "call"] for kind in ("16", *KINDS)}
        return Device(
            name=CPU,
            memory=psutil.virtual_memory().total,
            rates={kind: self._curve(kind) for kind in calls},
            values={work: self._value_curve(work) for work in ("norm", "rotation", "product")},
            pair_s=seconds["pair"],
            kv_s=max(0.0, self._kv_s()),
            block_s=block_s,
            forward_s=max(0.0, seconds["blocks", FEW] - FEW * block_s),
            call_s={kind: max(0.0, call - calls["16"]) for kind, call in calls.items()},
            source=f"measured on {found['cpu']}, {several(found['torch_threads'], 'thread')}",
        )

    def _curve(self, kind: str) -> Curve:
        """Of the largest linear in the blocks, less what a call takes."""
        call, weights = self._seconds[kind, "call"], self._shape.intermediate * self._shape.hidden
        taken = [self._seconds[kind, tokens] for tokens in TOKENS]
        return Curve(TOKENS, [max(s - call, s / 10) / weights for s in taken])

    def _value_curve(self, work: str) -> Curve:
        """Of so few tokens that a cache holds their values, and of so many that none does."""
        few, many = TOKENS[-2:]
        least = self._seconds[work, few]
        return Curve((1, few, many), (least, few * least, many * self._seconds[work, many]))

    def _kv_s(self) -> float:
        """Of a byte of the KV cache in a decoding step: what longer contexts take more."""
        (short, long), shape = CONTEXTS, self._shape
        bytes_more = (long - short) * 2 * shape.kv_heads * shape.head_size * HALF.itemsize
        return (self._seconds["context", long] - self._seconds["context", short]) / bytes_more


def measure_cpu(shape: Shape) -> Device:
    """The device that this machine is for a model of `shape`, on torch's threads."""
    probe = Probe(shape)
    probe.take(ROUNDS)
    return probe.device()


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
