"""The learner's feedback page on a telephone: nothing runs off the screen."""

import base64
from pathlib import Path

import pytest
from nbconvert.exporters import HTMLExporter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbgrader.converters import GenerateFeedback
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config

from autograder.steps import ShowFeedback
from labkit.figures import lines
from labkit.figures.picture import still


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    """A feedback page with a wide picture, a long line of code and a wide table, as nbgrader's own exporter makes it."""
    picture = still(lines({"wide": ([1, 2], [1, 2])}, title="A picture", x="x", y="y"))
    outputs = [
        new_output("display_data", data={"image/png": base64.b64encode(picture.png).decode(), "text/plain": "A picture"},
                   metadata={"image/png": {"width": 1200, "height": 400}}),
        new_output("stream", name="stdout", text="one " * 100),
    ]  # fmt: skip
    table = "| " + " | ".join(f"column {number}" for number in range(20)) + " |\n" + "|---" * 20 + "|\n" + "| value " * 20 + "|"
    cells = [new_markdown_cell(table), new_code_cell("x = [" + "12345678, " * 40 + "]", outputs=outputs)]
    config = GenerateFeedback(coursedir=CourseDirectory(root=str(tmp_path))).config
    exporter = HTMLExporter(config=Config(HTMLExporter=config.HTMLExporter))
    exporter.register_preprocessor(ShowFeedback(), enabled=True)
    facts = {"score": 1, "max_score": 2, "late_penalty": 0, "notebook": "lab", "student": "ada", "assignment": "lab", "index": []}
    html, _ = exporter.from_notebook_node(new_notebook(cells=cells), resources={"nbgrader": facts})
    written = tmp_path / "lab.html"
    written.write_text(html)
    return written


def test_nothing_runs_off_a_narrow_screen(browser_page, page_file: Path) -> None:
    browser_page.set_viewport_size({"width": 390, "height": 800})
    browser_page.goto(page_file.as_uri())
    browser_page.wait_for_selector("img")
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser_page.evaluate("document.querySelector('img').getBoundingClientRect().width") <= 390
