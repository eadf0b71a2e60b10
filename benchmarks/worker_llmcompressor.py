"""Compress a model with llm-compressor, in its own environment. Started by fidelity.py.

.venv-peers/bin/python benchmarks/worker_llmcompressor.py REQUEST.json ANSWER.json

The request names the model, the method, the scheme, the linears left alone and the calibration
tokens [n, T]; the checkpoint is written to its `out`. An error of llm-compressor's own is part of
the answer: some methods do not run on every machine.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = ("llmcompressor", "auto-round", "compressed-tensors", "torch", "transformers")


def scheme(bits: int, group_size: int | None, activation_bits: int | None) -> QuantizationScheme:
    """Symmetric integer weights; INT8 activations per token, as they arrive, where asked for."""
    weights = QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=True,
        strategy="group" if group_size else "channel",
        group_size=group_size,
    )
    activations = None
    if activation_bits is not None:
        activations = QuantizationArgs(
            num_bits=activation_bits, type="int", symmetric=True, strategy="token", dynamic=True
        )
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


def recipe(method: str, target: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """llm-compressor's modifiers for `method`, each with its own defaults but for `options`."""
    match method:
        case "rtn":
            return [QuantizationModifier(**target, **options)]
        case "gptq":
            return [GPTQModifier(**target, **options)]
        case "awq":
            return [AWQModifier(**options), QuantizationModifier(**target)]
        case "smoothquant_gptq":
            return [SmoothQuantModifier(**options), GPTQModifier(**target)]
        case "autoround":
            return [AutoRoundModifier(**target, **options)]
    raise ValueError(f"method {method!r} is unknown here")


def compress(request: dict[str, Any]) -> None:
    """Quantize and save the model that the request names."""
    folder = request["model"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    groups = {"group_0": scheme(**request["scheme"])}
    target = {"config_groups": groups, "ignore": request["ignore"]}
    ids = request["ids"]
    tokens = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    oneshot(
        model=model,
        processor=tokenizer,
        recipe=recipe(request["method"], target, request["options"]),
        dataset=Dataset.from_dict(tokens),
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
        output_dir=request["out"],
    )


def main(request_file: str, answer_file: str) -> None:
    """Answer one request."""
    torch.manual_seed(0)
    answer: dict[str, Any] = {"versions": {name: version(name) for name in PACKAGES}}
    try:
        compress(json.loads(Path(request_file).read_text()))
    except Exception as error:  # whatever a peer raises is its result
        said = str(error).strip().splitlines() or [""]
        answer["failed"] = f"{type(error).__name__}: {said[0]}"
        raise
    finally:
        Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
