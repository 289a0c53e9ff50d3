"""The live chart in JupyterLab and Notebook 7, as a person meets it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.browser.notebooks import SETUP, write_notebook
from tests.browser.pages import LabPage, NotebookPage

SLOW = """
with live_memory(model, optimizer, batch, title="A small model trains", budget_bytes=24 * 2**20) as live:
    train(live, 8, pause=0.2)
"""
FAST = """
with live_memory(model, optimizer, batch, title="One quick step") as live:
    train(live, 1)
"""
FAILS = """
with live_memory(model, optimizer, batch, title="Stopped") as live:
    train(live, 1)
    raise ValueError("mine")
"""
TWO = """
with live_memory(model, title="First"):
    model(batch)
with live_memory(model, title="Second"):
    model(batch)
"""
ENDLESS = """
with live_memory(model, optimizer, batch, title="Endless") as live:
    train(live, 10_000, pause=0.1)
"""
SETUP_CELL, SLOW_CELL, FAST_CELL, FAILS_CELL, TWO_CELL, ENDLESS_CELL = range(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    for name in ("run", "keys", "after", "seven"):
        write_notebook(folder / f"{name}.ipynb", SETUP, SLOW, FAST, FAILS, TWO, ENDLESS)
    return folder


@pytest.fixture(scope="module")
def server(jupyter, browser, folder):
    return jupyter(folder)


def opened(page, server, name, kind=LabPage):
    lab = kind(page, server)
    lab.open(f"{name}.ipynb")
    lab.hide_sidebars()
    lab.run_cell(SETUP_CELL)
    lab.wait_idle()
    return lab


def reading(output):
    """What the chart shows now: its seconds, its words and its pixels."""
    return (
        float(output.locator(".labkit-slider").get_attribute("aria-valuemax")),
        output.locator(".labkit-state").inner_text(),
        output.locator("canvas").evaluate("(canvas) => canvas.toDataURL()"),
    )


def moves(lab, index, screenshot):
    """Run the slow cell; the chart must change between two readings that both lie before the cell's end."""
    lab.run_cell(index)
    output = lab.output(index)
    output.locator("canvas").wait_for()
    output.scroll_into_view_if_needed()
    lab.page.wait_for_timeout(900)
    first = reading(output)
    lab.page.wait_for_timeout(1200)
    second = reading(output)
    lab.screenshot(screenshot)
    assert lab.busy(), "the cell ended before the second reading"
    assert second[0] > first[0] > 0 and second[2] != first[2]
    assert "running" in first[1] and "peak" in second[1]
    lab.wait_idle()
    assert "done" in output.locator(".labkit-state").inner_text()
    assert lab.errors == []


def test_chart_moves_while_the_cell_runs_in_jupyterlab(browser_page, server):
    lab = opened(browser_page, server, "run")
    moves(lab, SLOW_CELL, "live-memory-running")
    output = lab.output(SLOW_CELL)
    output.scroll_into_view_if_needed()
    output.locator(".u-over").hover(position={"x": 400, "y": 120})
    tip = output.locator(".labkit-tip")
    assert re.search(r"[\d,]{7,} B", tip.inner_text()) and re.search("allocated by|was freed", tip.inner_text())
    lab.screenshot("live-memory-hover")


def test_fast_cell_stays_explorable_and_is_saved_as_a_picture(browser_page, server):
    lab = opened(browser_page, server, "after")
    lab.run_cell(FAST_CELL)
    lab.wait_idle()
    output = lab.output(FAST_CELL)
    output.locator(".labkit-memory canvas").wait_for()
    output.locator(".u-over").hover(position={"x": 300, "y": 150})
    assert "B" in output.locator(".labkit-tip").inner_text()
    assert output.locator("img").is_hidden() and "One quick step: peak" in output.locator("img").get_attribute("alt")

    lab.run_cell(FAST_CELL)  # again: one output, not two
    lab.wait_idle()
    output.locator(".labkit-memory").wait_for()
    assert output.locator(".labkit-memory").count() == 1

    lab.run_cell(FAILS_CELL)
    lab.wait_idle()
    failed = lab.output(FAILS_CELL)
    failed.locator(".labkit-memory").wait_for()
    assert (
        "stopped by ValueError" in failed.locator(".labkit-state").inner_text()
        and "ValueError: mine" in failed.inner_text()
    )

    lab.run_cell(TWO_CELL)
    lab.wait_idle()
    titles = lab.output(TWO_CELL).locator(".labkit-title")
    titles.nth(1).wait_for()
    assert titles.all_inner_texts() == ["First", "Second"]

    lab.run_cell(ENDLESS_CELL)
    lab.page.wait_for_timeout(1500)
    lab.interrupt()
    lab.wait_idle()
    endless = lab.output(ENDLESS_CELL)
    assert (
        "interrupted" in endless.locator(".labkit-state").inner_text() and "KeyboardInterrupt" in endless.inner_text()
    )

    lab.page.evaluate("() => document.body.dataset.mark = 'kept'")
    lab.save()
    saved = server.notebook("after.ipynb")
    data = [list(o["data"]) for cell in saved["cells"] for o in cell.get("outputs", []) if "data" in o]
    assert data == [["image/png", "text/plain"]] * 5
    assert "widgets" not in saved["metadata"]
    assert lab.errors == []


def test_reloaded_page_with_a_living_kernel_is_explorable_again(browser_page, server):
    lab = LabPage(browser_page, server)
    lab.open("after.ipynb")
    output = lab.output(FAST_CELL)
    output.locator(".labkit-memory canvas").wait_for(timeout=15_000)
    assert "done" in output.locator(".labkit-state").inner_text()


def test_keyboard_pause_and_screen_reader(browser_page, server):
    lab = opened(browser_page, server, "keys")
    lab.run_cell(SLOW_CELL)
    output = lab.output(SLOW_CELL)
    slider = output.locator(".labkit-slider")
    slider.wait_for()
    lab.page.wait_for_timeout(700)
    slider.focus()
    active = lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex")

    lab.page.keyboard.press("Space")
    lab.page.wait_for_timeout(100)
    frozen = slider.get_attribute("aria-valuemax")
    lab.page.wait_for_timeout(800)
    assert slider.get_attribute("aria-valuemax") == frozen and lab.busy()
    assert "paused" in output.locator(".labkit-state").inner_text()
    assert output.locator(".labkit-button").get_attribute("aria-pressed") == "true"
    lab.page.keyboard.press("Space")
    lab.page.wait_for_timeout(600)
    assert float(slider.get_attribute("aria-valuemax")) > float(frozen)
    output.locator(".labkit-button").click()
    assert output.locator(".labkit-button").inner_text() == "Resume"
    lab.wait_idle()

    slider.focus()
    lab.page.keyboard.press("Home")
    at = [float(slider.get_attribute("aria-valuenow"))]
    for key in ("ArrowRight", "ArrowRight", "PageUp", "End", "ArrowLeft"):
        lab.page.keyboard.press(key)
        at.append(float(slider.get_attribute("aria-valuenow")))
    assert at[0] <= at[1] <= at[2] < at[3] < at[4] and at[5] <= at[4]
    assert "in all" in slider.get_attribute("aria-valuetext")
    lab.page.keyboard.press("Escape")
    assert output.locator(".labkit-tip").is_hidden()
    assert lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex") == active

    picture = output.get_by_role("img", name=re.compile("Chart of live memory.*peak"))
    assert picture.count() == 1
    assert "peak" in output.locator("[aria-live]").inner_text()
    output.get_by_text("Numbers as a table").click()
    table = output.locator(".labkit-details")
    assert "parameters" in table.inner_text() and "optimizer step" in table.inner_text()
    lab.screenshot("live-memory-table")


def test_notebook_7(browser_page, jupyter, folder):
    server = jupyter(folder, application="notebook")
    lab = opened(browser_page, server, "seven", NotebookPage)
    moves(lab, SLOW_CELL, "live-memory-notebook-7")
    lab.output(SLOW_CELL).locator(".u-over").hover(position={"x": 300, "y": 150})
    assert "B" in lab.output(SLOW_CELL).locator(".labkit-tip").inner_text()
    lab.save()
    server.stop()
    server.start()
    page = browser_page.context.new_page()
    again = NotebookPage(page, server)
    again.open("seven.ipynb")
    shows_the_picture(again, SLOW_CELL)
    again.screenshot("saved-notebook-7")


def test_saved_and_reopened_without_running(browser_page, server):
    server.stop()
    server.start()
    lab = LabPage(browser_page, server)
    lab.open("after.ipynb")
    lab.hide_sidebars()
    shows_the_picture(lab, FAST_CELL)
    lab.screenshot("saved-jupyterlab")

    html = server.root / "after.html"
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", str(server.root / "after.ipynb")]
    subprocess.run(command, check=True, capture_output=True)
    browser_page.goto(html.as_uri())
    picture = browser_page.locator("img[src^='data:image/png']").first
    assert picture.evaluate("(img) => img.naturalWidth") > 800
    picture.scroll_into_view_if_needed()
    lab.screenshot("nbconvert-html")


def shows_the_picture(lab, index):
    output = lab.output(index)
    output.scroll_into_view_if_needed()
    picture = output.locator("img")
    picture.wait_for()
    assert picture.is_visible() and picture.evaluate("(img) => img.naturalWidth") > 800
    assert output.locator(".labkit-memory").count() == 0
    assert "rror" not in output.inner_text()


def test_dark_theme_narrow_and_zoomed(browser_page, server):
    lab = opened(browser_page, server, "run")
    lab.command("apputils:change-theme", theme="JupyterLab Dark")
    lab.run_cell(SLOW_CELL)
    output = lab.output(SLOW_CELL)
    output.locator("canvas").wait_for()
    lab.page.wait_for_timeout(2500)
    output.scroll_into_view_if_needed()
    lab.screenshot("live-memory-dark")
    lab.wait_idle()
    ground = output.locator(".labkit-memory").evaluate("(el) => getComputedStyle(el).backgroundColor")
    assert max(map(int, re.findall(r"\d+", ground)[:3])) < 80

    lab.command("apputils:change-theme", theme="JupyterLab Light")
    lab.page.wait_for_timeout(800)
    pixel = output.locator("canvas").evaluate("(c) => [...c.getContext('2d').getImageData(c.width - 5, 20, 1, 1).data]")
    ground = output.locator(".labkit-memory").evaluate("(el) => getComputedStyle(el).backgroundColor")
    assert min(map(int, re.findall(r"\d+", ground)[:3])) > 200 and (pixel[3] < 255 or min(pixel[:3]) > 150)

    for width, name in ((640, "live-memory-zoom-200"), (420, "live-memory-narrow")):  # 1280 pixels at 200% are 640
        lab.page.set_viewport_size({"width": width, "height": 800})
        lab.page.wait_for_timeout(700)
        output.scroll_into_view_if_needed()
        box = output.locator(".labkit-memory").bounding_box()
        canvas = output.locator("canvas").bounding_box()
        assert canvas["width"] <= box["width"] and canvas["width"] > 0.6 * box["width"]
        lab.screenshot(name)
