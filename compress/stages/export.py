"""export: the folder that engines load, held against what was measured before it is called done."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoTokenizer, GenerationConfig

from compress import checkpoint, heldout
from compress.artifact import write_text
from compress.errors import ConfigError, UserError
from compress.log import logger
from compress.report.card import model_card
from compress.report.words import said_size
from compress.stage import Run
from compress.tensors import TensorFiles

SAME = 0.05
"""How far, relative to itself, the KL as exported may lie from what the last stage measured:
nothing on the same machine, but INT8 activations make a step of the smallest difference, so another
number of threads or another CPU moves it by percents."""
LEAST_KL = 1e-4
CHANGES_WEIGHTS = ("quantize", "distill", "extend")


@dataclass(kw_only=True)
class Export:
    """The deployable checkpoint. shard_gb: largest safetensors file, in GB."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics", "quantized")
    gives: ClassVar[str | None] = "checkpoint"
    shares: ClassVar[tuple[str, ...]] = ("model", "engine", "device")

    shard_gb: float = 5.0

    def __post_init__(self) -> None:
        if self.shard_gb <= 0:
            raise ConfigError([f"export.shard_gb is {self.shard_gb}; wanted above 0"])

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        source = run.artifacts["quantized"]
        checkpoint.reshard(source, out, shard_bytes=int(self.shard_gb * 1e9))
        metrics = {name: manifest["metrics"] for name, manifest in run.manifests.items()}
        card = model_card(run.config.recipe, run.config.model.path, metrics)
        write_text(out / "README.md", card)

        verified = self._verify(run, source, out, metrics)
        files = [{"name": f.name, "bytes": f.stat().st_size} for f in sorted(out.iterdir())]
        weights = sum(f.stat().st_size for f in TensorFiles.files(out))
        read = verified["read_back"]
        logger.info(
            f"  {said_size(weights)} in {len(TensorFiles.files(out))} file(s), "
            f"{verified['tensors']} tensors, {'read back and equal' if read else 'linked'}"
        )
        parameters = metrics.get("plan", {}).get("parameters")
        return {
            "files": files,
            "bytes": weights,
            "bits_per_weight": 8 * weights / parameters if parameters else None,
            "verified": verified,
        }

    def _verify(self, run: Run, source: Path, out: Path, metrics: dict[str, Any]) -> dict[str, Any]:
        """Hold what lies in `out` against its source and its original, and measure it again."""
        tensors, read_back = _same_tensors(source, out)
        trusted = run.config.model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=trusted)
        original = AutoTokenizer.from_pretrained(run.artifacts["dense"], trust_remote_code=trusted)
        if (tokenizer.chat_template, len(tokenizer)) != (original.chat_template, len(original)):
            raise UserError(f"{out}: the tokenizer or its chat template was changed on the way")
        if (out / "generation_config.json").exists():
            GenerationConfig.from_pretrained(out)
        measured = heldout.distance(
            out,
            run.artifacts["statistics"],
            device=run.config.device,
            trust_remote_code=trusted,
        )
        return {
            "tensors": tensors,
            "read_back": read_back,
            "kl": measured.kl,
            "kl_moved": _kl_moved(out, measured.kl, metrics),
        }


def _same_tensors(source: Path, out: Path) -> tuple[int, int]:
    """How many tensors lie in `out`, each once, and how many of them were read back: all that are
    not in a link to the very file of `source`. Raises UserError where one is not the source's.
    """
    wanted, found = TensorFiles(source), TensorFiles(out)
    if wanted.keys() != found.keys():
        odd = sorted(wanted.keys() ^ found.keys())
        raise UserError(f"{out}: tensors were lost or doubled on the way to disk: {odd[:5]}")
    written = [n for n in wanted if not wanted.file_of[n].samefile(found.file_of[n])]
    for name in written:
        if not torch.equal(wanted[name], found[name]):
            raise UserError(f"{out}: {name} read back from disk differs from what was written")
    return len(found), len(written)


def _kl_moved(out: Path, kl: float, metrics: Mapping[str, Any]) -> float | None:
    """How far the KL of the checkpoint `out` is from what the last stage that changed weights
    measured; None where none did. Raises UserError where the two are not of one model.
    """
    measuring = [s for s in CHANGES_WEIGHTS if "heldout_kl" in metrics.get(s, {})]
    if not measuring:
        return None
    before = metrics[measuring[-1]]["heldout_kl"]["after"]
    moved = abs(kl - before)
    if moved > max(LEAST_KL, SAME * kl):
        raise UserError(
            f"{out}: KL {kl:.6f} as exported, {before:.6f} as {measuring[-1]} measured it; "
            "the checkpoint is not the model that was measured"
        )
    return moved
