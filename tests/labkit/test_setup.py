"""The set-up files say the same: conda's pins are pip's pins, and they are what the package asks for."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from labkit.manifests import load_manifests

ROOT = Path(__file__).resolve().parents[2]


def _constraints() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))


def _conda_pip() -> list[str]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    return next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))


def _asked(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return {re.split(r"[<>=\[]", line)[0].lower() for line in wanted} - {"labkit"}


def test_conda_has_the_same_pins_as_pip() -> None:
    pins = dict(line.lower().split("==") for line in _conda_pip() if "==" in line)
    constraints = _constraints()
    assert pins == {name: constraints[name] for name in pins}
    assert _asked("lab", "grader") <= set(pins)
    assert "-e ." in _conda_pip()


def test_every_direct_dependency_is_pinned() -> None:
    assert _asked("lab", "grader", "dev") <= set(_constraints())


def test_environment_pip_part_installs_in_a_clean_environment(tmp_path: Path) -> None:
    """As conda does it: the pip lines as a requirements file beside environment.yml, in an environment that has only Python and pip."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    requirements = tmp_path / "requirements.txt"
    lines = [f"-e {ROOT}" if line == "-e ." else line for line in _conda_pip()]
    requirements.write_text("\n".join(lines) + "\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements],
        capture_output=True,
        text=True,
        env=clean,
    )
    assert installed.returncode == 0, installed.stderr[-2000:]
    told = subprocess.run(
        [
            python,
            "-c",
            "import labkit, torch; labkit.check, labkit.Recorder, labkit.run_ranks, labkit.live_memory; print(torch.__version__)",
        ],
        capture_output=True,
        text=True,
        env=clean,
        cwd=tmp_path,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(_constraints()["torch"])


@pytest.mark.parametrize("target", ["lab", "test", "check", "bench"])
def test_make_targets_exist(target: str) -> None:
    dry = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr


def test_readme_lists_every_lab_as_its_front_matter_has_it() -> None:
    rows = re.findall(r"^\| (\d\d) · (.+?) \| (\d+) \| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    labs = load_manifests().values()
    assert rows == [(lab.lab, lab.title, str(lab.front["minutes"]), f"{lab.points:g}") for lab in labs]
