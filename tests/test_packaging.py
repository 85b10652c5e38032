"""The four folders: their mapping to one namespace, the layering, what imports where, house rules.

The source tree is read with `ast`; facts about importing are checked in fresh interpreters, started
in the repository root because that is where the folder `kernels` could shadow another package.
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "dflash_offline"
MAY_IMPORT = {
    "common": {"common"},
    "kernels": {"kernels", "common"},
    "extract": {"extract", "common", "kernels"},
    "train": {"train", "common", "kernels"},
}
MODULES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).glob("*.py"))
TEST_MODULES = sorted((ROOT / "tests").rglob("*.py"))
# Names that say nothing about what a module holds.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "base", "tools"}
# `codecs` is the layout's word for what turns states into stored bytes and back.
STANDARD_NAMES = (sys.stdlib_module_names - {"codecs"}) | EMPTY_NAMES

CHILD = {**os.environ, "HF_HUB_OFFLINE": "1"}
CHILD.pop("PYTHONSAFEPATH", None)


def run_python(*args: str) -> subprocess.CompletedProcess:
    """Run a fresh interpreter in the repository root."""
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, env=CHILD, capture_output=True, text=True, timeout=300)


def module_name(path: Path) -> str:
    return f"{NAMESPACE}.{path.parent.name}.{path.stem}"


def imported_names(path: Path) -> Iterator[str]:
    """Yield every module name that a source file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_mapping_names_every_folder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping = project["tool"]["setuptools"]["package-dir"]
    assert mapping == {f"{NAMESPACE}.{folder}": folder for folder in MAY_IMPORT}
    assert sorted(mapping) == sorted(project["tool"]["setuptools"]["packages"])
    # A folder below one of the four works in an editable install and is missing from a wheel.
    nested = [path for folder in MAY_IMPORT for path in (ROOT / folder).glob("*/**/*.py")]
    assert nested == []


def test_commands_point_at_modules():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for entry in scripts.values():
        module, _, _ = entry.partition(":")
        namespace, folder, name = module.split(".")
        assert namespace == NAMESPACE
        assert (ROOT / folder / f"{name}.py").is_file(), entry


def test_namespace_folders_have_no_init():
    found = [folder for folder in MAY_IMPORT if (ROOT / folder / "__init__.py").exists()]
    assert found == []
    # Either would put the root on the path of every test.
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_layering(path: Path):
    allowed = {f"{NAMESPACE}.{folder}" for folder in MAY_IMPORT[path.parent.name]}
    for name in imported_names(path):
        first, *rest = name.split(".")
        assert first not in MAY_IMPORT, f"{name} is imported past the namespace"
        if first == NAMESPACE and rest:
            assert f"{NAMESPACE}.{rest[0]}" in allowed, f"{path.parent.name} imports {name}"
        if first == "triton":
            assert path.parent.name == "kernels", "Triton is imported only under kernels"


@pytest.mark.parametrize("path", MODULES + TEST_MODULES, ids=relative)
def test_house_rules(path: Path):
    source = path.read_text()
    num_lines = len(source.splitlines())
    limit = 500 if path in TEST_MODULES else 400
    assert num_lines <= limit, f"{num_lines} lines, at most {limit}: split it by noun"
    assert path.stem not in STANDARD_NAMES
    assert ast.get_docstring(ast.parse(source)), "a module opens by saying what it holds"


# Kernels and their launchers are excepted from the length.
@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent.name != "kernels"], ids=relative
)
def test_functions_are_short(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            assert num_lines <= 60, f"{node.name} has {num_lines} lines"


@pytest.mark.slow
@pytest.mark.parametrize("safe_path", [False, True], ids=["root-on-path", "safe-path"])
def test_root_does_not_shadow_kernels(safe_path: bool):
    """Hugging Face's `kernels` is there when it is installed, wherever Python is started."""
    code = (
        "import transformers.integrations.hub_kernels as hub\n"
        "from transformers import Qwen3ForCausalLM\n"
        "print(hub.is_kernels_available())\n"
    )
    result = run_python(*(["-P"] if safe_path else []), "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str("kernels" in packages_distributions())


@pytest.mark.slow
def test_pytest_started_as_a_module_from_the_root():
    result = run_python(
        *("-m", "pytest", "-p", "transformers.models.qwen3.modeling_qwen3"),
        *("-p", "no:cacheprovider", "--collect-only", "-q", "tests/test_packaging.py"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_layering" in result.stdout


@pytest.mark.slow
def test_everything_imports_without_triton():
    names = [module_name(path) for path in MODULES]
    code = (
        "import importlib, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'triton':\n"
        "            raise ModuleNotFoundError(f'{name} is blocked', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'triton' not in sys.modules, name\n"
        f"print(len({names!r}))\n"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len(MODULES) > 0
