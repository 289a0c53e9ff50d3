"""What was handed out: each lab's front matter and the cells that count, as the builder wrote them (`labkit/labs/*.json`)."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One cell of a released lab. kind: "answer", "check", "hidden" or "reflection"; `source` is what the learner got."""

    grade_id: str
    kind: str
    points: float
    exercise: str
    source: str


@dataclass(frozen=True)
class Manifest:
    """One lab as released. `name` is the notebook's name without ending, such as 02_checkpointing."""

    name: str
    lab: str
    title: str
    points: float
    cells: tuple[Cell, ...]
    front: dict[str, Any]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Manifest":
        fields = Cell.__dataclass_fields__
        cells = tuple(Cell(**{name: cell[name] for name in fields}) for cell in data["cells"])
        front = {key: value for key, value in data.items() if key != "cells"}
        return cls(f"{data['lab']}_{data['slug']}", data["lab"], data["title"], data["points"], cells, front)


def load_manifests() -> dict[str, Manifest]:
    """Every lab's manifest by number ("02"), in order."""
    found = [
        Manifest.from_dict(json.loads(entry.read_text("utf-8"))) for entry in files("labkit.labs").iterdir() if entry.name.endswith(".json")
    ]
    return {manifest.lab: manifest for manifest in sorted(found, key=lambda manifest: manifest.lab)}


def lab_number(text: str) -> str:
    """ "2" and "02" name the same lab."""
    return text.zfill(2) if text.isdigit() else text
