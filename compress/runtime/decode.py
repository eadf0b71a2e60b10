"""Decoding one request greedily, as fast as the runtime can.

At decode a small model waits for Python and for hundreds of small operations, so there are three
ways to take a step. On CPU in bf16, blocks like Llama's do without modules
(compress.runtime.token_step). For other models, and on a GPU, `off` takes the modules as they are,
and `auto` the whole step as one program of torch.compile, over a KV cache of fixed size, where
there is a C++ compiler; on a GPU it is replayed as a CUDA graph. Its first use takes a minute or
more; torch keeps what it compiled for the next process. In any way linears in bf16 on CPU run
through compress.kernels.dense.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from compress.errors import UserError
from compress.kernels.native.build import compiler
from compress.log import logger
from compress.runtime import dense, token_step
from compress.runtime.cache import cache_for
from compress.runtime.token_step import Room, TokenStep

COMPILE = ("off", "auto")
LEAST_CAPACITY = 256
"""Tokens in the smallest cache of fixed size. Others hold twice as many, and so on: each size is
compiled for."""

Step = Callable[[Tensor, Any], Tensor]
"""Ids [1, T] to the next id [1, 1]; the cache or room takes up the T tokens."""


class Decoder:
    """`model` for one greedy request at a time.

    The model's bf16 linears are told to run single tokens through compress.kernels.dense, which
    without AMX gives other last bits than a batch has: for batches load it once more. The tensors
    are taken as they are now: after load_state_dict or a move, make another. One request at a time:
    a second takes the cache of the first.
    kv_cache: one of KV_CACHES; only 16 is compiled for. compile: one of COMPILE. Raises UserError
    for another. Where the step cannot be compiled a line says why, and `compiled` is false.
    """

    def __init__(
        self, model: PreTrainedModel, *, kv_cache: str = "16", compile: str = "off"
    ) -> None:
        if compile not in COMPILE:
            raise UserError(f"compile is {compile!r}; wanted one of {', '.join(COMPILE)}")
        self.model, self.kv_cache = model, kv_cache
        self._compiled: Step | None = None
        self._compiled_for: set[int] = set()
        self._fixed: dict[int, StaticCache] = {}
        dense.use(model)
        without = token_step.why_not(model, cache_for(model, kv_cache))
        self._token_step = None if without else TokenStep(model)
        if compile == "auto":
            problem = _why_not(model, kv_cache)
            if self._token_step is not None:
                problem = "the step without modules is faster"
            if problem:
                _say_not_compiled(problem)
            else:
                self._compiled = _compile(self._step, model.device.type)

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled."""
        return self._compiled is not None

    @property
    def step(self) -> str:
        """In words: how a token after the first is come by."""
        if self._token_step is not None:
            return "without modules"
        return "compiled" if self.compiled else "as its modules are"

    @torch.inference_mode()
    def prepare(self, length: int) -> float:
        """Compile for requests of up to `length` tokens, prompt and answer; returns the seconds."""
        if self._compiled is None or (size := capacity(length)) in self._compiled_for:
            return 0.0
        start = time.perf_counter()
        first = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        cache = cache_for(self.model, self.kv_cache)
        self._step(first, cache)
        try:
            fixed = self._of_fixed_size(cache, size)
            # The first call compiles; on a GPU the second records the graph, the third replays it.
            for _ in range(3 if first.is_cuda else 1):
                self._compiled_step(first, fixed)
        except RuntimeError as error:  # of dynamo, inductor and the compiler
            # The first line alone may only name the backend.
            _say_not_compiled(" ".join(str(error).split("\n")[:2]))
            self._compiled = None
            self._fixed.clear()
            return 0.0
        self._compiled_for.add(size)
        seconds = time.perf_counter() - start
        logger.info(f"  compiled the step of decoding for {size} tokens in {seconds:.0f} s")
        return seconds

    @torch.inference_mode()
    def tokens(self, prompt: Tensor, most: int) -> Iterator[Tensor]:
        """The `most` likeliest tokens after `prompt` [1, T], ids [1, 1], each once it is known.

        Raises ValueError for several prompts.
        """
        requests, length = prompt.shape
        if requests != 1:
            raise ValueError(f"{requests} prompts; wanted one, or generate for batches")
        self.prepare(length + most)
        cache = cache_for(self.model, self.kv_cache)
        token = self._step(prompt.to(self.model.device), cache)
        yield token
        step: Step = self._step
        kept: Cache | Room = cache
        if self._token_step is not None:
            step, kept = self._token_step, Room.of(cache, length + most)
        elif self._compiled is not None:
            step, kept = self._compiled_step, self._of_fixed_size(cache, capacity(length + most))
        for _ in range(most - 1):
            token = step(token, kept)
            yield token

    def _step(self, ids: Tensor, cache: Cache) -> Tensor:
        logits = self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].float().argmax(-1, keepdim=True)

    def _compiled_step(self, ids: Tensor, cache: Any) -> Tensor:
        assert self._compiled is not None
        if not ids.is_cuda:
            return self._compiled(ids, cache)
        # What a graph gives lies where its next replay will write.
        torch.compiler.cudagraph_mark_step_begin()
        return self._compiled(ids, cache).clone()

    def _of_fixed_size(self, cache: Cache, size: int) -> StaticCache:
        """The keys and values of `cache` in the decoder's one that holds `size` tokens, which a
        CUDA graph knows by its address.
        """
        if size not in self._fixed:
            self._fixed[size] = StaticCache(config=self.model.config, max_cache_len=size)
        fixed = self._fixed[size]
        fixed.reset()
        for index, layer in enumerate(cache.layers):
            fixed.update(layer.keys, layer.values, index)
        return fixed


def _compile(step: Step, device: str) -> Step:
    # Rounding to bf16 wherever the modules do, so that the tokens are theirs.
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "emulate_precision_casts": True,
        "triton.cudagraphs": device == "cuda",
    }
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


def capacity(length: int) -> int:
    """Tokens that the cache of fixed size for a request of `length` tokens holds."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())


def _why_not(model: PreTrainedModel, kv_cache: str) -> str | None:
    """What keeps the step of `model` from being compiled."""
    if kv_cache != "16":
        return f"a KV cache of {kv_cache} grows as it goes; kv_cache=16 has a fixed size"
    if model.device.type not in ("cpu", "cuda"):
        return f"that is for CPU and CUDA, the model is on {model.device.type}"
    if compiler() is None:
        return "there is no C++ compiler; install g++, or name one in CXX"
    if not all(type(layer) is DynamicLayer for layer in cache_for(model, kv_cache).layers):
        return "the model has layers with a window or a state"
    return None


def _say_not_compiled(problem: str) -> None:
    logger.info(f"  the step of decoding is not compiled: {problem}")
