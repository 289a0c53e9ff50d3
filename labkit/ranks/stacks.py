"""Reads what faulthandler writes: which frames are the learner's, and whether a thread stands in a communication."""

import os
import re

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_LABKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(os.path.join(_LABKIT, part) for part in ("ranks", "recorder", "checks"))
_STANDARD = os.path.dirname(os.__file__) + os.sep
_DEPTH = 8


def _blocks(dump: str) -> list[tuple[str, list[re.Match]]]:
    blocks: list[tuple[str, list[re.Match]]] = []
    for line in dump.splitlines():
        frame = _FRAME.match(line)
        if frame and blocks:
            blocks[-1][1].append(frame)
        elif "most recent call first" in line:
            blocks.append((line, []))
    return blocks


def is_plumbing(path: str) -> bool:
    """Frames that tell a learner nothing: labkit's own and torch's logging wrapper around every collective."""
    return os.path.dirname(path) in _OURS or path.endswith("/torch/distributed/c10d_logger.py")


def _ours(frame: re.Match) -> bool:
    return is_plumbing(frame["file"]) or frame["file"] == "<string>"


def _library(frame: re.Match) -> bool:
    return frame["file"].startswith(_STANDARD) or "/site-packages/" in frame["file"] or "/dist-packages/" in frame["file"]


def _telling(frames: list[re.Match]) -> list[re.Match]:
    """Of a thread's frames those that tell a learner something: their own, and the library call that they stand in.

    None of a thread that labkit started for itself.
    """
    others = [frame for frame in frames if not _ours(frame)]
    own = [frame for frame in others if not _library(frame)]
    if own:
        return ([others[0]] if _library(others[0]) else []) + own
    return others if len(others) == len(frames) else []


def clean(dump: str) -> str:
    """One stack per thread, most recent call first, without labkit's own frames and without threads that hold none besides."""
    told = []
    for _, frames in _blocks(dump):
        lines = [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}' for frame in _telling(frames)]
        if lines:
            told.append(lines)
    if len(told) == 1:
        return "most recent call first:\n" + "\n".join(told[0])
    return "\n".join(f"thread {number}, most recent call first:\n" + "\n".join(lines) for number, lines in enumerate(told))


def in_communication(dump: str, card: bool) -> str | None:
    """What kind of communication a thread of the dump stands in, by torch's own frames at its top; None for none.

    ``card``: the process uses a GPU, so that standing in backward may as well be waiting for kernels.
    """
    for _, frames in _blocks(dump):
        top = [frame for frame in frames if not _ours(frame)][:_DEPTH]
        if not top or "/torch/" not in top[0]["file"]:
            continue
        if any(frame["name"] == "monitored_barrier" for frame in top):  # it ends by itself, and says who is missing
            continue
        if any("/torch/distributed/" in frame["file"] and "/checkpoint/" not in frame["file"] for frame in top):
            return "a communication"
        if top[0]["file"].endswith("/torch/_ops.py"):
            return "a communication"
        if not card and any(frame["name"] == "_engine_run_backward" for frame in top):
            return "a communication inside backward"
    return None
