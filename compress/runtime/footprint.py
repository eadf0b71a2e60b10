"""What a model takes to load and to answer one request, in a process of its own.

In the process that does everything else, peak memory would be that of everything else.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compress.errors import UserError


def footprint(
    folder: Path,
    *,
    device: str,
    backend: str | None,
    prompt_tokens: int,
    threads: int,
    kv_cache: str = "16",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Load seconds and peak memory of `folder`, measured by a fresh Python on the same machine.

    `peak_rss_bytes` is the process's, Python and torch included; `idle_rss_bytes` what these took
    before the model was loaded; `peak_device_bytes` what torch held on a GPU (0 on CPU).
    """
    request = {
        "folder": str(folder),
        "device": device,
        "backend": backend,
        "prompt_tokens": prompt_tokens,
        "threads": threads,
        "kv_cache": kv_cache,
        "trust_remote_code": trust_remote_code,
    }
    command = [sys.executable, "-m", "compress.runtime.footprint", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{folder}: could not be loaded to measure its memory: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(
    folder: str,
    device: str,
    backend: str | None,
    prompt_tokens: int,
    threads: int,
    kv_cache: str,
    trust_remote_code: bool,
) -> dict[str, Any]:
    import torch

    from compress.machine import high_water
    from compress.runtime.decode import Decoder
    from compress.runtime.latency import time_request
    from compress.runtime.loader import load

    torch.set_num_threads(threads)
    idle = high_water()
    start = time.perf_counter()
    model = load(Path(folder), device=device, backend=backend, trust_remote_code=trust_remote_code)
    loaded = time.perf_counter() - start
    prompt = torch.zeros((1, prompt_tokens), dtype=torch.long)
    time_request(Decoder(model, kv_cache=kv_cache), prompt, new_tokens=2)
    return {
        "load_seconds": loaded,
        "peak_rss_bytes": high_water(),
        "idle_rss_bytes": idle,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(**json.loads(sys.argv[1]))) + "\n")
