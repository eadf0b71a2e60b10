"""Generate and score in transformers or in our runtime. Started by engines.py, for which see there.

    .venv/bin/python benchmarks/worker_torch.py (transformers|native|exact) REQUEST.json ANSWER.json

`exact` is our loader in float32 with the reference kernels; it scores and does not generate.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress.runtime.loader import load


def model_of(engine: str, folder: Path) -> PreTrainedModel:
    """The model as the engine loads it; 16 bit is bf16, in which CPUs are fast."""
    if engine == "transformers":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if engine == "native":
        return load(folder, dtype=torch.bfloat16)
    return load(folder, dtype=torch.float32, backend="reference")


@torch.inference_mode()
def write(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens that follow `prompt`, greedily."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=new_tokens,
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt: list[int], continuation: list[int]
) -> tuple[list[float], list[int]]:
    """Log-probability of each token of `continuation`, and the likeliest token in its place."""
    logits = model(torch.tensor([prompt + continuation]), use_cache=False).logits[0].float()
    said = logits[len(prompt) - 1 : -1].log_softmax(-1)
    tokens = torch.tensor(continuation)
    return said.gather(1, tokens[:, None])[:, 0].tolist(), said.argmax(-1).tolist()


def main(engine: str, request_file: str, answer_file: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_file).read_text())
    model = model_of(engine, Path(request["checkpoint"])).eval()
    prompts, continuations = request["prompts"], request["continuations"]
    written = []
    if engine != "exact":
        written = [write(model, prompt, request["new_tokens"]) for prompt in prompts]
    # The runtime goes first, with no text to score yet: its own is what all others score.
    scored = [score(model, *pair) for pair in zip(prompts, continuations or written, strict=True)]
    packages = ("torch", "transformers", "compressed-tensors")
    answer = {
        "versions": {name: version(name) for name in packages},
        "written": written,
        "logprobs": [logprobs for logprobs, _ in scored],
        "likeliest": [likeliest for _, likeliest in scored],
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
