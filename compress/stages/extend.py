"""extend: a longer window by scaling RoPE, and a short fine-tune of what is in 16 bit."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from compress import checkpoint, data, heldout
from compress.algorithms import rope
from compress.artifact import write_json
from compress.errors import ConfigError, UserError
from compress.log import logger
from compress.model import storage_dtype
from compress.source import describe
from compress.stage import Run
from compress.trainable import ROTATED, load_exact, make_trainable, norms_and
from compress.training import Schedule, train

POSITIONS = 8  # parts of a window over which the perplexity is given
CHUNK = 512  # positions whose logits are held at once: 0.3 GB in float32 at V = 152 thousand


@dataclass(kw_only=True)
class Extend:
    """How far the context window is stretched, and how the model is used to it.

    factor: new window over old; 1 leaves the model as it is. method: ntk (static NTK-aware: every
    engine reads it), yarn (NTK by parts), linear. steps: of the fine-tune of norms, Q and K (and V
    where it is in one matrix with them) at the new length, the integers frozen; 0: none. rate: its
    learning rate. batch: windows a step. heldout_windows: long held-out windows on which it is
    measured.
    """

    name: ClassVar[str] = "extend"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics", "quantized")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "device")

    factor: float = 1.0
    method: str = "ntk"
    steps: int = 0
    rate: float = 2e-5
    batch: int = 1
    heldout_windows: int = 2
    measures: int = 4

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.factor <= 64:
            problems.append(f"extend.factor is {self.factor}; wanted 1 (off) to 64")
        if self.method not in rope.METHODS:
            problems.append(
                f"extend.method is {self.method!r}; wanted one of {', '.join(rope.METHODS)}"
            )
        if self.steps < 0:
            problems.append(f"extend.steps is {self.steps}; wanted 0 or more")
        for name, value in (
            ("batch", self.batch),
            ("heldout_windows", self.heldout_windows),
            ("measures", self.measures),
        ):
            if value < 1:
                problems.append(f"extend.{name} is {value}; wanted at least 1")
        if problems:
            raise ConfigError(problems)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        source = run.artifacts["quantized"]
        config = describe(source)
        parsed = AutoConfig.from_pretrained(
            source, trust_remote_code=run.config.model.trust_remote_code
        )
        window = parsed.max_position_embeddings
        if self.factor == 1:
            checkpoint.hand_on(source, out)
            logger.info(f"  off: the window of {window} tokens is kept")
            return {
                "method": None,
                "factor": 1.0,
                "window": {"before": window, "after": window},
                "kept": False,
                "notes": ["off: this recipe needs no longer context"],
            }

        longer = round(window * self.factor)
        scaled = run.work / "scaled"
        _scale(source, scaled, config, parsed, self.method, self.factor, longer)
        texts, held = self._windows(run, longer)

        unscaled_model = load_exact(source, run.config)
        before = perplexity_by_position(unscaled_model, held.ids)
        kl_before = heldout.distance_of(unscaled_model, run.artifacts["statistics"])
        del unscaled_model
        model = make_trainable(load_exact(scaled, run.config))
        at_once = perplexity_by_position(model, held.ids)
        dtype = storage_dtype(model.config, run.config.model.dtype)
        changed: dict[str, Tensor] = {}
        curve: list[dict[str, Any]] = []
        if self.steps:
            order = torch.randint(
                len(texts.ids),
                (self.steps * self.batch,),
                generator=torch.Generator().manual_seed(run.config.seed),
            )

            def loss_of(step: int) -> Tensor:
                rows = order[step * self.batch : (step + 1) * self.batch]
                ids = texts.ids[rows].to(model.device)
                return next_token_losses(model, ids).mean()

            history = train(
                [(self.rate, norms_and(ROTATED, model))],
                loss_of,
                lambda: math.log(mean_perplexity(perplexity_by_position(model, held.ids))),
                Schedule(self.steps, measures=self.measures),
                run.work,
                what="extend",
                dtype=dtype,
            )
            changed = history.best if history.best_step else {}
            curve = [{"step": p["step"], "ppl": math.exp(p["value"])} for p in history.curve]
        after = perplexity_by_position(model, held.ids)
        checkpoint.rewrite(source, out, changed, describe(scaled))
        kl_after = heldout.distance_of(load_exact(out, run.config), run.artifacts["statistics"])
        logger.info(
            f"  window {window} to {longer} ({self.method}): perplexity over all of it "
            f"{mean_perplexity(before):.2f} unscaled, {mean_perplexity(at_once):.2f} scaled, "
            f"{mean_perplexity(after):.2f} in the end"
        )
        positions = [longer * (part + 1) // POSITIONS for part in range(POSITIONS)]
        return {
            "method": self.method,
            "factor": self.factor,
            "window": {"before": window, "after": longer},
            "rope_parameters": describe(out)["rope_parameters"],
            "ppl_by_position": {
                "positions": positions,
                "before": before,
                "scaled": at_once,
                "after": after,
            },
            "kl": {"before": kl_before.kl, "after": kl_after.kl},
            "heldout_kl": {"before": kl_before.kl, "after": kl_after.kl},
            "curve": curve,
            "kept": True,
            "notes": []
            if changed or not self.steps
            else ["no fine-tuning step lowered the loss at the new length; scaled only"],
        }

    def _windows(self, run: Run, length: int) -> tuple[data.Windows, data.Windows]:
        settings = run.config.data
        tokenizer = AutoTokenizer.from_pretrained(
            run.artifacts["dense"], trust_remote_code=run.config.model.trust_remote_code
        )
        rest, held, description = data.split(settings)
        # Conversations are joined as text: one alone would leave a long window to padding.
        rest, held = [data.plain(d) for d in rest], [data.plain(d) for d in held]
        wanted = max(1, self.steps * self.batch)
        texts = data.windows(
            rest,
            tokenizer,
            count=wanted,
            length=length,
            seed=run.config.seed + 2,
            description=settings.source,
        )
        long_held = data.windows(
            held,
            tokenizer,
            count=self.heldout_windows,
            length=length,
            seed=run.config.seed,
            description=description,
        )
        return texts, long_held


def _scale(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    parsed: PretrainedConfig,
    method: str,
    factor: float,
    window: int,
) -> None:
    """Make `folder` the model of `source` with its RoPE scaled, by links.

    config: config.json as it stands. parsed: as transformers reads it, which knows its several
    spellings and the defaults that it leaves out.
    """
    parameters = dict(getattr(parsed, "rope_parameters", None) or {})
    if parameters.get("rope_type", "default") != "default" or not parameters.get("rope_theta"):
        raise UserError(
            f"extend: the model's RoPE is {parameters.get('rope_type')!r} already, "
            "wanted an unscaled one; use extend.factor=1"
        )
    head_dim = getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads
    old = parsed.max_position_embeddings
    folder.mkdir(exist_ok=True)
    checkpoint.hand_on(source, folder)
    changed = {
        **config,
        "rope_parameters": rope.scaled(method, parameters, factor, head_dim, old),
        "max_position_embeddings": window,
    }
    # Older spellings of the same would contradict it.
    for name in ("rope_theta", "rope_scaling"):
        changed.pop(name, None)
    write_json(folder / "config.json", changed)


def next_token_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The loss in nats of every token but the first, [B, T - 1]."""
    return _losses(model(ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def _losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss in nats of `tokens` [B, T] by `logits` [B, T, V], which are made float32."""
    return torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), tokens, reduction="none"
    )


@torch.no_grad()
def losses_in_chunks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`next_token_losses` of one window `ids` [1, T], the logits of CHUNK positions at a time.

    A window of 32 thousand tokens has 20 GB of logits in float32 at V = 152 thousand.
    """
    states = model.base_model(ids, use_cache=False)
    hidden, found = states.last_hidden_state, []
    for first in range(0, ids.shape[1] - 1, CHUNK):
        tokens = ids[:, first + 1 : first + 1 + CHUNK]
        states.last_hidden_state = hidden[:, first : first + tokens.shape[1]]
        # In place of what the blocks give, so that the model itself makes logits of it: some
        # scale or cap what comes out of the head.
        given = model.base_model.register_forward_hook(lambda *_: states)
        try:
            logits = model(ids[:, :1], use_cache=False).logits
        finally:
            given.remove()
        found.append(_losses(logits, tokens))
    return torch.cat(found, 1)


def perplexity_by_position(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Perplexity over each of POSITIONS equal parts of windows `ids` [n, T]."""
    losses = torch.cat([losses_in_chunks(model, row.to(model.device)) for row in ids.split(1)])
    parts = losses.mean(0).tensor_split(POSITIONS)
    return [float(part.mean().exp()) for part in parts]


def mean_perplexity(parts: list[float]) -> float:
    """The perplexity of the whole window, from that of its equal parts."""
    return math.exp(sum(math.log(p) for p in parts) / len(parts))
