"""200 requests, 16 in flight, against our server by the official client: none lost, all as offline.

    .venv/bin/python benchmarks/serving.py runs/smollm2_int8/model/checkpoint

Starts `python -m compress.serve` as a process of its own. Chats ask about passages of Python's
documentation, of mixed lengths, for answers of mixed lengths; every second one is streamed. Then
each is answered offline, greedily and alone, by `generate`, and the texts are compared. Writes a
JSON file with hardware and versions: requests that were lost or differ, the server's memory before
and at its most, the KV cache's most tokens, latencies as the clients saw them. Exit status 1 where
one was lost. Offline takes most of the time: see --requests.
"""

import argparse
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import psutil
import torch
from openai import OpenAI, OpenAIError
from transformers import AutoTokenizer

from compress.artifact import write_json
from compress.log import progress
from compress.machine import hardware, packages
from compress.runtime.generate import chat_prompt, generate
from compress.runtime.loader import load

WORDS = (4, 12, 40, 100, 180)
"""Lengths of passages."""
NEW_TOKENS = (4, 8, 16, 32, 64)


def questions(number: int, seed: int) -> list[tuple[str, int]]:
    """Texts to answer, each with the most tokens of its answer."""
    draw = random.Random(seed)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    asked = []
    for _ in range(number):
        length = draw.choice(WORDS)
        start = draw.randrange(len(words) - length)
        passage = " ".join(words[start : start + length])
        asked.append((f"What is this about? {passage}", draw.choice(NEW_TOKENS)))
    return asked


def ask(client: OpenAI, model: str, question: str, most: int, stream: bool) -> dict[str, Any]:
    """One answer: its text, or what went wrong; seconds to its first token and to its end."""
    start = time.perf_counter()
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": most,
        "temperature": 0,
    }
    try:
        if not stream:
            whole = client.chat.completions.create(**asked)
            text = whole.choices[0].message.content
            return {"text": text, "whole_s": time.perf_counter() - start}
        pieces, first = [], None
        for event in client.chat.completions.create(**asked, stream=True):
            if event.choices and event.choices[0].delta.content:
                first = first or time.perf_counter() - start
                pieces.append(event.choices[0].delta.content)
        whole_s = time.perf_counter() - start
        return {"text": "".join(pieces), "ttft_s": first, "whole_s": whole_s}
    except OpenAIError as error:
        return {"lost": f"{type(error).__name__}: {error}"}


def served(
    checkpoint: Path, asked: list[tuple[str, int]], in_flight: int, running: int
) -> dict[str, Any]:
    """All answers, and what the server took."""
    command = [sys.executable, "-m", "compress.serve", f"checkpoint={checkpoint}", "port=0"]
    command += [f"running={running}", "name=model"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        for said in server.stderr:
            if " is served at " in said:
                break
        else:
            sys.exit(said.strip() or "compress.serve ended without a word")
        url = said.split()[-1]
        process = psutil.Process(server.pid)
        before, sizes = process.memory_info().rss, [0]
        client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600)

        def one(i: int) -> dict[str, Any]:
            answer = ask(client, "model", *asked[i], stream=i % 2 == 1)
            sizes.append(process.memory_info().rss)
            return answer

        start = time.perf_counter()
        try:
            with ThreadPoolExecutor(in_flight) as pool:
                coming = pool.map(one, range(len(asked)))
                answers = list(progress(coming, "served", "request", total=len(asked)))
            seconds = time.perf_counter() - start
            with urllib.request.urlopen(url.replace("/v1", "/metrics")) as read:
                lines = read.read().decode().splitlines()
        finally:
            server.terminate()
        status = server.wait()
        metrics = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {
        "answers": answers,
        "seconds": seconds,
        "tokens_per_s": float(metrics["compress_new_tokens_total"]) / seconds,
        "kv_tokens_most": float(metrics["compress_kv_tokens_most"]),
        "kv_tokens_left": float(metrics["compress_kv_tokens"]),
        "rss_before": before,
        "rss_most": max(sizes),
        "exit_status": status,
    }


def main() -> int:
    """Serve, compare, write, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving.json"))
    options = parser.parse_args()
    asked = questions(options.requests, options.seed)
    found = served(options.checkpoint, asked, options.in_flight, options.running)
    answers = found.pop("answers")
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = load(options.checkpoint)
    differ, lost = [], [a["lost"] for a in answers if "lost" in a]
    pairs = list(zip(asked, answers, strict=True))
    for (question, most), answer in progress(pairs, "offline", "request"):
        prompt = chat_prompt(tokenizer, question)
        (text,) = generate(model, tokenizer, [prompt], max_new_tokens=most, batch_size=1)
        if answer.get("text", text) != text:
            differ.append({"question": question, "served": answer["text"], "offline": text})
    waits = {
        key: [float(x) for x in np.percentile([a[key] for a in answers if key in a], [50, 95, 99])]
        for key in ("ttft_s", "whole_s")
        if any(key in a for a in answers)
    }
    result = {
        "requests": len(asked),
        "in_flight": options.in_flight,
        "lost": lost,
        "differ": differ,
        **found,
        "p50_p95_p99": waits,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "packages": packages(),
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(options.out, result)
    print(
        f"{len(asked)} requests, {options.in_flight} in flight: {len(lost)} lost, {len(differ)} "
        f"differ from offline; {found['tokens_per_s']:.1f} tokens/s; memory "
        f"{found['rss_before'] / 1e6:.0f} to {found['rss_most'] / 1e6:.0f} MB; "
        f"KV cache at most {found['kv_tokens_most']:.0f} tokens; exit status "
        f"{found['exit_status']}; {options.out}"
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
