"""The reference of each lab: the answer cells of its source, executed. Solutions are never imported."""

import sys
import types
from functools import cache
from pathlib import Path

import cloudpickle
import jupytext

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "source"


@cache
def solution(lab: str) -> types.ModuleType:
    """A module holding what the given first cell and the answer cells of lab `lab` ("02" or "02_checkpointing") define."""
    path = next(iter(sorted(SOURCES.glob(f"{lab}*.py"))))
    notebook = jupytext.read(path)
    module = types.ModuleType(f"solution_{path.stem}")
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    first = True
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        header = cell.metadata.get("nbgrader", {})
        if first or (header.get("solution") and not header.get("grade")):
            lines = [line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!"))]
            exec(compile("\n".join(lines), f"{path.name}", "exec"), module.__dict__)  # our own source, never a learner's
        first = False
    return module
