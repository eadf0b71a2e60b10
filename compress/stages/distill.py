"""distill: the original's soft labels win back what quantization lost."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from compress import checkpoint, data, heldout
from compress.algorithms.soft_labels import kl_top_k, top_k
from compress.errors import ConfigError
from compress.log import logger, progress
from compress.model import BlockModel, storage_dtype
from compress.source import describe
from compress.stage import Run
from compress.trainable import ATTENTION_INPUTS, load_exact, make_trainable, norms_and, scales
from compress.training import Schedule, relative_groups, train

CHUNK = 16  # windows for which the teacher's blocks are read once


@dataclass(kw_only=True)
class Distill:
    """A short training of scales, norms and Q, K (and V in 16 bit) towards the original.

    samples, length: windows of text for the labels, and tokens a window. top_k: the teacher's
    likeliest tokens that are kept, with the remaining mass as one more. batch: windows a step.
    epochs: times each window is seen. scale_rate: learning rate of the scales, relative to their
    mean size in each layer; rate: of the rest. measures: how often the held-out KL is taken.
    """

    name: ClassVar[str] = "distill"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics", "quantized")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "device")

    samples: int = 32
    length: int = 512
    top_k: int = 64
    batch: int = 2
    epochs: int = 1
    scale_rate: float = 1e-2
    rate: float = 2e-5
    measures: int = 4

    def __post_init__(self) -> None:
        problems = [
            f"distill.{name} is {value}; wanted at least {least}"
            for name, value, least in (
                ("samples", self.samples, 1),
                ("length", self.length, 16),
                ("top_k", self.top_k, 1),
                ("batch", self.batch, 1),
                ("epochs", self.epochs, 1),
                ("measures", self.measures, 1),
            )
            if value < least
        ]
        problems += [
            f"distill.{name} is {value}; wanted above 0"
            for name, value in (("scale_rate", self.scale_rate), ("rate", self.rate))
            if value <= 0
        ]
        if problems:
            raise ConfigError(problems)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        config, source = run.config, run.artifacts["quantized"]
        windows = self._windows(run)
        labels = self._labels(run, windows)

        model = make_trainable(load_exact(source, run.config))
        dtype = storage_dtype(model.config, config.model.dtype)
        groups = [
            *relative_groups(self.scale_rate, scales(model)),
            (self.rate, norms_and(ATTENTION_INPUTS, model)),
        ]
        steps = self.epochs * (len(windows.ids) // self.batch)
        order = _order(len(windows.ids), self.epochs, config.seed)

        def loss_of(step: int) -> Tensor:
            rows = order[step * self.batch : (step + 1) * self.batch]
            mask = windows.mask[rows]
            logits = model(
                windows.ids[rows].to(model.device),
                attention_mask=None if mask.all() else mask.to(model.device),
                use_cache=False,
            ).logits
            real = mask.bool().to(model.device)
            ids, probabilities = labels["ids"][rows], labels["probabilities"][rows]
            return kl_top_k(
                logits[real], ids.to(model.device)[real], probabilities.to(model.device)[real]
            )

        history = train(
            groups,
            loss_of,
            lambda: heldout.distance_of(model, run.artifacts["statistics"]).kl,
            Schedule(steps, measures=self.measures),
            run.work,
            what="distill",
            dtype=dtype,
        )
        kept = history.best_step > 0
        if kept:
            checkpoint.rewrite(source, out, history.best, describe(source))
        else:
            checkpoint.hand_on(source, out)
        before, after = _served_kl(run, source), _served_kl(run, out)
        logger.info(
            f"  held-out KL {before:.4f} to {after:.4f}, best at step {history.best_step}"
            if kept
            else f"  held-out KL {before:.4f} was not improved; handed on as it was"
        )
        step_tokens = self.batch * windows.ids.shape[1]
        return {
            "labels": labels["figures"],
            "trained_parameters": sum(p.numel() for _, g in groups for p in g.values()),
            "steps": steps,
            "best_step": history.best_step,
            "tokens": steps * step_tokens,
            "kl": {"before": before, "after": after},
            "curve": [
                {"step": p["step"], "tokens": p["step"] * step_tokens, "kl": p["value"]}
                for p in history.curve
            ],
            "kept": kept,
            "heldout_kl": {"before": before, "after": after},
            "notes": [] if kept else ["no step improved the held-out KL; the input is handed on"],
        }

    def _windows(self, run: Run) -> data.Windows:
        settings = run.config.data
        rest, _, _ = data.split(settings)
        return data.windows(
            rest,
            AutoTokenizer.from_pretrained(
                run.artifacts["dense"], trust_remote_code=run.config.model.trust_remote_code
            ),
            count=self.samples,
            length=min(self.length, describe(run.artifacts["dense"])["max_position_embeddings"]),
            seed=run.config.seed + 1,
            description=settings.source,
        )

    @torch.no_grad()
    def _labels(self, run: Run, windows: data.Windows) -> dict[str, Any]:
        """The teacher's top-k ids and probabilities [n, T, k]; made once, kept on disk."""
        teacher: BlockModel | None = None
        started = time.monotonic()
        parts = []
        chunks = range(0, len(windows.ids), CHUNK)
        for first in progress(chunks, "soft labels", "chunk", total=len(chunks)):
            file = run.work / f"labels_{first:06d}.safetensors"
            if not file.exists():
                if teacher is None:
                    teacher = BlockModel(
                        run.artifacts["dense"],
                        device=run.config.device,
                        trust_remote_code=run.config.model.trust_remote_code,
                    )
                rows = slice(first, first + CHUNK)
                _write_labels(teacher, windows.ids[rows], windows.mask[rows], self.top_k, file)
            parts.append(load_file(file))
        ids = torch.cat([part["ids"] for part in parts])
        probabilities = torch.cat([part["probabilities"] for part in parts])
        mass = probabilities.float().sum(-1)[windows.mask.bool()].mean()
        figures = {
            "tokens": windows.tokens,
            "top_k": self.top_k,
            "bytes": ids.numel() * ids.element_size()
            + probabilities.numel() * probabilities.element_size(),
            "seconds": time.monotonic() - started,
            "mass": float(mass),
        }
        return {"ids": ids, "probabilities": probabilities, "figures": figures}


def _served_kl(run: Run, folder: Path) -> float:
    """The held-out KL of the model in `folder`, loaded from disk and run by the kernels."""
    return heldout.distance_of(load_exact(folder, run.config), run.artifacts["statistics"]).kl


def _write_labels(teacher: BlockModel, ids: Tensor, mask: Tensor, k: int, file: Path) -> None:
    batches = [
        (i.to(teacher.device), m.to(teacher.device))
        for i, m in zip(ids.split(2), mask.split(2), strict=True)
    ]
    hidden = [teacher.embed(i, m) for i, m in batches]
    for index in range(len(teacher)):
        with teacher.block(index) as block:
            for number, (i, m) in enumerate(batches):
                hidden[number] = block(hidden[number], **teacher.calls(i, m)[index])
    kept = [top_k(teacher.logits(h[row : row + 1]), k) for h in hidden for row in range(len(h))]
    aside = file.with_suffix(".tmp")
    labels = {
        "ids": torch.cat([ids for ids, _ in kept]).cpu(),
        "probabilities": torch.cat([p for _, p in kept]).cpu(),
    }
    save_file(labels, aside)
    aside.rename(file)


def _order(count: int, epochs: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
