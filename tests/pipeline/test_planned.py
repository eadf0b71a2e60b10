"""What the stage plan counts for serving: as the model will be served, on the device of the run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress import pipeline
from compress.config import Config

Small = Callable[..., Config]
PYTHON = 450_000_000


def planned(config: Config) -> dict[str, Any]:
    pipeline.run(config)
    manifest = json.loads((Path(config.out or "") / "stages/plan.json").read_text())
    return dict(manifest["metrics"])


@pytest.mark.parametrize(
    ("words", "tokens", "lengths", "noted"),
    [
        (["stages=[plan]"], 256, [256], True),
        (["stages=[plan]", "plan.tokens=100"], 100, [100], False),
        (["only=plan"], 512, [512], True),  # the recipe extends the window
        (["only=plan", "extend.factor=8"], 2048, [1024, 2048], False),
    ],
)
def test_requests_are_counted_up_to_the_window(
    small: Small, words: list[str], tokens: int, lengths: list[int], noted: bool
) -> None:
    plan = planned(small(*words))
    memory, per_token = plan["memory"], plan["kv_cache"]["bytes_per_token"]
    assert (memory["tokens"], memory["kv_cache"]) == (tokens, tokens * per_token)
    assert [r["tokens"] for r in plan["kv_cache"]["table"] if r["batch"] == 1] == lengths
    note = (
        f"requests are counted with the {tokens} tokens of the model's window, not the 2048 of "
        "plan.tokens"
    )
    assert (note in plan["notes"]) == noted


@pytest.mark.parametrize(("word", "window"), [("stages=[plan]", 1024), ("extend.factor=2", 2048)])
def test_the_window_of_a_yarn_is_the_one_that_extend_starts_from(
    small: Small, tiny_model: Path, tmp_path: Path, word: str, window: int
) -> None:
    yarn = Path(shutil.copytree(tiny_model, tmp_path / "yarn"))
    fields = json.loads((yarn / "config.json").read_text())
    fields["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": fields["max_position_embeddings"],
    }
    (yarn / "config.json").write_text(json.dumps(fields))
    words = [f"model.path={yarn}", "only=plan", "plan.tokens=4096", word]
    assert planned(small(*words))["memory"]["tokens"] == window


@pytest.mark.parametrize(
    ("memory", "overhead"), [("null", PYTHON), ("2GB", PYTHON), ("20GB", 1_000_000_000)]
)
def test_on_a_cpu_python_is_of_the_overhead(small: Small, memory: str, overhead: int) -> None:
    found = planned(small("stages=[plan]", "device=cpu", f"plan.memory={memory}"))["memory"]
    assert found["overhead"] == overhead
    parts = ("weights", "kv_cache", "activations", "overhead")
    assert found["total"] == sum(found[part] for part in parts)
