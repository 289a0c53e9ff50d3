"""Limits on what a cell may leave behind, in bytes and over every type of output."""

from __future__ import annotations

from typing import Any

from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_output

VERDICT = "application/vnd.labkit.verdict+json"
EACH = 200  # bytes counted for an output beside its content, so that many tiny ones end too


class OutputBudget:
    """How much of a cell's output is kept. Its value has a budget of its own: prints never crowd out a verdict."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._used = {"result": 0, "other": 0}

    def takes(self, msg: dict[str, Any]) -> bool:
        """Whether an arriving message is kept: all that begins below twice the budget is, `fit` cuts exactly later."""
        part = "result" if msg["msg_type"] == "execute_result" else "other"
        if self._used[part] > self.max_bytes:
            return False
        self._used[part] += EACH + _size(msg["content"])
        if self._used[part] > 2 * self.max_bytes:
            _shrink(msg["content"], self.max_bytes + 1)
        return True

    def fit(self, outputs: list[NotebookNode]) -> list[NotebookNode]:
        """`outputs` within the budget: text is cut, larger things are replaced by a line that says so."""
        kept: list[NotebookNode] = []
        left = {"result": self.max_bytes, "other": self.max_bytes}
        cut = False
        for output in outputs:
            part = "result" if output.output_type == "execute_result" else "other"
            size = EACH + _size(output)
            if size <= left[part]:
                left[part] -= size
                kept.append(output)
                continue
            cut = True
            if left[part] > EACH:
                _shrink(output, left[part] - EACH)
                kept.append(output)
                left[part] = 0
        if cut:
            note = f"[output cut: a cell keeps at most {self.max_bytes:,} bytes]\n"
            kept.append(new_output("stream", name="stdout", text=note))
        return kept


def _size(content: Any) -> int:
    """Bytes of the strings in a message or an output."""
    if isinstance(content, str):
        return len(content.encode("utf-8", "replace"))
    if isinstance(content, dict):
        return sum(_size(value) for value in content.values())
    if isinstance(content, (list, tuple)):
        return sum(_size(value) for value in content)
    return 8


def _shrink(content: dict[str, Any], room: int) -> None:
    """Cut text to about `room` bytes; of a rich output keep the small representations, verdict and text first."""
    if isinstance(content.get("text"), str):
        content["text"] = content["text"].encode("utf-8", "replace")[:room].decode("utf-8", "ignore")
    if isinstance(content.get("traceback"), list):
        content["traceback"] = ["\n".join(map(str, content["traceback"]))[-min(room, 20_000) :]]
        content["evalue"] = str(content.get("evalue", ""))[:1000]
    data = content.get("data")
    if isinstance(data, dict):
        small: dict[str, Any] = {}
        for kind in sorted(data, key=lambda kind: (kind != VERDICT, kind != "text/plain", _size(data[kind]))):
            if (size := _size(data[kind])) <= room:
                small[kind] = data[kind]
                room -= size
        small.setdefault("text/plain", "[output too large]")
        content["data"] = small
