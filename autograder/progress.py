"""What a batch tells while it runs: a line per submission that is done, and who is being graded now."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO


class Progress:
    """Lines on `stream` (default: stdout). On a terminal the line of who is being graded makes way for the next one."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._total = self._begun = self._done = 0
        self._since = 0.0

    def begin(self, total: int, text: str) -> None:
        """Say `text`; `total` submissions follow."""
        self._total, self._begun, self._done, self._since = total, 0, 0, time.monotonic()
        self.say(text)

    def start(self, name: str) -> None:
        """Say that a submission is being graded. Called from any thread."""
        with self._lock:
            self._begun += 1
            left = ""
            if self._done:
                seconds = (time.monotonic() - self._since) / self._done * (self._total - self._done)
                left = f"  about {duration(seconds)} left"
            text = f"  [{self._begun}/{self._total}] {name} ...{left}".encode("utf-8", "replace").decode()
            self._running[name] = text
            if self._stream.isatty():
                self._show()
            else:
                print(text, file=self._stream, flush=True)

    def end(self, name: str, text: str) -> None:
        """Say a submission's result."""
        with self._lock:
            self._running.pop(name, None)
            self._done += 1
            self._print(f"  [{self._done}/{self._total}] {text}")

    def say(self, text: str) -> None:
        """Say a line."""
        with self._lock:
            self._print(text)

    def stop(self) -> None:
        """Nothing runs any more: what stood there for the time being goes."""
        with self._lock:
            self._running.clear()
            if self._stream.isatty():
                self._show()

    def _print(self, text: str) -> None:
        tty = self._stream.isatty()
        print(("\r\x1b[K" if tty else "") + text, file=self._stream, flush=True)
        if tty:
            self._show()

    def _show(self) -> None:
        """The newest of those running, cut to the terminal's width: a longer line could not be taken back."""
        text = list(self._running.values())[-1] if self._running else ""
        print("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1], end="", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Roughly: 40 s, 3 min, 1.5 h."""
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
