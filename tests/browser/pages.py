"""What a person does in JupyterLab and in Notebook 7, as methods. Both drive the application's own commands, so both
share nearly all of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

from tests.browser.server import ROOT, Server

SCREENSHOTS = ROOT / "build" / "screenshots"
_NOTEBOOK = "window.jupyterapp.shell.currentWidget"


class LabPage:
    """One JupyterLab page. `page` is Playwright's."""

    path = "/lab/tree/{name}?reset&token={token}"

    def __init__(self, page: Page, server: Server) -> None:
        self.page, self.server = page, server
        self.errors: list[str] = []  # raised by widgets' own code, which anywidget loads from blob: addresses
        page.on("pageerror", lambda error: self.errors.append(str(error)) if "blob:" in (error.stack or "") else None)

    def open(self, name: str) -> None:
        """Open a notebook and wait until its cells and its kernel are there."""
        self.page.goto(self.server.url + self.path.format(name=name, token=self.server.token))
        self.page.wait_for_function(
            f"() => window.jupyterapp && {_NOTEBOOK}?.content?.model?.cells?.length > 0", timeout=120_000
        )
        self.page.wait_for_function(
            f"() => {_NOTEBOOK}.sessionContext?.session?.kernel?.status === 'idle'", timeout=120_000
        )

    def command(self, name: str, wait: bool = True, **arguments: Any) -> None:
        """Execute one of the application's commands; with `wait=False` return while it runs."""
        call = "([name, args]) => { const done = window.jupyterapp.commands.execute(name, args); %s }"
        self.page.evaluate(call % ("return done.then(() => null);" if wait else ""), [name, arguments])

    def run_all(self) -> None:
        """Start all cells; returns at once (`wait_idle` waits)."""
        self.command("notebook:run-all-cells", wait=False)

    def run_cell(self, index: int) -> None:
        """Start one cell; returns at once."""
        self.page.evaluate(
            f"(index) => {{ {_NOTEBOOK}.content.deselectAll(); {_NOTEBOOK}.content.activeCellIndex = index; }}", index
        )
        self.command("notebook:run-cell", wait=False)
        self.page.wait_for_timeout(50)

    def busy(self) -> bool:
        """Whether any cell runs or waits to run."""
        return self.page.evaluate(
            f"() => {_NOTEBOOK}.content.widgets.some((cell) => "
            "['running', 'scheduled'].includes(cell.model.executionState)) "
            f"|| {_NOTEBOOK}.sessionContext.session?.kernel?.status !== 'idle'"
        )

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until no cell runs. Raises TimeoutError."""
        end = time.monotonic() + timeout
        quiet = 0
        while quiet < 3:  # a command needs a moment to reach the kernel
            quiet = 0 if self.busy() else quiet + 1
            if time.monotonic() > end:
                raise TimeoutError(f"cells still run after {timeout:.0f} s")
            self.page.wait_for_timeout(100)

    def cell(self, index: int) -> Locator:
        """The DOM of a cell, markdown cells counted."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """The DOM of a cell's outputs."""
        return self.cell(index).locator(".jp-Cell-outputWrapper")

    def show_cell(self, index: int) -> None:
        """Scroll to a cell: JupyterLab leaves out of the page what is far from the view."""
        self.page.evaluate(
            f"(index) => {{ {_NOTEBOOK}.content.activeCellIndex = index; return {_NOTEBOOK}.content.scrollToItem(index, 'start'); }}", index
        )
        self.page.wait_for_timeout(300)

    def hide_sidebars(self) -> None:
        """More room for the notebook, as in the README's pictures."""
        for side in ("left", "right"):
            self.page.evaluate(f"() => window.jupyterapp.shell.collapse{side.title()}?.()")

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self.command("notebook:interrupt-kernel")

    def save(self) -> None:
        """Save the notebook to the server's disk."""
        self.command("docmanager:save")

    def screenshot(self, name: str, target: Locator | None = None) -> Path:
        """A PNG of the page, or of one element, in build/screenshots/."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        (target or self.page).screenshot(path=path)
        return path


class NotebookPage(LabPage):
    """One Notebook 7 page: the same commands under another address."""

    path = "/notebooks/{name}?token={token}"
