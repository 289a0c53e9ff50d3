"""nbgrader's grading steps with ours among them, for nbgrader's own commands and for our engine alike.

`autograder/nbgrader_config.py` lists them, so plain `nbgrader autograde` repairs, executes and scores as
`python -m autograder grade` does.
"""

from __future__ import annotations

import html
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbconvert.exporters.exporter import ResourcesDict
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output
from nbgrader import utils
from nbgrader.preprocessors import NbGraderPreprocessor, SaveAutoGrades
from traitlets import List

from autograder.build.preprocessors import HIDDEN_BEGIN, HIDDEN_END, split_regions
from autograder.judge import Judge, Score, VerdictJudge
from autograder.reference import Reference, read_reference
from autograder.repair import repair

# A page has no kernel to talk to: what stands beside these in an output (a table, a picture) is shown instead.
LIVE = ("application/vnd.jupyter.widget-view+json", "application/javascript")

Result = tuple[NotebookNode, ResourcesDict]


def course_reference(step: NbGraderPreprocessor, resources: ResourcesDict) -> Reference:
    """The reference of the notebook that nbgrader is converting, from the course's source folder."""
    ids, coursedir = resources["nbgrader"], step.parent.parent.coursedir
    folder = coursedir.format_path(coursedir.source_directory, ".", ids["assignment"])
    return read_reference(Path(folder) / f"{ids['notebook']}.ipynb")


class RepairSubmission(NbGraderPreprocessor):
    """In place of DeduplicateIds, OverwriteKernelspec and OverwriteCells: damage of any kind stops no batch."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Result:
        repaired = repair(nb, course_reference(self, resources))
        note_grading(repaired.notebook, flags=repaired.flags)
        return repaired.notebook, resources


class JudgeCells(NbGraderPreprocessor):
    """Scores the executed cells into their metadata, from where SaveScores and the feedback page take them."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Result:
        judge_notebook(nb, course_reference(self, resources), VerdictJudge())
        return nb, resources


class SaveScores(SaveAutoGrades):
    """Writes the judge's scores into nbgrader's gradebook. A person's grade stays, and is marked for another look."""

    def _add_score(self, cell: NotebookNode, resources: ResourcesDict) -> None:
        ids = (cell.metadata.nbgrader.grade_id, self.notebook_id, self.assignment_id, self.student_id)
        grade = self.gradebook.find_grade(*ids)
        grade.auto_score = cell.metadata.labkit.points
        grade.needs_manual_grade = grade.manual_score is not None or grade.auto_score is None
        self.gradebook.db.commit()


# nbgrader's template is made for wide screens: on a telephone pictures shrink, and code and tables scroll in their own boxes.
NARROW = """<style>
img { max-width: 100%; height: auto; }
.highlight, pre, .output_area, .rendered_html { overflow-x: auto; max-width: 100%; }
.cell, .inner_cell, .output { min-width: 0; }
#notebook-container { width: auto !important; }
</style>
"""


class ShowFeedback(NbGraderPreprocessor):
    """For the learner's page: a table of all scores at the top, no hidden test's source, no traceback through one."""

    # nbconvert's HTML exporter sets this for every step, and nbgrader's base class does not take it.
    display_data_priority = List(["text/html", "image/svg+xml", "image/png", "text/plain"]).tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Result:
        for cell in nb.cells:
            for output in cell.get("outputs", []):
                for kind in LIVE:
                    output.get("data", {}).pop(kind, None)
            if HIDDEN_BEGIN in cell.source:
                cell.source = "\n".join(split_regions(cell.source, HIDDEN_BEGIN, HIDDEN_END)[0])
                for output in cell.outputs:
                    if output.output_type == "error":
                        output.traceback = [f"{output.ename}: {output.evalue}"]
        nb.cells.insert(0, new_markdown_cell(source=NARROW + score_table(nb), id="labkit-scores"))
        return nb, resources


def judge_notebook(nb: NotebookNode, reference: Reference, judge: Judge) -> list[Score]:
    """Score every graded cell of an executed notebook, in the reference's order; notes each score in its cell."""
    wanted = reference.by_key()
    scores = []
    for cell in nb.cells:
        if utils.is_grade(cell):
            score = judge.score(cell, wanted[cell.metadata.nbgrader.grade_id])
            noted: dict[str, Any] = asdict(score)
            noted.pop("verdict")  # stands in the cell's output
            cell.metadata["labkit"] = NotebookNode(noted)
            if score.flags:
                text = "".join(f"Not scored: {flag}.\n" for flag in score.flags)
                cell.outputs.append(new_output("display_data", data={"text/plain": text}))
            scores.append(score)
    return scores


def note_grading(nb: NotebookNode, **facts: Any) -> None:
    """Keep facts of the grading in the notebook's metadata, for the feedback page and the export."""
    nb.metadata.setdefault("labkit", NotebookNode()).update(NotebookNode(facts))


def score_table(nb: NotebookNode) -> str:
    """HTML table of the graded cells: exercise, what, result, points; below it what was odd about the submission."""
    what = {"check": "check", "hidden": "hidden cases", "reflection": "written answer"}
    rows = []
    for cell in nb.cells:
        noted = cell.metadata.get("labkit")
        if noted is None or not utils.is_grade(cell):
            continue
        score = cell.metadata.nbgrader.get("score", noted["points"]) or 0
        status = "read by a person" if noted["status"] == "written" else noted["status"]
        link = f'<a href="#{html.escape(noted["key"])}">{what[noted["kind"]]}</a>'
        points = f"{score:g} of {noted['max_points']:g}"
        rows.append([noted["exercise"] or "", link, html.escape(status), points])
    head = "".join(f'<th scope="col">{name}</th>' for name in ("exercise", "graded", "result", "points"))
    body = "".join("<tr>" + "".join(f"<td>{value}</td>" for value in row) + "</tr>" for row in rows)
    table = f'<table class="table" style="width:auto"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    flags = "".join(f"<li>{html.escape(flag)}</li>" for flag in nb.metadata.get("labkit", {}).get("flags", []))
    return table + (f"<p>Put right before grading:</p><ul>{flags}</ul>" if flags else "")
