"""serve: the checkpoint in our runtime, checked against the reference, timed by its original."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from transformers import AutoTokenizer, PreTrainedModel

from compress.errors import ConfigError, UserError
from compress.kernels.backend import BACKENDS, pick_backend
from compress.kernels.check import MAX_RELATIVE_ERROR, check_linear
from compress.log import logger
from compress.machine import release_memory
from compress.runtime.attention import in_words
from compress.runtime.cache import KV_CACHES
from compress.runtime.decode import COMPILE, Decoder
from compress.runtime.footprint import footprint
from compress.runtime.generate import answer, chat_prompt
from compress.runtime.latency import summarize, time_models, time_ratio
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import load
from compress.source import shortest_window
from compress.stage import Run
from compress.text.tokenizer import tokenizer_of

CHECK_TOKENS = (1, 3, 100)
"""Inputs for the check of a layer: decode, an odd batch, prefill."""


@dataclass(kw_only=True)
class Serve:
    """What was gained, measured on what ships.

    prompt_tokens, new_tokens: length of a request. requests: how many are timed of each model, by
    turns, one at a time, after `warmup` more. backend: triton, cpu or reference; null: the
    COMPRESS_BACKEND of the environment, else the device's own. kv_cache: how the compressed model
    keeps keys and values: 16 (bit), v8 (V in INT8) or kv8 (K and V in INT8); the original's stay
    in 16 bit. compile: off, or auto: the step of decoding of models that have no faster one as one
    program of torch.compile, on a GPU as a CUDA graph, where there is a C++ compiler; the first
    time that takes minutes. question: asked of both models; the answers are recorded.
    answer_tokens: cuts them.
    """

    name: ClassVar[str] = "serve"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("dense", "checkpoint")
    gives: ClassVar[str | None] = "latency"
    shares: ClassVar[tuple[str, ...]] = ("device", "seed")

    prompt_tokens: int = 128
    new_tokens: int = 32
    requests: int = 8
    warmup: int = 2
    backend: str | None = None
    kv_cache: str = "16"
    compile: str = "off"
    question: str = "What is the capital of France?"
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "new_tokens": 2, "requests": 1, "warmup": 0}
        least |= {"answer_tokens": 1}
        problems = [
            f"serve.{name} is {getattr(self, name)}; wanted at least {minimum}"
            for name, minimum in least.items()
            if getattr(self, name) < minimum
        ]
        if self.backend is not None and self.backend not in BACKENDS:
            problems.append(
                f"serve.backend is {self.backend!r}; wanted null or one of {', '.join(BACKENDS)}"
            )
        if self.kv_cache not in KV_CACHES:
            problems.append(
                f"serve.kv_cache is {self.kv_cache!r}; wanted one of {', '.join(KV_CACHES)}"
            )
        if self.compile not in COMPILE:
            problems.append(
                f"serve.compile is {self.compile!r}; wanted one of {', '.join(COMPILE)}"
            )
        if problems:
            raise ConfigError(problems)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        """Return the kernel check, the answers, and the latency before and after."""
        device, seed, trust = run.config.device, run.config.seed, run.config.model.trust_remote_code
        folders = {"before": run.original, "after": run.artifacts["checkpoint"]}
        backend = pick_backend(device, self.backend)
        kv_caches = {"before": "16", "after": self.kv_cache}
        prompt_tokens = self._prompt_tokens(folders, trust)

        model = load(folders["after"], device=device, backend=backend, trust_remote_code=trust)
        kernel_check = check_kernels(model, backend, seed)
        logger.info(
            f"  {kernel_check['layers']} quantized layers on {backend} agree with the reference "
            f"to {kernel_check['max_relative_error']:.4f}"
        )
        del model
        release_memory()

        footprints = {
            name: footprint(
                folder,
                device=device,
                backend=backend,
                prompt_tokens=prompt_tokens,
                threads=torch.get_num_threads(),
                kv_cache=kv_caches[name],
                trust_remote_code=trust,
            )
            for name, folder in folders.items()
        }
        together = fit_together(list(folders.values()), device)
        turns = [["before", "after"]] if together else [["before"], ["after"]]
        latency: dict[str, Any] = {}
        ratio = None
        answers: dict[str, str] = {}
        for names in turns:
            decoders = {
                name: Decoder(
                    load(folders[name], device=device, backend=backend, trust_remote_code=trust),
                    kv_cache=kv_caches[name],
                    compile=self.compile,
                )
                for name in names
            }
            compiling = {
                name: decoder.prepare(prompt_tokens + self.new_tokens)
                for name, decoder in decoders.items()
            }
            timings = time_models(
                decoders,
                prompt_tokens=prompt_tokens,
                new_tokens=self.new_tokens,
                requests=self.requests,
                warmup=self.warmup,
                seed=seed,
            )
            if together:
                ratio = time_ratio(timings["before"], timings["after"])
            for name, decoder in decoders.items():
                latency[name] = summarize(timings[name], prompt_tokens) | footprints[name]
                latency[name] |= {
                    "attention": in_words(decoder.model),
                    "step": decoder.step,
                    "compiled": decoder.compiled,
                    "compile_seconds": compiling[name],
                }
                answers[name] = self._ask(decoder, folders[name], folders["before"], trust)
            del decoders, decoder
        _say(latency, answers)
        return {
            "backend": backend,
            "threads": torch.get_num_threads(),
            "by_turns": together,
            "time_ratio": ratio,
            "kv_cache": self.kv_cache,
            "kernel_check": kernel_check,
            "question": self.question,
            "answers": answers,
            "before": latency["before"],
            "after": latency["after"],
        }

    def _prompt_tokens(self, folders: dict[str, Path], trust: bool) -> int:
        """`prompt_tokens`, or what the shorter context has room for."""
        context = shortest_window(folders.values(), trust)
        if self.new_tokens >= context:
            raise UserError(
                f"serve.new_tokens is {self.new_tokens}; the model's context holds {context} tokens"
            )
        room = min(self.prompt_tokens, context - self.new_tokens)
        if room < self.prompt_tokens:
            logger.info(f"  prompts of {room} tokens: the model's context holds {context}")
        return room

    def _ask(self, decoder: Decoder, folder: Path, original: Path, trust: bool) -> str:
        """The answer to `question`, through the original's tokenizer where the model's own is
        missing: that is a fault, which `score` names, and no reason to lose what was measured.
        """
        tokenizer = tokenizer_of(folder, trust_remote_code=trust)
        if tokenizer is None:
            logger.warning(f"  {folder}: no tokenizer that loads; asked through the original's")
            tokenizer = AutoTokenizer.from_pretrained(original, trust_remote_code=trust)
        prompt = chat_prompt(tokenizer, self.question)
        return answer(decoder, tokenizer, prompt, self.answer_tokens).strip()


def check_kernels(model: PreTrainedModel, backend: str, seed: int) -> dict[str, Any]:
    """Run the first and last quantized layer of every shape against the reference.

    Inputs are random, weights those of the checkpoint. Raises UserError where a layer is off by
    more than MAX_RELATIVE_ERROR: what such a kernel would serve is not the model.
    """
    by_shape: dict[tuple[int, int], list[str]] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    for name, layer in layers.items():
        by_shape.setdefault((layer.out_features, layer.in_features), []).append(name)
    chosen = sorted({name for names in by_shape.values() for name in (names[0], names[-1])})
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for name in chosen:
        layer = layers[name]
        for tokens in CHECK_TOKENS:
            x = torch.randn((tokens, layer.in_features), generator=generator)
            x = x.to(device=model.device, dtype=model.dtype)
            with torch.inference_mode():
                error = check_linear(layer, x, layer.qtensor(), layer.bias)
            if error > MAX_RELATIVE_ERROR:
                raise UserError(
                    f"{name}: backend {backend} is off the reference by {error:.3g} (relative) at "
                    f"{tokens} tokens; wanted at most {MAX_RELATIVE_ERROR}; "
                    "serve.backend=reference is right everywhere"
                )
            worst = max(worst, error)
    return {
        "max_relative_error": worst,
        "limit": MAX_RELATIVE_ERROR,
        "layers": len(chosen),
        "of": len(layers),
        "shapes": [list(shape) for shape in by_shape],
        "tokens": list(CHECK_TOKENS),
    }


def fit_together(folders: list[Path], device: str) -> bool:
    """Whether all `folders` fit in the free memory of `device` at once, with a fifth to spare."""
    stored = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return stored * 1.2 < free


def _say(latency: dict[str, Any], answers: dict[str, str]) -> None:
    before, after = latency["before"], latency["after"]
    for what, key, unit in (
        ("first token", "ttft_ms", "ms"),
        ("each further token", "tpot_ms", "ms"),
    ):
        logger.info(
            f"  {what}: {before[key]['p50']:.1f} to {after[key]['p50']:.1f} {unit} (median)"
        )
    logger.info(
        f"  decode {before['decode_tokens_per_s']:.1f} to {after['decode_tokens_per_s']:.1f} "
        f"tokens/s, prefill {before['prefill_tokens_per_s']:.0f} to "
        f"{after['prefill_tokens_per_s']:.0f}, one request at a time, "
        f"attention by {after['attention']}, the step {after['step']}"
    )
    logger.info(f"  asked, it answers: {answers['after']}")
