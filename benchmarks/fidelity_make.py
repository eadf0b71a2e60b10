"""The contenders of fidelity.py, and how each is run: once, with what it costs.

Everything that a checkpoint depends on is in the name of its folder, so nothing is made twice.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress import engines, source
from compress.artifact import fingerprint, write_json, write_text
from compress.blocks.structure import head_names
from compress.engines import Preflight
from compress.eval import fidelity
from compress.model import linear_shapes, skeleton
from compress.qtensor import QuantSpec
from compress.quantization_config import read_quantization_config
from compress.source import read_config
from compress.stages.calibrate import Calibrate
from compress.stages.export import Export
from compress.stages.quantize import Quantize
from compress.text.documents import Data, split
from compress.text.windows import draw, leading_ids

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
PEERS_PYTHON = ROOT / ".venv-peers/bin/python"
SCHEMES = {
    "w4a16-g64": QuantSpec(4, group_size=64),
    "w4a16": QuantSpec(4),
    "w8a8": QuantSpec(8, activation_bits=8),
}
RECIPES = {4: "int4_7b", 8: "int8_7b"}  # the ones that are for no model in particular
SAMPLES, LENGTH = 48, 512
LEARNED = {"quantize.rounding": "learned", "calibrate.written": 96}
PLAIN = {"quantize.rounding": "nearest", "quantize.smooth": False, "quantize.clip": False}


@dataclass(frozen=True)
class Contender:
    """One way to compress. method: that of worker_llmcompressor.py; None: our pipeline.

    options: of llm-compressor's modifier, beside its defaults, or fields of our configuration.
    bits: of the weights in the schemes that it is run for.
    """

    name: str
    label: str
    method: str | None
    bits: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


CONTENDERS = (
    Contender("rtn", "llm-compressor, round-to-nearest", "rtn", (4, 8)),
    Contender("gptq", "llm-compressor, GPTQ", "gptq", (4, 8)),
    Contender("awq", "llm-compressor, AWQ", "awq", (4,)),
    Contender(
        "smoothquant-gptq",
        "llm-compressor, SmoothQuant 0.8 + GPTQ",
        "smoothquant_gptq",
        (8,),
        {"smoothing_strength": 0.8},
    ),
    Contender("autoround", "AutoRound, 200 iterations", "autoround", (4,), {"iters": 200}),
    Contender("ours-rtn", "ours, round-to-nearest", None, (4, 8), PLAIN),
    Contender("ours", "ours, as shipped", None, (4, 8)),
    Contender("ours-gptq", "ours, GPTQ", None, (8,), {"quantize.rounding": "gptq"}),
    Contender("ours-learned", "ours, learned", None, (4, 8), LEARNED),
)


@dataclass(frozen=True)
class Setting:
    """What all contenders share for one scheme. chosen: which linears are quantized, by what spec.

    ids [n, T]: calibration tokens, the first of `train`. text: a file that holds just these;
    heldout: one of other text of the same kind, for our pipeline's own measurements. folder: where
    checkpoints are kept.
    """

    chosen: Preflight
    model: Path
    train: Path
    ids: Tensor
    text: Path
    heldout: Path
    folder: Path

    @property
    def spec(self) -> QuantSpec:
        return self.chosen.spec


def prepare(scheme: str, model: Path, train: Path, work: Path) -> Setting:
    """The tokens, the linears and the folders of one scheme."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = read_config(model, trust_remote_code=False)
    heads = head_names(skeleton(config, torch.bfloat16))
    chosen = engines.choose(linear_shapes(config), SCHEMES[scheme], "vllm", heads=heads)
    whole = train.read_text(encoding="utf-8")
    ids = fidelity.windows(whole, tokenizer, SAMPLES, LENGTH)
    text, heldout = (work / f"{part}-{train.stem}.txt" for part in ("calibration", "heldout"))
    work.mkdir(parents=True, exist_ok=True)
    write_text(text, calibration_text(tokenizer, whole, ids))
    write_text(heldout, whole[-len(whole) // 10 :])
    setting = Setting(chosen, model, train, ids, text, heldout, work / scheme)
    if not drawn(setting, tokenizer).equal(ids):
        raise SystemExit(f"{text}: our pipeline would not draw the peers' calibration tokens")
    return setting


def calibration_text(tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor) -> str:
    """The beginning of `text` that holds the tokens `ids` [n, T], and the rest of its last word.

    Our pipeline draws its windows from a file at random: from this one, just these.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    body = ids.shape[1] - len(leading_ids(tokenizer))
    end = encoded["offset_mapping"][len(ids) * body - 1][1]
    rest = re.search(r"\s|$", text[end:])
    return text[: end + rest.start()] if rest else text


def drawn(setting: Setting, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The calibration tokens [n, T] that our pipeline takes from the setting's text."""
    data = Data(path=str(setting.text), heldout=str(setting.heldout), samples=SAMPLES)
    documents, _, _ = split(data)
    count, length = setting.ids.shape
    return draw(
        documents, tokenizer, count=count, length=length, seed=0, description="calibration"
    ).ids


def settings_of(contender: Contender, setting: Setting) -> dict[str, Any]:
    """All that a checkpoint depends on."""
    return {
        "method": contender.method,
        "options": contender.options,
        "made by": peers_version() if contender.method else our_version(setting.spec.bits),
        "scheme": asdict(setting.spec),
        "ignore": setting.chosen.ignore,
        "model": source.fingerprint(setting.model),
        "tokens": hashlib.sha256(setting.ids.numpy().tobytes()).hexdigest(),
    }


def peers_version() -> str:
    """The version of llm-compressor that peers_env.sh installs."""
    found = re.search(r"^version=(\S+)$", (HERE / "peers_env.sh").read_text(), re.MULTILINE)
    assert found is not None
    return f"llmcompressor {found[1]}"


def our_version(bits: int) -> dict[str, Any]:
    """What decides what our pipeline writes, beside the options: the versions of its stages, and
    the fields of `quantize` that the recipe ships with.
    """
    option = ROOT / "conf/quantize" / f"{'w4a16' if bits == 4 else 'w8a8'}.yaml"
    recipe = yaml.safe_load((ROOT / "recipes" / f"{RECIPES[bits]}.yaml").read_text())
    return {
        "stages": {stage.name: stage.version for stage in (Calibrate, Quantize, Export)},
        "quantize": {**yaml.safe_load(option.read_text()), **recipe.get("quantize", {})},
    }


def our_command(contender: Contender, setting: Setting, out: Path) -> list[str]:
    """The pipeline's command line for this setting, to write `out`/checkpoint."""
    spec = setting.spec
    fields = {
        "recipe": RECIPES[spec.bits],
        "stages": "[plan,calibrate,quantize,export]",
        "model.path": setting.model,
        "engine": "vllm",
        "data.path": setting.text,
        "data.heldout": setting.heldout,
        "data.samples": setting.ids.shape[0],
        "data.length": setting.ids.shape[1],
        "quantize.group_size": spec.group_size,
        "quantize.activation_bits": spec.activation_bits,
        **contender.options,
        "out": out,
    }
    written = [f"{name}={'null' if v is None else v}" for name, v in fields.items()]
    return [sys.executable, "-m", "compress", *written]


def peers_command(contender: Contender, setting: Setting, out: Path) -> list[str]:
    """llm-compressor's worker, to write `out`/checkpoint and `out`/answer.json."""
    if not PEERS_PYTHON.exists():
        raise SystemExit("no .venv-peers; make it with: sh benchmarks/peers_env.sh")
    request = {
        "model": str(setting.model),
        "method": contender.method,
        "options": contender.options,
        "scheme": asdict(setting.spec),
        "ignore": setting.chosen.ignore,
        "ids": setting.ids.tolist(),
        "out": str(out / "checkpoint"),
    }
    write_json(out / "request.json", request)
    worker = str(HERE / "worker_llmcompressor.py")
    return [str(PEERS_PYTHON), worker, str(out / "request.json"), str(out / "answer.json")]


def folder_of(contender: Contender, setting: Setting) -> Path:
    """Where this contender's `checkpoint` and `made.json` are, or would be."""
    key = fingerprint(settings_of(contender, setting))
    return setting.folder / f"{contender.name}-{key[:12]}"


def make(contender: Contender, setting: Setting) -> None:
    """Compress, unless it is done.

    made.json, written last, says how long the whole command took and the most memory that it held,
    or why a peer failed.
    """
    folder = folder_of(contender, setting)
    if (folder / "made.json").exists():
        return
    print(f"{setting.spec.scheme}: {contender.label}", file=sys.stderr, flush=True)
    # From nothing: what a killed run had done would be missing in the seconds.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = peers_command if contender.method else our_command
    load = os.getloadavg()[0]
    status, seconds, peak = measured(command(contender, setting, folder), folder / "output.txt")
    answer_file = folder / "answer.json"
    answer = json.loads(answer_file.read_text()) if answer_file.exists() else {}
    if status and "failed" not in answer:
        raise SystemExit(f"{contender.label}: exit status {status}; see {folder}/output.txt")
    if not status:
        check_alike(folder / "checkpoint", setting.chosen)
    made = {
        **answer,
        "settings": settings_of(contender, setting),
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "load_average_before": load,
        "date": datetime.now(UTC).date().isoformat(),
    }
    write_json(folder / "made.json", made)


def measured(command: list[str], log: Path) -> tuple[int, float, int]:
    """Run a command: its exit status, wall-clock seconds and peak resident memory in bytes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, time.monotonic() - started, usage.ru_maxrss * 1024


def check_alike(checkpoint: Path, chosen: Preflight) -> None:
    """Stop where a checkpoint quantizes other linears than the rest, or by another scheme."""
    config = json.loads((checkpoint / "config.json").read_text())
    linears = [*chosen.quantize, *chosen.ignore]
    found = read_quantization_config(config["quantization_config"], linears)
    odd = [
        name for name in linears if (found.get(name) == chosen.spec) != (name in chosen.quantize)
    ]
    if odd:
        raise SystemExit(f"{checkpoint}: {odd[0]} and {len(odd) - 1} others are not as agreed")
