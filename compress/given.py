"""Options whose values are told right from wrong without torch, which takes seconds to import."""

import re
from typing import Any

ENGINES = ("any", "vllm", "sglang", "transformers", "native")
"""What will serve a checkpoint: what each accepts, compress.engines says."""

STAGES = (
    *("plan", "shrink", "calibrate", "allocate", "quantize", "distill", "extend"),
    *("export", "serve", "score", "report"),
)
"""All stages, in the order of the pipeline."""

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([MGT]i?B)")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these names and values, for json's `object_pairs_hook`. Raises ValueError for a
    name that is given twice, of which json would take the last.
    """
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f'"{twice}" is given twice')
    return dict(pairs)


def parse_size(text: str) -> int:
    """Bytes of a size such as `24GB` (10^9) or `80GiB` (2^30)."""
    found = SIZE.fullmatch(text)
    assert found is not None
    return int(float(found[1]) * UNITS[found[2].upper()])
