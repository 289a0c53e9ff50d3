"""What the terminal commands print fits a narrow terminal and loses nothing; a pipe gets whole lines."""

from pathlib import Path

import pytest

from labkit import cli
from labkit.say import say


def test_long_lines_go_on_below(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    say("one " * 20 + "end\nsecond", 6)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40 and lines[1].startswith("      one") and lines[-1] == "second"
    assert " ".join(lines).split() == ["one"] * 20 + ["end", "second"]


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    say("one " * 100)
    assert capsys.readouterr().out == "one " * 100 + "\n"


@pytest.mark.parametrize("command", [["doctor"], ["status"]])
def test_commands_fit_forty_columns(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.chdir(tmp_path)
    cli.main(command)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
