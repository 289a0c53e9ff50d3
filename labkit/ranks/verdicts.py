"""From what a rank sent and how it ended to one plain report."""

import os
import signal
from typing import TYPE_CHECKING

from labkit.ranks import child, stacks, system, wire
from labkit.ranks.deadlock import Situation

if TYPE_CHECKING:
    from labkit.ranks.process import Rank

STATUSES = ("ok", "error", "exit", "timeout", "deadlock", "memory", "interrupted", "protocol", "killed")
_LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")
_MEMORY_MESSAGES = ("can't allocate memory", "cannot allocate memory", "out of memory")


def judge_rank(rank: "Rank", situation: Situation | None) -> tuple[dict, bytes]:
    """The report of one rank as plain data, and the bytes that go with it (its result, or its exception's)."""
    frames = rank.reader.frames
    summary = {"rank": rank.number, "status": "ok", "error": None, "seconds": rank.ended, "ended": rank.ended, "detail": ""}
    summary["lives"] = rank.life + 1
    meta = _plain_dict(frames.get(b"M"))
    if isinstance(meta.get("seconds"), float):
        summary["seconds"] = meta["seconds"]
    if rank.reader.broken:
        return summary | {"status": "protocol", "detail": rank.reader.broken}, b""
    if b"F" in frames and b"D" in frames:
        return summary | {"detail": _left_behind(rank, meta)}, frames[b"D"]
    if b"F" in frames and b"E" in frames:
        error = _plain_error(frames[b"E"])
        if error is None:
            return summary | {"status": "protocol", "detail": "its error report cannot be read"}, b""
        return summary | {"status": _error_status(error), "error": error}, frames.get(b"X", b"")
    if rank.stopped:
        return summary | {"status": rank.stopped, "detail": _standing(rank, situation)}, b""
    if rank.planned:
        return summary | {"status": "killed", "detail": f"killed as planned: {rank.planned}"}, b""
    if rank.exit is None:
        return summary | {"status": "protocol", "detail": "it reported neither a result nor an error"}, b""
    return summary | _ending(rank.exit), b""


def excuse_victims(summaries: list[dict]) -> None:
    """A rank whose connection broke because a peer ended is not the cause of anything: turn its error into "interrupted"."""
    victims = [summary for summary in summaries if summary["status"] == "error" and _lost_peer(summary["error"])]
    causes = [summary for summary in summaries if summary["status"] not in ("ok", "interrupted", "killed") and summary not in victims]
    if causes:
        for summary in victims:
            summary["status"] = "interrupted"
            summary["detail"] = f"its connection to a peer broke when rank {causes[0]['rank']} ended"


def _lost_peer(error: dict) -> bool:
    message = error["message"].lower()
    return error["type"] in ("RuntimeError", "DistBackendError", "DistNetworkError") and any(
        words in message for words in _LOST_PEER
    )


def _standing(rank: "Rank", situation: Situation | None) -> str:
    """Where a stopped rank stood: its own sentence first, then the others', then its stack."""
    stack = stacks.clean(rank.stack)
    lines = [rank.why] if rank.why else []
    if situation is not None:
        own = situation.sentences.get(rank.number)
        lines = [own] if own else []
        lines += [said for said in situation.sentences.values() if said != own]
    lines.append(f"rank {rank.number} stood at, {stack}" if stack else f"rank {rank.number} did not say where it stood")
    return "\n".join(lines)


def _ending(wait_status: int) -> dict:
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        if number == signal.SIGKILL:
            return {"status": "memory", "detail": "killed by SIGKILL: most often the system ran out of memory"}
        return {"status": "exit", "detail": f"killed by {system.describe_signal(number)}"}
    code = os.WEXITSTATUS(wait_status)
    if code == child.NO_CHANNEL:
        return {"status": "exit", "detail": "it closed the file descriptor that its result returns through"}
    return {"status": "exit", "detail": f"the process left with exit code {code} before the function returned"}


def _error_status(error: dict) -> str:
    name, message = error["type"], error["message"].lower()
    if name in ("MemoryError", "OutOfMemoryError"):
        return "memory"
    if name == "RuntimeError" and any(words in message for words in _MEMORY_MESSAGES):
        return "memory"
    return "exit" if name == "SystemExit" else "error"


def _left_behind(rank: "Rank", meta: dict) -> str:
    words = []
    threads = meta.get("threads")
    if isinstance(threads, list) and threads:
        words.append("threads still running when it returned: " + ", ".join(str(name)[:80] for name in threads[:5]))
    if rank.left_behind:
        words.append("processes still running when it returned: " + ", ".join(rank.left_behind[:5]))
    return "; ".join(words)


def _plain_dict(data: bytes | None) -> dict:
    try:
        value = wire.load_json(data or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _plain_error(data: bytes) -> dict | None:
    value = _plain_dict(data)
    if not all(isinstance(value.get(key), str) for key in ("type", "message", "traceback")):
        return None
    notes = value.get("notes")
    notes = [str(note) for note in notes] if isinstance(notes, list) else []
    return {"type": value["type"], "message": value["message"], "traceback": value["traceback"], "notes": notes}
