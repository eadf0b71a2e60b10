"""Every recipe and every option composes, and names what it says it names."""

from pathlib import Path

import pytest
from small import composed

from compress.__main__ import CONF, RECIPES, recipes
from compress.given import STAGES

OPTIONS = [f"{f.parent.name}={f.stem}" for f in sorted(CONF.glob("*/*.yaml"))]


@pytest.mark.parametrize("name", [file.stem for file in sorted(RECIPES.glob("*.yaml"))])
def test_recipe_composes(name: str) -> None:
    given = ["model.path=original"] if name == "judge" else []  # it has no model of its own
    config = composed(f"recipe={name}", *given)
    assert config.recipe == name
    assert config.stages == [s for s in STAGES if s in config.stages]
    assert config.out == f"runs/{name}/{config.model.name}"


def test_recipes_are_listed_with_their_first_lines() -> None:
    found = recipes()
    assert {"smollm2_int8", "smollm2_int4", "int8_7b", "int4_7b", "tiny"} <= found.keys()
    assert all(line and not line.startswith("@") for line in found.values())


@pytest.mark.parametrize("option", [o for o in OPTIONS if not o.startswith("recipe=")])
def test_option_composes(option: str) -> None:
    assert composed("recipe=tiny", option, "data.path=x.txt").recipe == "tiny"


def test_a_recipe_opens_with_its_command() -> None:
    for file in sorted(Path(RECIPES).glob("*.yaml")):
        lines = file.read_text().splitlines()
        assert lines[0] == "# @package _global_", file
        assert any(line.startswith("# python -m compress recipe=") for line in lines[:8]), file


def test_the_7b_recipes_keep_qkv_by_engine_and_plan_for_a_card() -> None:
    for name, memory in (("int8_7b", "24GB"), ("int4_7b", "12GB")):
        config = composed(f"recipe={name}")
        assert config.engine == "any"
        assert config.plan.memory == memory
        assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
