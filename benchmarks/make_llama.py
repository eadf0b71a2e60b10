"""Write a Llama of random weights, of the shape of a real one, to measure memory and time with.

    .venv/bin/python benchmarks/make_llama.py FOLDER --shape 7b
    .venv/bin/python benchmarks/make_llama.py FOLDER --shape 7b --blocks 4   # the same, cut short

A whole Hugging Face folder, bfloat16, in shards, made in the memory of a part of one matrix. The
7B takes 13.5 GB of disk. The same arguments give the same bytes.
"""

import argparse
import itertools
import json
import math
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from compress.model import skeleton
from compress.tensors import INDEX, SINGLE, write_stream

SHAPES = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    },
}
STD = 0.02
PIECE = 1 << 24
"""Weights made at a time: 67 MB in float32."""
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "*.txt")


def make(
    folder: Path,
    shape: str,
    *,
    blocks: int | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = 2_000_000_000,
    seed: int = 0,
) -> int:
    """Write the folder and return its bytes of weights. blocks: as many, not the shape's own.

    tokenizer: a folder to copy it from, its vocabulary not larger than the shape's; None: one token
    a byte.
    """
    sizes = SHAPES[shape] | ({} if blocks is None else {"num_hidden_layers": blocks})
    config = LlamaConfig(
        **sizes,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    if tokenizer is None:
        byte_tokenizer().save_pretrained(folder)
    else:
        for file in itertools.chain.from_iterable(tokenizer.glob(name) for name in COMPANIONS):
            shutil.copyfile(file, folder / file.name)

    shapes = {n: tuple(p.shape) for n, p in skeleton(config, torch.bfloat16).named_parameters()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, size in shapes.items():
        if shards[-1] and weights_bytes(shards[-1]) + weights_bytes({name: size}) > shard_bytes:
            shards.append({})
        shards[-1][name] = size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        numbered = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard_file = SINGLE if len(shards) == 1 else numbered
        parts = (
            part
            for name, size in shard.items()
            for part in random_weight(name, size, sizes["num_hidden_layers"], seed)
        )
        write_stream(folder / shard_file, {n: (torch.bfloat16, s) for n, s in shard.items()}, parts)
        weight_map |= dict.fromkeys(shard, shard_file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": weights_bytes(shapes)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return weights_bytes(shapes)


def weights_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of tensors of these shapes in bfloat16."""
    return sum(2 * math.prod(shape) for shape in shapes.values())


def random_weight(name: str, shape: tuple[int, ...], blocks: int, seed: int) -> Iterator[Tensor]:
    """A weight in pieces of rows: norms are ones; matrices are normal, and what adds to the
    residual stream is smaller by the square root of how often that happens, as in GPT-2, so that
    the stream stays within bounds.
    """
    if len(shape) == 1:
        yield torch.ones(shape, dtype=torch.bfloat16)
        return
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = STD / math.sqrt(2 * blocks) if adds else STD
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    rows = max(1, PIECE // shape[1])
    for first in range(0, shape[0], rows):
        piece = torch.randn(min(rows, shape[0] - first), shape[1], generator=generator)
        yield piece.mul_(std).to(torch.bfloat16)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte; texts are led by BOS."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([BOS, EOS, PAD, *letters])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to; must not be there yet")
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--blocks", type=int, help="decoder blocks, instead of the shape's own")
    parser.add_argument("--tokenizer", type=Path, help="a folder to copy the tokenizer from")
    parser.add_argument("--shard-gb", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} is there already; remove it, or name another folder")
    total = make(
        options.folder,
        options.shape,
        blocks=options.blocks,
        tokenizer=options.tokenizer,
        shard_bytes=int(options.shard_gb * 1e9),
        seed=options.seed,
    )
    print(f"{options.folder}: {total / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
