"""A checkpoint's own tokenizer, which may be missing or broken."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

BROKEN = (OSError, ValueError, KeyError, ImportError)
"""What transformers raises for a tokenizer that is missing or cannot be read."""


def tokenizer_of(
    folder: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a model's folder; None where there is none that loads."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except BROKEN:
        return None
