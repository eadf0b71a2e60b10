"""Generate and score in transformers or in our runtime. Started by engines.py, for which see there.

    .venv/bin/python benchmarks/worker_torch.py ENGINE REQUEST.json ANSWER.json

ENGINE is `transformers`, `native` (our runtime in bf16, which writes as it decodes, and so scores,
token by token, where its step does without modules), `exact` (in float32, with the reference
kernels) or `jittered` (the same with disturbed embeddings). The last two score only.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress.runtime.cache import cache_for
from compress.runtime.decode import Decoder
from compress.runtime.loader import load
from compress.runtime.token_step import Room, TokenStep, why_not

# The standard deviation of rounding to 8 significant bits, relative to the value, is 2^-10 to 2^-9.
BF16_ROUNDING = 2**-10
SCORES_ONLY = ("exact", "jittered")


def model_of(engine: str, folder: Path) -> PreTrainedModel:
    """The model as the engine loads it; 16 bit is bf16, in which CPUs are fast."""
    if engine == "transformers":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if engine == "native":
        return Decoder(load(folder, dtype=torch.bfloat16)).model
    model = load(folder, dtype=torch.float32, backend="reference")
    if engine == "jittered":
        embeddings = model.get_input_embeddings().weight
        noise = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
        embeddings.mul_(1 + BF16_ROUNDING * noise)
    return model


@torch.inference_mode()
def write(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens that follow `prompt`, greedily, by transformers' `generate`."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,
        max_new_tokens=new_tokens,
    )
    return output[0, len(prompt) :].tolist()


def decode(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The same by our decoder."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    written: list[int] = []
    for token in Decoder(model).tokens(torch.tensor([prompt]), new_tokens):
        written.append(int(token))
        if written[-1] in ends:
            break
    return written


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt: list[int], continuation: list[int], *, decoding: bool
) -> tuple[list[float], list[int]]:
    """Log-probability of each token of `continuation`, and the likeliest token in its place.

    decoding: token by token, as our runtime's step for one token gives them.
    """
    if decoding:
        cache = cache_for(model, "16")
        first = model(torch.tensor([prompt]), cache=cache).logits[:, -1]
        step, room = TokenStep(model), Room.of(cache, len(prompt) + len(continuation))
        rows = [step.logits(torch.tensor([[token]]), room) for token in continuation[:-1]]
        logits = torch.cat([first, *rows]).float()
    else:
        whole = model(torch.tensor([prompt + continuation]), use_cache=False).logits[0].float()
        logits = whole[len(prompt) - 1 : -1]
    said = logits.log_softmax(-1)
    tokens = torch.tensor(continuation)
    return said.gather(1, tokens[:, None])[:, 0].tolist(), said.argmax(-1).tolist()


def main(engine: str, request_file: str, answer_file: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_file).read_text())
    model = model_of(engine, Path(request["checkpoint"])).eval()
    prompts, continuations = request["prompts"], request["continuations"]
    written = []
    if engine == "native":
        written = [decode(model, prompt, request["new_tokens"]) for prompt in prompts]
    elif engine not in SCORES_ONLY:
        written = [write(model, prompt, request["new_tokens"]) for prompt in prompts]
    # The runtime goes first, with no text to score yet: its own is what all others score.
    decoding = engine == "native" and why_not(model, cache_for(model, "16")) is None
    pairs = zip(prompts, continuations or written, strict=True)
    scored = [score(model, *pair, decoding=decoding) for pair in pairs]
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
