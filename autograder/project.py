"""Where the project's authored and generated files lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Project:
    """Paths of one course project. `root` is the repository; tests pass a folder of their own."""

    root: Path

    @classmethod
    def default(cls) -> Project:
        """The repository that this package lies in."""
        return cls(HERE.parent)

    @property
    def sources(self) -> Path:
        return self.root / "notebooks" / "source"

    @property
    def course(self) -> Path:
        return self.root / "build" / "course"

    def source_files(self) -> list[Path]:
        """Every lab's source, in order of its number."""
        return sorted(self.sources.glob("[0-9][0-9]_*.py"))

    def release(self, name: str) -> Path:
        return self.root / "notebooks" / "release" / name / f"{name}.ipynb"

    def solution(self, name: str) -> Path:
        return self.root / "notebooks" / "solution" / name / f"{name}.ipynb"

    def manifest(self, name: str) -> Path:
        return self.root / "labkit" / "labs" / f"{name}.json"

    def lab_name(self, given: str) -> str:
        """Full name of the lab that `given` names: "02", "02_checkpointing" or a path to one of its files.

        Raises LookupError, listing the labs there are.
        """
        names = [path.stem for path in self.source_files()]
        stem = Path(given).stem
        found = [name for name in names if stem in (name, name[:2], name[3:])]
        if len(found) != 1:
            raise LookupError(f"There is no lab {given!r}. Labs: {', '.join(names) or 'none yet'}.")
        return found[0]


def kernel_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment for a grading kernel: `autograder.exams` is importable, everything else as it is here."""
    path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(extra or {})}
