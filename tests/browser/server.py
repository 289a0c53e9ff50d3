"""A Jupyter server of a test's own: temporary copy of a folder, free port, token, own HOME; killed with all its
kernels.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
_QUIET = {  # no news, no update notices, no autosave in the middle of a check
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "checkForUpdates": False,
        "doNotDisturbMode": True,
        "fetchNews": "false",
    },
    "@jupyterlab/docmanager-extension/plugin.jupyterlab-settings": {"autosave": False},
}


class Server:
    """`python -m jupyter lab` (or `notebook`) over a copy of `folder` in `work`; `folder` itself stays untouched.

    url, token : where it answers; root : the copy, where a test reads what was saved
    """

    def __init__(self, folder: Path, work: Path, application: str = "lab", theme: str = "JupyterLab Light") -> None:
        self.application, self.work, self.token = application, work, secrets.token_hex(16)
        self.root = work / "root"
        shutil.copytree(folder, self.root)
        self._settings(theme)
        self._process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        """Start (again, after `stop`), on a new port, over the same files."""
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = open(self.work / "server.log", "ab")  # noqa: SIM115 (closed in stop)
        self._process = subprocess.Popen(
            self._command(), env=self._environment(), cwd=self.root, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._wait()

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "jupyter", self.application, f"--ServerApp.root_dir={self.root}", *self._flags()]
        if self.application == "notebook":
            command = [
                part.replace("LabApp", "JupyterNotebookApp")
                for part in command
                if "news_url" not in part and "updates" not in part
            ]
        return command

    def _flags(self) -> list[str]:
        return [
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={self.port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
            "--LabApp.expose_app_in_browser=True",
            "--LabApp.news_url=None",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]

    def stop(self) -> None:
        """Kill the server and every process below it: kernels, and what they started."""
        if self._process is None:
            return
        try:
            parent = psutil.Process(self._process.pid)
            family = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=10)
        self._process.wait()
        self._process = None
        self._log.close()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._process.pid

    def notebook(self, name: str) -> dict:
        """A notebook as it stands on the disk."""
        return json.loads((self.root / name).read_text(encoding="utf-8"))

    def _environment(self) -> dict[str, str]:
        home = self.work / "home"
        home.mkdir(exist_ok=True)
        own = {
            "HOME": home,
            "JUPYTER_CONFIG_DIR": home / "config",
            "JUPYTER_DATA_DIR": home / "data",
            "JUPYTER_RUNTIME_DIR": home / "runtime",
            "IPYTHONDIR": home / "ipython",
            "JUPYTERLAB_SETTINGS_DIR": self.work / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": self.work / "workspaces",
        }
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        return {
            **os.environ,
            **{name: str(value) for name, value in own.items()},
            "PYTHONPATH": path,
            "JUPYTER_PLATFORM_DIRS": "0",
        }

    def _settings(self, theme: str) -> None:
        settings = {
            **_QUIET,
            "@jupyterlab/apputils-extension/themes.jupyterlab-settings": {"theme": theme, "adaptive-theme": False},
        }
        for name, values in settings.items():
            target = self.work / "settings" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(values), encoding="utf-8")

    def _wait(self, timeout: float = 180.0) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        log = (self.work / "server.log").read_text(errors="replace")[-3000:]
        self.stop()
        raise RuntimeError(f"Jupyter did not answer at {self.url} within {timeout:.0f} s. Its log ends:\n{log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class MadeServer(Server):
    """The server that `make lab LAB=...` starts in this repository, as a learner starts it; `printed_url` is what it prints."""

    def __init__(self, lab: str, work: Path) -> None:
        self.lab = lab
        (work / "empty").mkdir()
        super().__init__(work / "empty", work)

    def _command(self) -> list[str]:
        self.root = ROOT
        return ["make", "lab", f"LAB={self.lab}", f"VENV={sys.prefix}", "JUPYTER_FLAGS=" + " ".join(self._flags())]

    @property
    def printed_url(self) -> str:
        printed = re.findall(r"http://127\.0\.0\.1:\S+", (self.work / "server.log").read_text(errors="replace"))
        # Jupyter shows a token that it made itself, and hides one that it was given.
        return next(url for url in printed if "/lab/tree/" in url).replace("token=...", f"token={self.token}")
