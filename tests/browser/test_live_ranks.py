"""Live memory of ranks in JupyterLab: it moves while the cell runs, and leaves the lanes."""

from __future__ import annotations

import pytest

from tests.browser.notebooks import write_notebook
from tests.browser.pages import LabPage

IMPORTS = "import time, torch\nfrom labkit import run_ranks"
GROWS = """
def grows():
    kept = []
    for _ in range(40):
        kept.append(torch.ones(1 << 18))
        time.sleep(0.1)
run_ranks(grows, 3, live="Three ranks grow").values
"""


@pytest.fixture(scope="module")
def server(jupyter, browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    write_notebook(folder / "ranks.ipynb", IMPORTS, GROWS)
    return jupyter(folder)


def reading(output):
    return output.locator(".labkit-state").inner_text(), output.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")


def test_every_ranks_memory_moves_and_the_lanes_stay(browser_page, server):
    lab = LabPage(browser_page, server)
    lab.open("ranks.ipynb")
    lab.hide_sidebars()
    lab.run_cell(0)
    lab.wait_idle()
    lab.run_cell(1)
    output = lab.output(1)
    output.locator(".labkit-ranks canvas").wait_for(timeout=60_000)
    output.locator(".labkit-ranks[data-running=true] .labkit-key b", has_text="MiB").first.wait_for(timeout=60_000)
    first = reading(output)
    lab.page.wait_for_timeout(1200)
    second = reading(output)
    lab.screenshot("live-ranks-running")
    assert lab.busy(), "the cell ended before the second reading"
    assert second[1] != first[1] and "3 ranks" in second[0] and "running" in second[0]
    lab.wait_idle()
    output.locator("img").wait_for()
    assert output.locator("img").get_attribute("alt").startswith("Three ranks grow: 3 ranks over")
    lab.screenshot("live-ranks-done")
    assert lab.errors == []
