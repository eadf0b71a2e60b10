"""export: the folder that engines load, read back from disk before it is called done."""

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
from compress.stage import Run
from compress.tensors import TensorFiles

SAME = 0.05
"""How far, relative to itself, the KL from disk may lie from what the last stage measured: nothing
on the same machine, but INT8 activations make a step of the smallest difference, so another number
of threads or another CPU moves it by percents."""
LEAST_KL = 1e-4
CHANGES_WEIGHTS = ("quantize", "distill", "extend")


@dataclass(kw_only=True)
class Export:
    """The deployable checkpoint. shard_gb: largest safetensors file, in GB."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 1
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
        logger.info(
            f"  {weights / 1e6:.1f} MB in {len(TensorFiles.files(out))} file(s), "
            f"{verified['tensors']} tensors, read back from disk and equal"
        )
        parameters = metrics.get("plan", {}).get("parameters")
        return {
            "files": files,
            "bytes": weights,
            "bits_per_weight": 8 * weights / parameters if parameters else None,
            "verified": verified,
        }

    def _verify(self, run: Run, source: Path, out: Path, metrics: dict[str, Any]) -> dict[str, Any]:
        """Read everything back: each tensor once and equal, tokenizer whole, the same KL."""
        wanted, found = TensorFiles(source), TensorFiles(out)
        if wanted.keys() != found.keys():
            odd = sorted(wanted.keys() ^ found.keys())
            raise UserError(f"{out}: tensors were lost or doubled on the way to disk: {odd[:5]}")
        for name in wanted:
            if not torch.equal(wanted[name], found[name]):
                raise UserError(f"{out}: {name} read back from disk differs from what was written")
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
        last = [
            metrics[s]["heldout_kl"]["after"]
            for s in CHANGES_WEIGHTS
            if "heldout_kl" in metrics.get(s, {})
        ]
        difference = abs(measured.kl - last[-1]) if last else None
        if difference is not None and difference > max(LEAST_KL, SAME * measured.kl):
            raise UserError(
                f"{out}: KL {measured.kl:.6f} from disk, {last[-1]:.6f} in memory; "
                "the checkpoint is not the model that was measured"
            )
        return {
            "tensors": len(found),
            "kl": measured.kl,
            "kl_to_memory": difference,
        }
