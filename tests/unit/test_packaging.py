"""The wheel holds one package, `compress`, whole; nothing at the top level shadows anything."""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINKED = {"kernels": "kernels", "eval": "eval", "conf": "conf", "conf/recipe": "recipes"}
SHIPPED = (".py", ".cpp", ".h", ".yaml", ".json", ".jsonl", ".txt", ".html", ".css", ".js")
SHIPPED += (".typed", ".jinja")
NOT_SOURCE = {"__pycache__"}
COMPARED = {"gemlite", "torchao", "vllm"}
"""Whose kernels are measured beside ours where they are installed, and which nothing needs."""
STAND_IN = """
from transformers.utils.import_utils import KERNELS_MIN_VERSION as __version__

ASKED_FOR = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    ASKED_FOR.append(name)
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})
"""

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command with no PYTHONPATH but that given; its output, both streams."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    inherited["PIP_NO_INDEX"] = "1"
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def sources() -> set[str]:
    """What the package holds in the checkout, by its name inside the wheel, links followed."""
    found = set()
    for folder, below, files in os.walk(ROOT / "compress", followlinks=True):
        below[:] = [name for name in below if name not in NOT_SOURCE]
        for name in files:
            if name.endswith(SHIPPED):
                found.add((Path(folder) / name).relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from, so that no old build/ and no other worker is in the way."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("compress", *set(LINKED.values()) - {"compress"}):
        ignore = shutil.ignore_patterns(*NOT_SOURCE)
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheels built from it (`from-sdist/`) and directly (`direct/`)."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check")
    run(*build, "--outdir", out / "from-sdist", checkout, cwd=out)
    run(*build, "--wheel", "--outdir", out / "direct", checkout, cwd=out)
    return out


def wheel_of(built: Path, how: str) -> Path:
    (wheel,) = (built / how).glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.parametrize("link", sorted(LINKED))
def test_links_point_to_the_top_level(link: str) -> None:
    path = ROOT / "compress" / link
    assert path.resolve() == ROOT / LINKED[link]
    parent = path.parent if link == "conf/recipe" else path
    assert parent.is_symlink()
    assert not (ROOT / LINKED[link] / "__init__.py").exists()


@pytest.mark.parametrize("how", ["direct", "from-sdist"])
def test_wheel_holds_compress_alone_and_whole(built: Path, how: str) -> None:
    names = names_in(wheel_of(built, how))
    top = {name.split("/")[0] for name in names}
    (information,) = (name for name in top if name != "compress")
    assert information.startswith("compress_llm-")
    assert information.endswith(".dist-info")
    assert sources() <= names, sorted(sources() - names)
    assert "compress/py.typed" in names
    assert "compress/conf/config.yaml" in names
    assert "compress/conf/recipe/smollm2_int8.yaml" in names
    assert any(name.startswith("compress/kernels/") for name in names)
    assert any(name.startswith("compress/eval/") and name.endswith(".jsonl") for name in names)


def test_sdist_holds_no_links(built: Path) -> None:
    (sdist,) = (built / "from-sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
        inside = {m.name.split("/", 1)[-1] for m in archive.getmembers()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= inside


def test_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    """In a folder that knows nothing of the checkout; the dependencies are those of this Python."""
    target = tmp_path / "site"
    wheel = wheel_of(built, "direct")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
        *("--target", target, wheel),
        cwd=tmp_path,
    )
    code = (
        "import compress, compress.kernels, compress.eval\n"
        "from pathlib import Path\n"
        f"home = Path({str(target)!r}) / 'compress'\n"
        "assert Path(compress.__file__).parent == home, compress.__file__\n"
        "assert list(compress.kernels.__path__) == [str(home / 'kernels')]\n"
        "assert list(compress.eval.__path__) == [str(home / 'eval')]\n"
        "assert not (home / 'kernels').is_symlink()\n"
    )
    run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    job = (sys.executable, "-m", "compress", "recipe=smollm2_int8", "--cfg", "job")
    assert "recipe: smollm2_int8" in run(*job, cwd=tmp_path, PYTHONPATH=str(target))


def test_editable_install_runs(checkout: Path, tmp_path: Path) -> None:
    """In an environment of its own, with this one's packages beside it, from another folder."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (site,) = (environment / "lib").glob("python*/site-packages")
    here = Path(next(p for p in sys.path if p.endswith("site-packages")))
    # .pth files of a folder added so are not read: this environment's own install stays out.
    (site / "dependencies.pth").write_text(f"{here}\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-build-isolation", "--editable", checkout),
        cwd=tmp_path,
    )
    code = (
        "import compress, compress.kernels, compress.eval\n"
        "print(compress.__file__, *compress.kernels.__path__, *compress.eval.__path__)\n"
    )
    found = run(python, "-c", code, cwd=tmp_path).split()
    package = checkout / "compress"
    assert found == [str(package / p) for p in ("__init__.py", "kernels", "eval")]
    absent = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('eval'))"
    assert run(python, "-c", absent, cwd=tmp_path).split() == ["None", "None"]


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = distributions_of(project["dependencies"])
    optional = distributions_of(project["optional-dependencies"]["harness"]) | COMPARED
    found = metadata.packages_distributions()
    modules = {
        module
        for name in sources()
        if name.endswith(".py")
        for module in imported(ast.parse((ROOT / name).read_text(encoding="utf-8")))
    }
    third_party = modules - sys.stdlib_module_names - {"compress"}
    # What is optional may not be installed: then its module stands for it.
    names = {m: distributions_of(found.get(m, [m])) for m in sorted(third_party)}
    assert {m: d for m, d in names.items() if not d & (declared | optional)} == {}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert [name for name in sorted(declared | optional) if name not in page] == []
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    fixed = {canonicalize_name(line.split("==")[0]) for line in pinned if "==" in line}
    assert declared - fixed == set()


def distributions_of(requirements: Iterable[str]) -> set[str]:
    """Names of distributions as package indexes write them, without versions and markers."""
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of the modules that a source imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_transformers_imports_from_the_root() -> None:
    code = "import transformers; transformers.LlamaForCausalLM; import compress.kernels"
    run(sys.executable, "-c", code, cwd=ROOT)


def test_top_level_kernels_does_not_hide_the_one_of_pypi(tmp_path: Path) -> None:
    """transformers imports PyPI's `kernels` where it is installed: here, a stand-in for it."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    code = (
        "import kernels, compress.kernels\n"
        "from transformers.utils import is_kernels_available\n"
        "import transformers.integrations.hub_kernels\n"
        "assert is_kernels_available()\n"
        "assert {'LayerRepository', 'get_kernel'} <= set(kernels.ASKED_FOR), kernels.ASKED_FOR\n"
        "assert list(compress.kernels.__path__) != list(kernels.__path__)\n"
    )
    # With `python -c` the root comes first on the path, the stand-in after it: as site-packages do.
    run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(tmp_path))
