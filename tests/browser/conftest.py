"""A real browser on a real Jupyter server: fixtures for every test in this folder.

    def test_something(jupyter, browser_page):
        server = jupyter(folder)                         # JupyterLab on a temporary copy of `folder`, its own HOME,
        port and token lab = LabPage(browser_page, server)              # or NotebookPage for Notebook 7
        lab.open("lab.ipynb"); lab.run_all(); lab.wait_idle(); lab.screenshot("name")

Screenshots land in build/screenshots/. Without Chromium the tests skip and say so; with CI=true in the environment they
fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.server import Server


def chromium_path() -> str | None:
    """LABKIT_CHROMIUM, or the first Chromium on the PATH."""
    named = os.environ.get("LABKIT_CHROMIUM")
    return named or next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def missing(what: str) -> None:
    """Skip with the reason; in CI a missing browser is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} (in CI this is a failure, not a skip)")
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """One headless Chromium for the session (a Playwright `Browser`)."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("browser tests need playwright: pip install playwright")
    path = chromium_path()
    if path is None:
        missing("browser tests need Chromium: install Debian's chromium or set LABKIT_CHROMIUM to its path")
    with sync_playwright() as playwright:
        # Chromium refuses its own sandbox to root, which is who runs tests in a container.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def browser_page(browser) -> Iterator:
    """A fresh page with its own storage, 1280 by 900. Failing tests leave a picture in `build/screenshots/`."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=1)
    page = context.new_page()
    page.set_default_timeout(90_000)  # a machine may be busy; no test waits for what should not come
    yield page
    context.close()


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory) -> Iterator[Callable[..., Server]]:
    """Start servers: ``jupyter(folder, application="lab")``. All of them and their kernels die with the module's
    tests.
    """
    servers: list[Server] = []

    def start(folder: Path | str, **options) -> Server:
        server = Server(Path(folder), tmp_path_factory.mktemp("jupyter"), **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()
