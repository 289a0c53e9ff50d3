"""The nbgrader course folder: source, release, submitted, autograded, feedback, the gradebook and its settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import capture_log
from sqlalchemy.exc import SAWarning
from traitlets.config import Config, PyFileConfigLoader

from autograder.build.builder import write_if_changed
from autograder.project import HERE, Project
from autograder.reference import Reference, read_reference

# nbgrader's models warn about the order in which they are made; nobody who grades can act on it.
warnings.filterwarnings("ignore", category=SAWarning, module="nbgrader")

STEPS = ("source", "release", "submitted", "autograded", "feedback", "exchange")


class CourseError(RuntimeError):
    """The course folder cannot be used as it is; the message says what to do."""


@dataclass
class Course:
    """A laid-out course folder and its loaded settings."""

    root: Path
    config: Config

    @property
    def db_url(self) -> str:
        return self.directory().db_url

    def directory(self, **ids: str) -> CourseDirectory:
        """nbgrader's view of the folder, with `assignment_id` and `student_id` where given."""
        directory = CourseDirectory(config=self.config)
        for name, value in ids.items():
            setattr(directory, name, value)
        return directory

    def gradebook(self) -> Gradebook:
        """nbgrader's gradebook; use it in a `with`."""
        return Gradebook(self.db_url, self.config.CourseDirectory.course_id)

    def reference(self, lab: str) -> Reference:
        return read_reference(self.root / "source" / lab / f"{lab}.ipynb")


def lay_out(project: Project, root: Path, labs: list[str] | None = None) -> Course:
    """Make or update the course folder at `root` from the committed solution notebooks of `labs` (default: all).

    Nothing in submitted, autograded, feedback and the gradebook's grades is touched. Raises CourseError.
    """
    if set("*?[]") & set(str(root)):
        raise CourseError(
            f"nbgrader cannot work in {root}: no *, ? or [ in the path, please. Choose another with --course."
        )
    for step in STEPS:
        (root / step).mkdir(parents=True, exist_ok=True)
    (root / "exchange").chmod(0o777)
    template = (HERE / "nbgrader_config.py").read_text(encoding="utf-8")
    # The package's own folder and not the labs' project: the settings import autograder.
    settings = template.replace("@PROJECT@", str(HERE.parent)).replace("@COURSE@", str(root))
    write_if_changed(root / "nbgrader_config.py", settings.encode())
    course = Course(root, PyFileConfigLoader("nbgrader_config.py", path=str(root)).load_config())
    for path in project.source_files():
        if labs is None or path.stem in labs:
            _add_lab(project, course, path.stem)
    return course


def _add_lab(project: Project, course: Course, lab: str) -> None:
    solution = project.solution(lab)
    if not solution.exists():
        raise CourseError(f"{solution} is missing; run `python -m autograder build` first.")
    changed = write_if_changed(course.root / "source" / lab / f"{lab}.ipynb", solution.read_bytes())
    released = course.root / "release" / lab / f"{lab}.ipynb"
    with course.gradebook() as gradebook:
        try:
            gradebook.find_notebook(lab, lab)
            known = True
        except MissingEntry:
            known = False
    if changed or not known or not released.exists():
        step = GenerateAssignment(coursedir=course.directory(assignment_id=lab), config=course.config)
        step.force = True
        outcome = capture_log(step)
        if not outcome["success"]:
            (course.root / "source" / lab / f"{lab}.ipynb").unlink()  # so that the next try does not find it done
            raise CourseError(
                f"nbgrader could not take {lab} in: {_last_line(outcome)} If grades for another version of it are in "
                f"{course.root}, keep them there and use a new folder with --course."
            )


def _last_line(outcome: dict[str, str]) -> str:
    lines = [line for line in (outcome.get("log") or outcome.get("error", "")).strip().splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if "Error" in line or "ERROR" in line), lines[-1] if lines else "")
    return told.strip()
