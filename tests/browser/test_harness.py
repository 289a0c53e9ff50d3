"""The harness itself: no process outlives a server, a missing browser is told, and in CI it is a failure."""

import json
import urllib.request

import psutil
import pytest

from tests.browser.conftest import chromium_path, missing
from tests.browser.notebooks import write_notebook


def test_stopping_a_server_ends_its_kernels(jupyter, tmp_path):
    write_notebook(tmp_path / "folder" / "empty.ipynb", "1")
    server = jupyter(tmp_path / "folder")
    request = urllib.request.Request(f"{server.url}/api/kernels?token={server.token}", data=b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["id"]
    family = psutil.Process(server.pid).children(recursive=True)
    assert any("ipykernel" in " ".join(process.cmdline()) for process in family)
    server.stop()
    assert not [process for process in family if process.is_running()]
    assert (tmp_path / "folder" / "empty.ipynb").exists()


def test_named_browser_comes_first(monkeypatch):
    monkeypatch.setenv("LABKIT_CHROMIUM", "/somewhere/chromium")
    assert chromium_path() == "/somewhere/chromium"


def test_missing_browser_skips_and_fails_in_ci(monkeypatch):
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match="need Chromium"):
        missing("browser tests need Chromium")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="need Chromium"):
        missing("browser tests need Chromium")
