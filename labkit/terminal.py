"""A lab without a browser: run a notebook's cells and print its verdicts, the points so far, and an exercise put back to its stub."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat

from labkit.checks._verdict import MIME, Outcome, Verdict, verdict_text
from labkit.manifests import Cell, Manifest, lab_number, load_manifests
from labkit.say import say
from labkit.say import width as say_width

CELL_SECONDS = 300


class NotebookError(Exception):
    """A notebook that cannot be read; the message says what to do."""


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook at `path`, upgraded to format 4. Raises NotebookError."""
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise NotebookError(f"{path} is not there.") from None
    except IsADirectoryError:
        raise NotebookError(f"{path} is a folder: name the notebook in it.") from None
    except Exception as error:  # nbformat raises many kinds for text that is no notebook
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise NotebookError(
            f"{path} is not a notebook that can be read ({reason}). Take it from your last checkpoint, or hand-out."
        ) from None


def verdict_of(output: Any) -> Verdict | None:
    """The verdict in a cell's output, or None. What a notebook says of itself is for its learner's eyes; grades are made elsewhere."""
    data = output.get("data", {}).get(MIME)
    if not isinstance(data, dict):
        return None
    try:
        criteria = [Outcome(**outcome) for outcome in data["criteria"]]
        return Verdict(**{**data, "criteria": criteria})
    except (KeyError, TypeError):
        return None


def _verdicts(cell: nbformat.NotebookNode) -> Iterator[Verdict]:
    for output in cell.get("outputs", []):
        verdict = verdict_of(output)
        if verdict is not None:
            yield verdict


def check_notebook(path: Path) -> int:
    """Run every cell of the notebook in a kernel of its own (the file stays as it is) and print each verdict as it comes.

    Returns 0 when every check passed, 1 when one did not, 2 when the notebook could not be run.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    try:
        notebook = read_notebook(path)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 2
    total = [0.0, 0.0, True]
    broken: list[str] = []
    width = say_width() or 100
    parts = _parts(notebook)

    def tell(cell: nbformat.NotebookNode, cell_index: int, **_: Any) -> None:
        for verdict in _verdicts(cell):
            print(verdict_text(verdict, width), end="\n\n", flush=True)
            total[0] += verdict.points
            total[1] += verdict.max_points
            total[2] = total[2] and verdict.passed
        if not any(_verdicts(cell)):
            for output in cell.get("outputs", []):
                if output.output_type == "error":
                    broken.append(parts[cell_index])
                    if len(broken) == 1:  # what fails after it mostly fails because of it
                        first = (cell.source.strip().splitlines() or [""])[0]
                        told = f"{parts[cell_index]}, the cell that begins `{first[:60]}`: {output.ename}: {output.evalue}"
                        print(told[: 4 * width], end="\n\n", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.resolve().parent)}},
        config=Config({"KernelManager": {"shutdown_wait_time": 1.0}}),
        extra_arguments=["--log-level=ERROR"],
        on_cell_executed=tell,
    )
    try:
        _execute(client)
    except CellTimeoutError:
        print(f"A cell ran for more than {CELL_SECONDS} s and was stopped: which loop never ends?", file=sys.stderr)
        return 2
    except DeadKernelError:
        print("The notebook's kernel died: a cell ended the process, or the machine ran out of memory.", file=sys.stderr)
        return 2
    if len(broken) > 1:
        print(f"{len(broken) - 1} later cells failed too, in {', '.join(dict.fromkeys(broken[1:]))}.")
    print(f"{total[0]:g} of {total[1]:g} points")
    return 0 if total[2] and total[1] else 1


def _execute(client: Any) -> None:
    """Run the notebook in a thread, where nbclient lays no handlers of its own on Ctrl-C; here it ends the kernel, and then us."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.execute)
        try:
            running.result()
        except KeyboardInterrupt:
            manager = client.km
            if manager is not None and manager.has_kernel:
                os.kill(manager.provisioner.pid, signal.SIGKILL)  # nbclient sees it die and cleans up
            raise


def _parts(notebook: nbformat.NotebookNode) -> list[str]:
    """Where each cell stands, for people: the number of its exercise, or the heading above it."""
    place, places = "at the top", []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = [line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")]
            place = headings[-1] if headings else place
        number = place.split(" ", 1)[0]
        places.append(number if number[:1].isdigit() and "." in number else f"“{place}”")
    return places


def _find(manifest: Manifest, folder: Path) -> list[Path]:
    """The learner's notebooks of a lab: the ones named so in `folder`, else in work/ below it, else anywhere below it."""
    name = f"{manifest.name}.ipynb"
    for near in (folder / name, folder / manifest.name / name, folder / "work" / manifest.name / name):
        if near.is_file():
            return [near]
    passed_over = {".ipynb_checkpoints", "release", "solution", "build", ".venv", "node_modules"}
    return sorted(path for path in folder.rglob(name) if not passed_over & set(path.relative_to(folder).parts))


def _several(manifest: Manifest, found: list[Path]) -> str:
    listed = "".join(f"\n  {path}" for path in found)
    return f"There are {len(found)} notebooks called {manifest.name}.ipynb here; name the one you mean:{listed}"


def _grade_id(cell: nbformat.NotebookNode) -> str | None:
    return cell.metadata.get("nbgrader", {}).get("grade_id") or cell.get("id")


def status(folder: Path) -> int:
    """Print the points of each lab's checks as its saved notebook shows them."""
    for manifest in load_manifests().values():
        checks = [cell for cell in manifest.cells if cell.kind == "check"]
        most = sum(cell.points for cell in checks)
        found = _find(manifest, folder)
        if len(found) != 1:
            told = f"no notebook below {folder}" if not found else _several(manifest, found)
            say(f"{manifest.lab}  {manifest.title}: {told}", 4)
            continue
        path = found[0]
        try:
            cells = {_grade_id(cell): cell for cell in read_notebook(path).cells}
        except NotebookError as error:
            say(f"{manifest.lab}  {manifest.title}: {error}", 4)
            continue
        told = {check.grade_id: next(_verdicts(cells[check.grade_id]), None) if check.grade_id in cells else None for check in checks}
        points = sum(min(verdict.points, verdict.max_points) for verdict in told.values() if verdict)
        say(f"{manifest.lab}  {manifest.title}: {points:g} of {most:g} points  ({path})", 4)
        for check in checks:
            verdict = told[check.grade_id]
            state = f"{verdict.status}, {verdict.points:g} of {check.points:g}" if verdict else "not run yet"
            say(f"      {check.exercise:<5} {check.grade_id}: {state}", 12)
    say("Hidden cases and written answers are graded after hand-in.")
    return 0


def reset(lab: str, exercise: str, notebook: Path | None) -> int:
    """Put the answer cells of one exercise back to their stubs; the notebook as it was is kept beside it. 1 when nothing was done."""
    manifests = load_manifests()
    manifest = manifests.get(lab_number(lab))
    if manifest is None:
        print(f"There is no lab {lab}. There are {', '.join(manifests)}.", file=sys.stderr)
        return 1
    stubs = {cell.grade_id: cell for cell in manifest.cells if cell.kind == "answer" and cell.exercise == exercise}
    if not stubs:
        known = sorted({cell.exercise for cell in manifest.cells if cell.kind == "answer"})
        print(f"Lab {manifest.lab} has no exercise {exercise}. It has {', '.join(known)}.", file=sys.stderr)
        return 1
    found = [notebook] if notebook else _find(manifest, Path("."))
    if len(found) != 1:
        told = _several(manifest, found) if found else f"{manifest.name}.ipynb is not below this folder: name it."
        print(f"{told}\n(--notebook PATH)", file=sys.stderr)
        return 1
    path = found[0]
    try:
        return _write_stubs(path, stubs, exercise)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 1


def _write_stubs(path: Path, stubs: dict[str, Cell], exercise: str) -> int:
    content = read_notebook(path)
    found = [cell for cell in content.cells if _grade_id(cell) in stubs]
    if not found:
        print(
            f"{path} has none of the answer cells of exercise {exercise} any more; take the notebook from the hand-out.",
            file=sys.stderr,
        )
        return 1
    if all(cell.source == stubs[_grade_id(cell)].source for cell in found):
        print(f"Exercise {exercise} is its stub already in {path}.")
        return 0
    for cell in found:
        cell.source = stubs[_grade_id(cell)].source
        cell.update(outputs=[], execution_count=None)
    number = next(count for count in range(1, 10_000) if not path.with_suffix(f".before-reset-{count}.ipynb").exists())
    kept = path.with_suffix(f".before-reset-{number}.ipynb")
    shutil.copy2(path, kept)
    written = path.with_suffix(".ipynb.new")
    nbformat.write(content, written)
    os.replace(written, path)
    print(f"Exercise {exercise} is back to its stub in {path}. Yours is kept in {kept.name}. Reload the notebook if it is open.")
    return 0
