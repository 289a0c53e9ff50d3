"""`python -m autograder check`: nothing generated is stale and every lab holds its rules."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from traitlets.config import Config

from autograder.build.builder import BuiltLab, build_lab, orphans, renamed_ids
from autograder.build.manifest import call_points
from autograder.build.source import SourceError
from autograder.engine import Execution, Executor, KernelExecutor
from autograder.judge import Score, VerdictJudge
from autograder.project import Project
from autograder.reference import make_reference
from autograder.repair import repair
from autograder.steps import judge_notebook

SLOW_S = 20  # nbgrader stops a cell at 30 by default
COURSE_LIMITS = Config({"Execute": {"timeout": 60, "shutdown_kernel": "immediate"}})


def check(project: Project, names: Iterable[str] = (), *, quick: bool = False) -> tuple[list[str], list[str]]:
    """Problems and warnings of the named labs (default: all). `quick` leaves out what needs a kernel."""
    problems: list[str] = []
    warnings: list[str] = []
    wanted = [project.lab_name(name) for name in names]
    paths = [path for path in project.source_files() if not wanted or path.stem in wanted]
    for number, path in enumerate(paths, 1):
        print(f"  [{number}/{len(paths)}] {path.stem}: files", end="", flush=True)
        try:
            built = build_lab(path)
        except SourceError as error:
            problems += str(error).split("\n")
            print(": FAILED", flush=True)
            continue
        found = []
        for file, content in built.files(project).items():
            if not file.exists() or file.read_bytes() != content:
                state = "is stale" if file.exists() else "is missing"
                found.append(
                    f"{file.relative_to(project.root)} {state}; run `python -m autograder build` and commit it."
                )
        warnings += renamed_ids(built, _committed_manifest(project, path.stem))
        found += _point_problems(built)
        print(": FAILED" if found else ": ok", end="" if not quick else "\n", flush=True)
        problems += found
        if not quick:
            found = run_problems(built, KernelExecutor(COURSE_LIMITS))
            print(": FAILED" if found else ": ok", flush=True)
            problems += found
    if not wanted:
        problems += [f"{path}: generated, but its source is gone; delete it." for path in orphans(project)]
    return problems, warnings


def run_problems(built: BuiltLab, executor: Executor) -> list[str]:
    """Run the untouched release and the solution as the grader does: one scores nothing, the other everything."""
    reference = make_reference(built.source.name, built.solution)
    repaired = {"release": repair(built.release, reference), "solution": repair(built.solution, reference)}

    def run(version: str) -> Execution:
        with tempfile.TemporaryDirectory(prefix="autograder-") as folder:
            return executor.execute(repaired[version].notebook, Path(folder))

    with ThreadPoolExecutor(2) as pool:  # a kernel each
        try:
            executions = dict(zip(repaired, pool.map(run, repaired), strict=True))
        except BaseException:  # Ctrl-C: the pool waits for its threads, so end what they run
            executor.stop()
            raise
    problems: list[str] = []
    for version, execution in executions.items():
        problems += [f"{reference.name}: the untouched {version} needed a repair: {flag}." for flag in repaired[version].flags]
        scores = judge_notebook(execution.notebook, reference, VerdictJudge())
        problems += [f"{reference.name}: {version}: {event}." for event in execution.events]
        for score in scores:
            problems += _score_problem(reference.name, version, score)
        problems += _cell_problems(reference.name, version, execution)
        print(f", {version} {sum(execution.seconds.values()):.0f} s", end="", flush=True)
    return problems


def _score_problem(lab: str, version: str, score: Score) -> list[str]:
    where = f"{lab}: {version}: {score.key} (exercise {score.exercise})"
    if version == "release" and score.points != 0:
        return [
            f"{where} gives {score.points} points for nothing ({score.status}); an untouched lab scores 0 everywhere."
        ]
    if version == "solution" and score.kind != "reflection" and score.points != score.max_points:
        told = "; ".join([score.status, *score.flags, str((score.verdict or {}).get("hint") or "")]).rstrip("; ")
        return [f"{where} gives the solution {score.points} of {score.max_points:g} points ({told})."]
    return []


def _cell_problems(lab: str, version: str, execution: Execution) -> list[str]:
    problems = []
    for index, seconds in execution.seconds.items():
        if seconds > SLOW_S:
            load, cores = os.getloadavg()[0], os.cpu_count() or 1
            told = f"{lab}: {version}: cell {index} ran {seconds:.0f} s (load {load:.1f} on {cores} cores); none may take {SLOW_S}"
            told += f": {execution.notebook.cells[index].source.strip().splitlines()[-1][:60]!r}."
            if load > 2 * cores:  # busy with others: it proves nothing, and is told all the same
                print(f"\n    warning: {told}", end="", flush=True)
            else:
                problems.append(told)
        errors = [output for output in execution.notebook.cells[index].outputs if output.output_type == "error"]
        if version == "solution" and errors:
            problems.append(f"{lab}: {version}: cell {index} fails with {errors[0].ename}: {errors[0].evalue[:120]}.")
    return problems


def _point_problems(built: BuiltLab) -> list[str]:
    """A graded cell is worth what its call gives, so that nbgrader's own Validate counts as we do.

    Checks that labkit does not have are left to the run, where they fail by name.
    """
    from labkit.checks import all_checks

    known, problems = all_checks(), []
    cells = {cell.id: cell for cell in built.solution.cells}
    for cell in built.manifest["cells"]:
        check = known.get(cell.get("check"))
        if check is None:
            continue
        gives = call_points(cells[cell["grade_id"]].source) or check.points
        if cell["points"] != gives:
            advice = f"; write exam(..., points={cell['points']:g})" if cell["kind"] == "hidden" else ""
            where = f"{built.source.name}: {cell['grade_id']}"
            problems.append(f"{where} is worth {cell['points']:g} points, its call gives {gives:g}{advice}.")
    return problems


def _committed_manifest(project: Project, name: str) -> str:
    """The manifest in the last commit, or nothing."""
    path = project.manifest(name).relative_to(project.root)
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=project.root, capture_output=True, text=True)
    return shown.stdout if shown.returncode == 0 else ""
