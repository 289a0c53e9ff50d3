"""Who may import whom (recorder <- ranks <- checks; figures and widgets are leaves), and a core that needs no Jupyter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LABKIT = Path(__file__).resolve().parents[2] / "labkit"
JUPYTER = {"IPython", "ipywidgets", "anywidget", "matplotlib", "nbformat", "nbclient", "jupyter_client", "nbconvert"}
# What each part may import of labkit at the top of a module; inside functions the leaves may be reached too.
ALLOWED = {
    "recorder": {"recorder"},
    "ranks": {"ranks", "recorder"},
    "checks": {"checks", "ranks", "recorder", "models", "gpt", "resnets", "data", "paper"},
    "figures": {"figures", "recorder"},
    "widgets": {"widgets", "figures", "recorder"},
    "models": {"models"},
    "gpt": {"gpt"},
    "data": {"data", "gpt"},
    "levels": {"levels"},
    "resnets": {"resnets"},
    "paper": {"paper", "recorder", "models", "gpt", "resnets"},
}


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top of the file?) of every import; TYPE_CHECKING blocks do not run and do not count."""
    tree = ast.parse(path.read_text())
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["labkit", *path.relative_to(LABKIT).parts[: -node.level]] if node.level else []
            found.append((".".join([*package, *filter(None, [node.module])]), top))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, top and not inside)

    visit(tree, True)
    return found


SOURCES = sorted(LABKIT.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(LABKIT)))
def test_layers(path: Path) -> None:
    part = path.relative_to(LABKIT).parts[0].removesuffix(".py")
    for module, top in _imports(path):
        root = module.split(".")[0]
        assert root not in ("nbgrader", "jupytext", "autograder"), f"{path.name} imports {module}"
        if top and part in ("recorder", "ranks", "checks", "models", "gpt", "resnets", "data", "paper"):
            assert root not in JUPYTER, f"{path.name} needs {module} before anybody asked for a picture"
        if top and root == "labkit" and part in ALLOWED and module.count("."):
            assert module.split(".")[1] in ALLOWED[part], f"{path.name} imports {module}"


def test_core_works_without_jupyter_and_display() -> None:
    """A clean interpreter in which everything of Jupyter and matplotlib refuses to be imported."""
    script = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(JUPYTER)!r}:
            raise ImportError("not here: " + name)
sys.meta_path.insert(0, Refuse())
import torch, labkit
from labkit import Recorder, run_ranks, check
from labkit.checks import all_checks
assert all_checks()
with Recorder() as recorder:
    x = torch.ones(1024)
assert recorder.recording.peak_bytes == 4096, recorder.recording.peak_bytes
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_importing_labkit_imports_nothing_heavy() -> None:
    script = "import sys, labkit; sys.exit(any(name in sys.modules for name in ('torch', 'IPython', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_files_stay_readable() -> None:
    """A file is one idea: about 300 lines at most."""
    long = {str(path.relative_to(LABKIT)): count for path in SOURCES if (count := len(path.read_text().splitlines())) > 320}
    assert not long, f"split by idea: {long}"
