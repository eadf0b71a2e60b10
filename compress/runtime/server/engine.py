"""Continuous batching over a loaded model: tokens of many requests at once, each as it comes.

The batching is transformers'. Here is what a server adds: a bound on the queue, requests that are
given up, sampling by request, and what the metrics ask for.
"""

import asyncio
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import logger as batching_logger

from compress.errors import UserError
from compress.report import words
from compress.runtime import attention as runtime_attention
from compress.runtime.configs import first_line
from compress.runtime.server import attention, sampling
from compress.runtime.server.limits import PAGE, Limits
from compress.runtime.server.sampling import Sampling

POLL_SECONDS = 0.05


def context_of(model: PreTrainedModel, limits: Limits) -> int:
    """Tokens of prompt and answer together: what `model` holds, and the KV cache of one request."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or limits.kv_tokens, limits.kv_tokens)


@dataclass(frozen=True)
class Load:
    """What the engine has to do now: requests, and tokens of the KV cache (of whole pages)."""

    running: int
    waiting: int
    kv_tokens: int


class QueueFullError(Exception):
    """There is no place for one more request now."""


class EngineError(Exception):
    """The request was not finished: the engine stops, or failed."""


class Engine:
    """Greedy or sampled tokens for prompts of token ids; all methods belong to one event loop."""

    def __init__(self, model: PreTrainedModel, end_tokens: list[int], limits: Limits) -> None:
        """Take over `model`, which until `stop` serves nothing else.

        Raises UserError where transformers' continuous batching cannot hold the model's cache.
        """
        self.limits = limits
        self.kv_tokens_most = 0
        self._in_flight = 0
        self._names = (f"request-{i}" for i in itertools.count())
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=limits.pages,
            max_batch_tokens=limits.batch_tokens,
            max_requests_per_batch=limits.running,
            auto_switch_to_flash=False,
            use_cuda_graph=False,  # sampling looks at its requests on the host
            allow_block_sharing=False,  # shared prefixes would come from another batch's rounding
        )
        self._attended_by = model.config._attn_implementation
        if self._attended_by == runtime_attention.NAME:
            model.set_attn_implementation("sdpa")  # whose name the manager knows
        greedy = GenerationConfig(do_sample=False, use_cache=False, eos_token_id=end_tokens or -1)
        try:
            self._manager: ContinuousBatchingManager = model.init_continuous_batching(
                generation_config=greedy, continuous_batching_config=config
            )
        except (ValueError, AttributeError) as error:
            raise _unfit(model, limits, error) from error
        self._manager.logit_processor = sampling.processors(self._note_kv)
        attention.install(model)

    async def start(self) -> None:
        """Begin to serve; one token is made first. Raises UserError where the model cannot."""
        with torch.inference_mode():  # the manager's thread takes the mode over
            self._manager.start()
        level = batching_logger.level
        batching_logger.setLevel(logging.CRITICAL)  # what it would log is raised here
        try:
            async for _ in self.tokens([0], 1):
                pass
        except BaseException as error:  # one who gives up too: the thread would outlive it
            await self.stop()
            if isinstance(error, EngineError):
                raise _unfit(self._manager.model, self.limits, error) from error
            raise
        finally:
            batching_logger.setLevel(level)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more requests; those there are have `grace_s` seconds, then end in EngineError.

        The model attends as before then, so nothing may run any more.
        """
        status = self._manager.background_thread_status
        status.request_stop(status.FLUSH_AND_STOP, 0)
        deadline = time.monotonic() + grace_s
        while self._manager.is_running() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self._manager.stop, hard_stop=True)
        self._manager.model.set_attn_implementation(self._attended_by)

    @property
    def forwards(self) -> int:
        """Forwards of the model so far."""
        return int(getattr(self._manager, "current_batch", 0))

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        status = self._manager.background_thread_status
        return self._manager.is_running() and status.can_accept_new_requests() is None

    @property
    def full(self) -> bool:
        """Whether there is no place for one more request now."""
        return self._in_flight >= self.limits.running + self.limits.waiting

    def load(self) -> Load:
        """Requests and KV cache in use; reads what the batching thread writes, without a lock."""
        processor = self._manager.batch_processor
        if processor is None:
            return Load(0, self._in_flight, 0)
        running = len(processor.scheduler.active_requests)
        used = 1 - processor.cache.compute_free_capacity()
        tokens = round(used * processor.cache.num_blocks) * PAGE
        return Load(running, max(0, self._in_flight - running), tokens)

    async def tokens(
        self, prompt: list[int], most: int, sampling: Sampling | None = None
    ) -> AsyncGenerator[list[int]]:
        """New token ids as they come, at most `most`, the end token included; greedy by default.
        Those that came while no one read come together.

        Leaving the iteration early gives up the request and frees its part of the cache. Raises
        QueueFullError at once, EngineError later.
        """
        if not self.alive:
            raise EngineError("the engine has stopped")
        if self.full:
            raise QueueFullError
        name = next(self._names)
        outputs: asyncio.Queue[GenerationOutput] = asyncio.Queue()

        def came(output: GenerationOutput) -> None:
            # It has all tokens so far: of what a slow reader leaves lying, the newest is enough.
            if not outputs.empty():
                outputs.get_nowait()
            outputs.put_nowait(output)

        self._manager.register_result_handler(name, came)
        self._in_flight += 1
        finished = False
        try:
            taken = self._manager.add_request(
                prompt,
                request_id=name,
                max_new_tokens=most,
                streaming=True,
                **({"sampling": sampling} if sampling else {}),
            )
            # Asked again: a thread that failed in between has told those it knew of, and no other.
            if taken is None or not self.alive:
                raise EngineError("the engine has stopped")
            seen = 0
            while not finished:
                output = await outputs.get()
                finished = output.is_finished()
                new, seen = output.generated_tokens[seen:], len(output.generated_tokens)
                if new:
                    yield new
                if output.error is not None:
                    raise EngineError(output.error)
        finally:
            self._in_flight -= 1
            if not finished:
                self._give_up(name)

    def _note_kv(self) -> None:
        self.kv_tokens_most = max(self.kv_tokens_most, self.load().kv_tokens)

    def _give_up(self, name: str) -> None:
        """Cancel a request. transformers then tells no one, so its handler is taken back here.

        What its last forward makes goes to a queue that no one reads; it is emptied the next time.
        """
        self._manager.cancel_request(name)
        router = self._manager.output_router
        with router._lock:
            router.result_handlers.pop(name, None)
            router.output_queue.queue.clear()


def _unfit(model: PreTrainedModel, limits: Limits, error: Exception) -> UserError:
    if memory := re.search(r"footprint (\d+) is more than available memory (\d+)", str(error)):
        needed, free = (words.size(int(size)) for size in memory.groups())
        return UserError(
            f"kv_tokens={limits.kv_tokens}: the KV cache and the tensors of a forward take "
            f"{needed}, and {free} are free; wanted fewer kv_tokens, or fewer batch_tokens"
        )
    return UserError(
        f"{model.config.model_type}: continuous batching cannot serve this model: "
        f"{first_line(error)}; wanted layers of full or sliding attention without caps or sinks"
    )
