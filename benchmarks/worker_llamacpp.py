"""Answers requests through llama.cpp; benchmarks/decode.py starts it with a Python that has one.

    python worker_llamacpp.py quantize MODEL.gguf Q8_0|Q4_0 OUT.gguf
    python worker_llamacpp.py serve MODEL.gguf THREADS CLOCK

Needs the package cyllama, whose llama.cpp is built for AVX2. `quantize` takes a quantized model
too, which is enough to time one. `serve` reads lines `prompt new`, numbers of tokens, and writes
the seconds of each new token as a JSON list; the prompt is made of token 100.
"""

import json
import sys
import time
from itertools import pairwise

from cyllama.llama import llama_cpp

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}
"""llama.cpp's llama_ftype."""


def quantize(source: str, kind: str, out: str) -> None:
    """Write the model `source` as `kind` at `out`."""
    params = llama_cpp.LlamaModelQuantizeParams()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[kind], True, 1
    llama_cpp.model_quantize(source, out, params)


def serve(path: str, threads: str, clock: str) -> None:
    """Answer the requests of stdin."""
    now = getattr(time, clock)
    llama_cpp.disable_logging()
    model = llama_cpp.LlamaModel(path)
    params = llama_cpp.LlamaContextParams()
    params.n_ctx, params.n_threads, params.n_threads_batch = 2048, int(threads), int(threads)
    context = llama_cpp.LlamaContext(model, params)
    sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
    sampler.add_greedy()
    for line in sys.stdin:
        prompt, new = map(int, line.split())
        context.kv_cache_clear()
        marks, length, ids = [now()], 0, [100] * prompt
        for _ in range(new):
            context.decode(llama_cpp.llama_batch_get_one(ids, length))
            length += len(ids)
            ids = [sampler.sample(context, -1)]
            marks.append(now())
        seconds = [after - before for before, after in pairwise(marks)]
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    {"quantize": quantize, "serve": serve}[sys.argv[1]](*sys.argv[2:])
