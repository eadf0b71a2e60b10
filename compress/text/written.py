"""Text that the model writes itself, begun with short pieces of other text.

More to learn from where the data are few: rounding learned on the calibration windows alone fits
them by heart, and what the model would say is what it has to go on saying (docs/log.md).
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from compress.errors import UserError
from compress.log import progress
from compress.runtime.loader import load
from compress.text.windows import Windows

PROMPT, PIECE = 32, 128
"""Tokens that a piece of text begins with, and those that it has in the end."""
BATCH = 64  # pieces written together


def write(
    folder: Path,
    windows: Windows,
    count: int,
    *,
    leading: list[int],
    seed: int,
    work: Path,
    device: str,
    trust_remote_code: bool = False,
) -> Tensor:
    """`count` windows as long as `windows`, ids [count, T]: pieces of PIECE tokens, joined, each
    begun with tokens of `windows`, after `leading` (BOS), and drawn at temperature 1.

    The whole model in `folder` is in memory, in 16 bit as it is stored. What is written is kept
    in `work`, so that a killed process goes on, to the same ids.
    """
    length = windows.ids.shape[1]
    prompts = _prompts(windows, -(-count * length // PIECE), leading, seed)
    model: PreTrainedModel | None = None
    parts = []
    batches = list(enumerate(prompts.split(BATCH)))
    for number, batch in progress(batches, "write", "batch", total=len(batches)):
        file = work / f"written_{number:04d}.safetensors"
        if not file.exists():
            if model is None:
                model = load(folder, device=device, trust_remote_code=trust_remote_code)
            aside = file.with_suffix(".tmp")
            save_file({"ids": _continued(model, batch, seed + number)}, aside)
            aside.rename(file)
        parts.append(load_file(file)["ids"])
    return torch.cat(parts).flatten()[: count * length].view(count, length)


def _prompts(windows: Windows, count: int, leading: list[int], seed: int) -> Tensor:
    """[count, PROMPT]: `leading`, and tokens from anywhere in the windows, but not padding."""
    rows = (windows.mask.sum(1) >= PROMPT).nonzero().flatten()
    if len(rows) == 0:
        raise UserError(
            f"{windows.description}: no window of {PROMPT} tokens to begin a text with; "
            "wanted one at least for calibrate.written: give longer text, or calibrate.written=0"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = rows[torch.randint(len(rows), (count,), generator=generator)]
    room = windows.mask[chosen].sum(1) - PROMPT
    first = (torch.rand(count, generator=generator) * (room + 1)).long()
    # A window has its own BOS: what comes after `leading` begins behind that.
    places = first.unsqueeze(1) + torch.arange(len(leading), PROMPT)
    begun = windows.ids[chosen].gather(1, places)
    return torch.cat([torch.tensor(leading, dtype=torch.int64).expand(count, -1), begun], 1)


@torch.no_grad()
def _continued(model: PreTrainedModel, prompts: Tensor, seed: int) -> Tensor:
    """The prompts [B, PROMPT], gone on with by the model to [B, PIECE]."""
    more = PIECE - prompts.shape[1]
    # The model's own settings may cut the unlikely, or punish what is said again.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        min_new_tokens=more,
        max_new_tokens=more,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=0,
    )
    ids = prompts.to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model.generate(ids, attention_mask=torch.ones_like(ids)).cpu()
