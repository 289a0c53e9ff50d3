"""Executed without anyone watching (nbclient, as nbconvert and nbgrader do): pictures and words, no widget left in the
notebook.
"""

import pytest

pytest.importorskip("anywidget")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

CHART = """
import torch
from labkit import live_memory
with live_memory(torch.ones(256), title="No one watches"):
    torch.ones(1000)
"""
FAILS = CHART + "    raise ValueError('mine')\n"
VIEW = """
from labkit.widgets import explore
from labkit.figures import u_curve
explore({"n": [1, 2, 3]}, lambda n: u_curve({1: n, 2: 2 * n}, title=f"at {n}"))
"""


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (CHART, FAILS, VIEW)])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    return notebook


def pictures(cell):
    return [output for output in cell.outputs if output.output_type == "display_data"]


def test_each_leaves_one_picture_and_its_words(executed):
    for cell, words in zip(executed.cells, ("No one watches: peak", "No one watches: peak", "at 2"), strict=True):
        (output,) = pictures(cell)
        assert set(output.data) == {"image/png", "text/plain"} and output.data["text/plain"].startswith(words)
        assert output.metadata["image/png"]["alt"] == output.data["text/plain"]


def test_no_widget_state_and_nothing_on_stderr(executed):
    assert "widgets" not in executed.metadata
    assert not [o for cell in executed.cells for o in cell.outputs if o.output_type == "stream"]


def test_the_error_is_the_learners_own(executed):
    (error,) = [output for output in executed.cells[1].outputs if output.output_type == "error"]
    assert error.ename == "ValueError" and "Stopped by ValueError" in pictures(executed.cells[1])[0].data["text/plain"]


def test_html_export_shows_the_picture(executed):
    nbconvert = pytest.importorskip("nbconvert")
    html, _ = nbconvert.HTMLExporter(template_name="classic").from_notebook_node(
        executed
    )  # nbgrader's feedback builds on it
    assert html.count('src="data:image/png;base64,') == 3
    assert html.count('alt="No one watches: peak') == 2
    assert "application/vnd.jupyter.widget-view+json" not in html
