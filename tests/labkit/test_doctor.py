"""The doctor says what is missing and what to do about it, and finds nothing missing where the labs' own tests run."""

import shutil

import pytest

from labkit import cli, doctor


def test_this_machine_is_in_order(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ("Python", "torch", "gloo", "Memory", "nbgrader", "Sandbox", "This machine runs every lab."):
        assert what in out


def test_what_is_missing_is_named_with_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "anywidget" else "1")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  anywidget" in out and "pip install 'labkit[lab]'" in out and "To mend before you start: anywidget." in out
    assert "bubblewrap not found" in out


def test_a_sandbox_that_cannot_start_is_not_called_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    (found,) = doctor._sandbox()
    assert found.state == "info" and "bubblewrap is here, but" in found.told
