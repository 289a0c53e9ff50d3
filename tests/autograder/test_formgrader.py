"""JupyterLab's side of nbgrader in the course folder, over HTTP: Formgrader, Assignment List and Validate."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autograder import gradebook
from autograder.build.builder import notebook_bytes
from autograder.course import Course, lay_out
from autograder.project import kernel_environment
from tests.autograder.tiny import LAB, make_project, solved

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


class Server:
    """A Jupyter server whose folder is the course's."""

    def __init__(self, course: Course, home: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [
            sys.executable, "-m", "jupyter_server", "--allow-root", "--no-browser", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.url.rsplit(':')[-1]}", "--IdentityProvider.token=t",
            "--ServerApp.disable_check_xsrf=True",
        ]  # fmt: skip
        # nbgrader keeps what a learner hands in under the home folder too: a test has its own.
        env = kernel_environment({"HOME": str(home), "JUPYTER_DATA_DIR": str(home / "data")})
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        self.log = (home / "server.log").open("w")
        self.process = subprocess.Popen(command, cwd=course.root, env=env, stdout=self.log, stderr=self.log)

    def call(self, path: str, /, **data: str) -> Any:
        body = urllib.parse.urlencode(data).encode() if data else None
        request = urllib.request.Request(f"{self.url}/{path}", body, {"Authorization": "token t"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call("api/status")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None and time.monotonic() < deadline, Path(self.log.name).read_text()
                time.sleep(0.2)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return lay_out(make_project(tmp_path / "project"), tmp_path / "course")


@pytest.fixture
def server(course: Course, tmp_path: Path) -> Iterator[Server]:
    home = tmp_path / "home"
    home.mkdir()
    server = Server(course, home)
    try:
        server.wait()
        yield server
    finally:
        server.close()


def test_from_release_to_feedback(course: Course, server: Server) -> None:
    (lab,) = server.call("formgrader/api/assignments")
    assert (lab["name"], lab["max_score"], lab["max_written_score"]) == (LAB, 10, 2)
    assert server.call(f"formgrader/api/assignment/{LAB}/release", go="1")["success"]
    listed = server.call("assignments?course_id=labkit")
    assert [(entry["assignment_id"], entry["status"]) for entry in listed["value"]] == [(LAB, "released")]
    server.call("assignments/fetch", course_id="labkit", assignment_id=LAB)
    mine = course.root / LAB / f"{LAB}.ipynb"
    assert mine.read_bytes() == (course.root / "release" / LAB / f"{LAB}.ipynb").read_bytes()
    assert "failed" in server.call("assignments/validate", path=f"{LAB}/{LAB}.ipynb")["value"]
    mine.write_bytes(notebook_bytes(solved()))
    validated = server.call("assignments/validate", path=f"{LAB}/{LAB}.ipynb")
    assert validated == {"success": True, "value": {}}
    server.call("assignments/submit", course_id="labkit", assignment_id=LAB)
    assert server.call(f"formgrader/api/assignment/{LAB}/collect", go="1")["success"]
    (student,) = (entry.name for entry in (course.root / "submitted").iterdir())
    assert server.call(f"formgrader/api/submission/{LAB}/{student}/autograde", go="1")["success"]
    (row,) = server.call(f"formgrader/api/submissions/{LAB}")
    assert (row["score"], row["max_score"], row["needs_manual_grade"]) == (8, 10, True)
    assert server.call(f"formgrader/api/assignment/{LAB}/{student}/generate_feedback", go="1")["success"]
    assert "hidden cases" in gradebook.feedback_page(course, LAB, student).read_text()
