"""A learner's way through lab 02 as `make lab` opens it: the chart moves while the cell runs, a check fails, a check passes, Validate."""

import json
import shutil
from pathlib import Path

import pytest

from tests.browser.pages import LabPage
from tests.browser.server import ROOT, MadeServer

LAB = "02_checkpointing"
PLAIN = """
def checkpoint_sequential(layers, x, segments):
    for layer in layers:
        x = layer(x)
    return x
"""
# Notes every text that the chart's status line shows while a cell of the notebook is running.
WATCH = """() => {
  window.seen = [];
  const note = () => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    if (!cells.some((cell) => cell.model.executionState === 'running')) return;
    for (const line of document.querySelectorAll('.labkit-state')) {
      if (line.textContent.includes('running') && window.seen.at(-1) !== line.textContent) window.seen.push(line.textContent);
    }
  };
  new MutationObserver(note).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def made(browser, tmp_path_factory):
    server = MadeServer(LAB, tmp_path_factory.mktemp("made"))
    yield server
    server.stop()


@pytest.fixture
def folder():
    """Notebooks of a test's own below the server's root; ignored by git."""
    folder = ROOT / "build" / "browser"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _index(notebook: Path, grade_id: str) -> int:
    cells = json.loads(notebook.read_text())["cells"]
    return next(number for number, cell in enumerate(cells) if cell["metadata"].get("nbgrader", {}).get("grade_id") == grade_id)


def _check_of(function: str) -> str:
    """The grade_id of the visible check of `function`."""
    manifest = json.loads((ROOT / "labkit" / "labs" / f"{LAB}.json").read_text())
    checks = [cell for cell in manifest["cells"] if cell["kind"] == "check"]
    return next(cell["grade_id"] for cell in checks if cell["source"].rstrip().endswith(f", {function})"))


def test_make_lab_prints_the_url_of_the_lab(made, browser_page) -> None:
    browser_page.goto(made.printed_url)
    browser_page.wait_for_selector(".jp-Notebook .jp-Cell h1", timeout=120_000)
    assert "Checkpointing" in browser_page.locator(".jp-Notebook .jp-Cell h1").first.inner_text()
    assert f"{LAB}.ipynb" in browser_page.locator(".lm-TabBar-tab.jp-mod-current").first.inner_text()
    LabPage(browser_page, made).screenshot("make-lab")


def test_solution_moves_the_chart_and_passes(made, browser_page, folder) -> None:
    solved = folder / "solved.ipynb"
    shutil.copy(ROOT / "notebooks" / "solution" / LAB / f"{LAB}.ipynb", solved)
    lab = LabPage(browser_page, made)
    lab.open("build/browser/solved.ipynb")
    lab.hide_sidebars()
    browser_page.evaluate(WATCH)
    seen: set[str] = set()
    for _ in range(3):  # two cells draw for half a second each: a busy machine may show one state of each
        lab.run_all()
        lab.wait_idle(300)
        seen |= set(browser_page.evaluate("() => window.seen"))
        if len(seen) >= 3:
            break
    assert len(seen) >= 3, f"the chart stood still while cells ran: {seen}"
    index = _index(solved, _check_of("checkpoint_sequential"))
    lab.show_cell(index)
    verdict = lab.output(index).locator(".labkit-verdict")
    verdict.wait_for()
    told = verdict.inner_text()
    assert "FAIL" not in told and "points" in told
    lab.screenshot("passing-verdict")
    assert not lab.errors


def test_plain_version_fails_with_a_hint(made, browser_page, folder) -> None:
    notebook = folder / "wrong.ipynb"
    content = json.loads((ROOT / "notebooks" / "release" / LAB / f"{LAB}.ipynb").read_text())
    cells = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in content["cells"]}
    first = next(cell for cell in content["cells"] if cell["cell_type"] == "code")
    answer = next(cell for cell in cells.values() if "def checkpoint_sequential" in "".join(cell["source"]))
    answer["source"] = PLAIN
    content["cells"] = [first, answer, cells[_check_of("checkpoint_sequential")]]
    notebook.write_text(json.dumps(content))
    lab = LabPage(browser_page, made)
    lab.open("build/browser/wrong.ipynb")
    lab.hide_sidebars()
    lab.run_all()
    lab.wait_idle(120)
    told = lab.output(2).inner_text()
    assert "FAIL" in told and "?" in told and "of 1" not in told.splitlines()[0]
    picture = lab.output(2).locator("img")
    assert picture.count() == 1 and picture.evaluate("(image) => image.naturalWidth") > 300
    lab.screenshot("failing-verdict", lab.output(2))


def _validate(lab: LabPage, timeout: float = 400) -> str:
    lab.page.get_by_role("button", name="Validate").first.click()
    dialog = lab.page.locator(".jp-Dialog, .nbgrader-ValidateDialog, .validate-dialog").last
    dialog.wait_for(timeout=timeout * 1000)
    told = dialog.inner_text()
    lab.screenshot("validate")
    return told


def test_nbgraders_validate_tells_what_is_left(made, browser_page, folder) -> None:
    """On an untouched release nothing passes, and nbgrader says how many cells that is."""
    shutil.copy(ROOT / "notebooks" / "release" / LAB / f"{LAB}.ipynb", folder / "untouched.ipynb")
    lab = LabPage(browser_page, made)
    lab.open("build/browser/untouched.ipynb")
    told = _validate(lab)
    assert "failed" in told.lower() and "check(" in told
