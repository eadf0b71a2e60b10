"""Load one checkpoint into every engine that runs here, and compare what they say.

    sh benchmarks/vllm_env.sh          # once: vLLM for CPU, in an environment of its own
    .venv/bin/python benchmarks/engines.py runs/smollm2_int8/model/checkpoint

Ten fixed prompts, through the chat template where there is one, go to each engine as the same
tokens. Each writes greedily; then each gives the log-probabilities of one common text, the one that
our runtime wrote. `exact` is our loader in float32 with the reference kernels, and `jittered` is
the same with its embeddings disturbed once by as much as bf16 rounds: it shows how large a small
difference becomes in this model, by which the distance of an engine from `exact` is to be judged.
The result is a table, and a JSON file with hardware and versions. Takes about 3 minutes for 135M
parameters on 2 cores. Exit status 1 where an engine failed. SGLang needs a GPU and is not among
them: docs/engines.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from compress.machine import hardware
from compress.quantization_config import group_specs
from compress.runtime.generate import chat_prompt, encode

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parent / ".venv-vllm/bin/python"
OURS = ("native", "exact", "jittered")  # native first: all others score its text
PEERS = ("transformers", "vllm")
LOG_PREFIX = re.compile(r"^\(.*?pid=\d+\) \w+ [\d-]+ [\d:]+ \[[^\]]*\]")
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
    """The first error that a worker's output tells of, with what follows a colon: the cause."""
    lines = [
        line for line in (LOG_PREFIX.sub("", raw).strip() for raw in output.split("\n")) if line
    ]
    first = next((i for i, line in enumerate(lines) if "Error: " in line), len(lines) - 1)
    following = 4 if lines and lines[first].endswith(":") else 1
    return " ".join(lines[first : first + following]) or "no output"


def compare(
    answer: dict[str, Any], exact: dict[str, Any], native: dict[str, Any]
) -> dict[str, Any]:
    """How an engine's answer differs from exact arithmetic and from our runtime."""
    same = [a == b for a, b in paired(answer["likeliest"], exact["likeliest"])]
    result = {
        "logprob_difference": {
            "to_exact": difference(answer["logprobs"], exact["logprobs"]),
            "to_native": difference(answer["logprobs"], native["logprobs"]),
        },
        "likeliest_token_agrees": sum(same) / len(same),
        "tokens_scored": len(same),
    }
    if answer["written"]:
        texts = list(zip(answer["written"], native["written"], strict=True))
        result["same_text_as_native"] = {
            "outputs": sum(a == b for a, b in texts),
            "of": len(texts),
            "tokens_before_first_difference": sum(common(a, b) for a, b in texts),
            "of_tokens": sum(len(b) for _, b in texts),
        }
    return result


def difference(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float]:
    """Mean and largest absolute difference, over all tokens of all prompts."""
    apart = [abs(a - b) for a, b in paired(ours, theirs)]
    return {"mean": sum(apart) / len(apart), "max": max(apart)}


def paired(ours: list[list[Any]], theirs: list[list[Any]]) -> list[tuple[Any, Any]]:
    """Both flattened, side by side."""
    return [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]


def common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line an engine."""
    lines = [
        "              |Δ log p| to exact    to native        likeliest   its own greedy text",
        "engine            mean      max     mean      max   as exact    same outputs  same tokens",
    ]
    for engine, result in results.items():
        if "failed" in result:
            lines.append(f"{engine:13} failed: {result['failed']}")
            continue
        apart = result["logprob_difference"]
        exact, native = apart["to_exact"], apart["to_native"]
        line = (
            f"{engine:13} {exact['mean']:8.4f} {exact['max']:8.4f} {native['mean']:8.4f} "
            f"{native['max']:8.4f} {result['likeliest_token_agrees']:10.1%}"
        )
        text = result.get("same_text_as_native")
        if text:
            tokens = text["tokens_before_first_difference"] / text["of_tokens"]
            line += f"    {text['outputs']:6} of {text['of']:2} {tokens:12.1%}"
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
    for engine in (*OURS, *engines):
        print(f"{engine} …", file=sys.stderr, flush=True)
        answers[engine] = ask(engine, request)
        if engine in OURS and "failed" in answers[engine]:
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
    specs = group_specs(quantization) if quantization else []
    return {
        "checkpoint": folder.name if folder.is_absolute() else str(folder),
        "scheme": " and ".join(spec.scheme for spec in specs) or "16 bit",
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
    parser.add_argument("--engines", nargs="+", default=list(PEERS), choices=PEERS)
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
