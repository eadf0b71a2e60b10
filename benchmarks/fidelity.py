"""Compress one model with this project and with its peers, and judge all by the same judge.

    sh benchmarks/peers_env.sh         # once: llm-compressor, in an environment of its own
    .venv/bin/python benchmarks/fidelity.py --model FOLDER --data FOLDER

Every contender gets the same model, calibration tokens, scheme and list of linears left in 16 bit,
which is that of `engine=vllm`: q, k, v and the output head. Ours is `python -m compress` with plan,
calibrate, quantize and export: no distillation. All checkpoints are read back from disk by our
runtime and judged on text and tasks that nothing was tuned on. What is done is kept in
runs/fidelity and not done again; after a kill, the contender that was in progress starts over. The
results go to benchmarks/results/fidelity-SCHEME.json, of a --train of the user's to
fidelity-SCHEME-on-TEXT.json, and, as tables, to docs/fidelity.md.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fidelity_make import (
    CONTENDERS,
    HERE,
    ROOT,
    SCHEMES,
    Contender,
    Setting,
    folder_of,
    make,
    prepare,
)
from fidelity_table import write_tables
from transformers import AutoTokenizer

from compress.artifact import fingerprint, write_json
from compress.eval import fidelity
from compress.machine import hardware, packages
from compress.sizes import tensor_elements
from compress.tensors import TensorFiles

RESULTS = HERE / "results"
TRAIN = "wikitext2_train.txt"
TEST_WINDOWS, TEST_LENGTH = 8, 1024
# What the judge says, in two parts, and what each depends on.
PARTS = {
    "fidelity": ("model", "windows"),
    "tasks": ("model", "data", "items", "task_dtype", "batch_size"),
}


def judged(folder: Path, part: str, request: dict[str, Any]) -> Path:
    """The file of the judge's answer to a part, for the checkpoint of `folder`."""
    asked = {name: request[name] for name in PARTS[part]}
    return folder / f"{part}-{fingerprint(asked)[:12]}.json"


def judge(folders: list[Path], request: dict[str, Any], original: Path) -> None:
    """Have every checkpoint judged that is not yet. original: where the model's own answer goes."""
    pairs = [(Path(request["model"]), original), *((f / "checkpoint", f) for f in folders)]
    wanted = {}
    for part in PARTS:
        files = {str(model): judged(folder, part, request) for model, folder in pairs}
        wanted[part] = {model: str(file) for model, file in files.items() if not file.exists()}
    if not request["items"]:
        wanted["tasks"] = {}
    if any(wanted.values()):
        file = original / "judge.json"
        write_json(file, {**request, "wanted": wanted})
        subprocess.run([sys.executable, str(HERE / "worker_judge.py"), str(file)], check=True)


def verdict(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What the judge said of the checkpoint of `folder`, of tasks where these were asked of it."""
    files = [judged(folder, part, request) for part in PARTS]
    said = [json.loads(file.read_text()) for file in files if file.exists()]
    return {name: value for part in said for name, value in part.items()}


def request_for(model: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the judge is asked, but for the checkpoints."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = (data / "wikitext2_test.txt").read_text(encoding="utf-8")
    return {
        "model": str(model),
        "windows": fidelity.windows(text, tokenizer, TEST_WINDOWS, TEST_LENGTH).tolist(),
        "data": str(data),
        "items": options.items,
        "task_dtype": options.task_dtype,
        "batch_size": 8,
    }


def result_of(contender: Contender, setting: Setting, request: dict[str, Any]) -> dict[str, Any]:
    """What the contender's checkpoint cost and how it was judged, or why there is none."""
    folder = folder_of(contender, setting)
    made = json.loads((folder / "made.json").read_text())
    result = {"label": contender.label, "options": contender.options}
    result |= {name: value for name, value in made.items() if name != "settings"}
    if "failed" in result:
        return result
    weights = sum(f.stat().st_size for f in TensorFiles.files(folder / "checkpoint"))
    parameters = sum(tensor_elements(setting.model).values())
    size = {"bytes": weights, "bits_per_weight": 8 * weights / parameters}
    return {**result, **size, **verdict(folder, request)}


def report(
    setting: Setting, contenders: list[Contender], request: dict[str, Any], original: Path
) -> dict[str, Any]:
    """All that is known of one scheme, as it is committed."""
    known = [c for c in contenders if is_known(folder_of(c, setting), request)]
    return {
        "model": setting.model.name,
        "parameters": sum(tensor_elements(setting.model).values()),
        "scheme": setting.spec.scheme,
        "quantized": len(setting.chosen.quantize),
        "left_alone": sorted({name.rpartition(".")[2] for name in setting.chosen.ignore}),
        "calibration": {
            "text": setting.train.name,
            "windows": setting.ids.shape[0],
            "tokens": setting.ids.shape[1],
        },
        "judge": {
            "windows": len(request["windows"]),
            "tokens": len(request["windows"][0]),
            "items": request["items"],
            "task_dtype": request["task_dtype"],
        },
        "hardware": hardware(),
        "versions": packages(),
        "date": datetime.now(UTC).date().isoformat(),
        "original": verdict(original, request),
        "results": {c.name: result_of(c, setting, request) for c in known},
    }


def run(options: argparse.Namespace) -> None:
    """Make what is missing, judge it, write the results."""
    model, data = options.model.absolute(), options.data.absolute()
    original = options.work / model.name
    settings = [prepare(scheme, model, options.train, original) for scheme in options.schemes]
    request = request_for(model, data, options)
    contenders = [with_fields(contender, options.set) for contender in CONTENDERS]
    for setting in settings:
        fit = [c for c in contenders if setting.spec.bits in c.bits]
        wanted = [contender for contender in fit if contender.name in options.only]
        for contender in wanted:
            make(contender, setting)
        folders = [folder_of(contender, setting) for contender in wanted]
        judge([folder for folder in folders if not failed(folder)], request, original)
        file = RESULTS / f"{result_name(setting)}.json"
        write_json(file, report(setting, fit, request, original))
        print(file)
    print(write_tables(RESULTS, ROOT / "docs/fidelity.md"))


def result_name(setting: Setting) -> str:
    """Of the file of results, without its ending."""
    text = "" if setting.train.name == TRAIN else f"-on-{setting.train.stem}"
    return f"fidelity-{setting.folder.name}{text}"


def failed(folder: Path) -> bool:
    """Whether what was tried there did not run."""
    return "failed" in json.loads((folder / "made.json").read_text())


def is_known(folder: Path, request: dict[str, Any]) -> bool:
    """Whether a contender was tried there, and judged where there is something to judge."""
    tried = (folder / "made.json").exists()
    return tried and (failed(folder) or judged(folder, "fidelity", request).exists())


def with_fields(contender: Contender, fields: list[str]) -> Contender:
    """`ours` with further `field=value` of our configuration; any other contender as it is."""
    if contender.name != "ours":
        return contender
    more = dict(f.split("=", 1) for f in fields)
    return replace(contender, options={**contender.options, **more})


def main() -> int:
    """The command line; returns the exit status."""
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts and tasks")
    parser.add_argument("--train", type=Path, help=f"to calibrate on; default: DATA/{TRAIN}")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="just these")
    parser.add_argument("--items", type=int, default=200, help="of each task; 0: no tasks")
    parser.add_argument("--task-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="of our own configuration"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs/fidelity")
    options = parser.parse_args()
    options.train = options.train or options.data / TRAIN
    for path in (options.model / "config.json", options.train):
        if not path.exists():
            parser.error(f"{path}: no such file")
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
