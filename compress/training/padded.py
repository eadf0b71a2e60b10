"""A given student whose output is padded otherwise than its teacher's, as in one family of models.

Qwen2.5 has outputs of 151936 rows in its small models and of 152064 in its large ones, and one
tokenizer. What a student says of tokens is compared with the original row by row, so it is given as
many.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from compress import checkpoint
from compress.blocks.structure import stored_name
from compress.model import skeleton
from compress.source import describe, read_config
from compress.tensors import TensorFiles


def pad_vocabulary(source: Path, folder: Path, rows: int, trust_remote_code: bool) -> None:
    """Write the model of `source` to `folder` with an embedding and an output of `rows` rows.

    What is too many is cut. What is missing repeats the last row there is, which is padding itself
    or a token seldom said, and no input ever asks for it.
    """
    config, files = read_config(source, trust_remote_code), TensorFiles(source)
    missing = max(0, rows - config.get_text_config().vocab_size)
    changed = {}
    for name in _of_tokens(config, trust_remote_code) & files.keys():
        tensor = files[name]
        changed[name] = torch.cat([tensor[:rows], tensor[-1:].repeat_interleave(missing, 0)])
    checkpoint.rewrite(source, folder, changed, _with_rows(describe(source), rows))


def _of_tokens(config: PretrainedConfig, trust_remote_code: bool) -> set[str]:
    """What the tensors with a row a token may be called in the files of a model."""
    model = skeleton(config, torch.bfloat16, trust_remote_code)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        f"{called}.{part}"
        for name, module in model.named_modules()
        if any(module is end for end in ends)
        for called in (name, stored_name(config, name))
        for part, _ in module.named_parameters(recurse=False)
    }


def _with_rows(described: dict[str, Any], rows: int) -> dict[str, Any]:
    """config.json with another vocab_size, where it is."""
    if isinstance(text := described.get("text_config"), dict) and "vocab_size" in text:
        described = {**described, "text_config": {**text, "vocab_size": rows}}
    return {**described, "vocab_size": rows} if "vocab_size" in described else described
