"""Puts source lines into stacks and tracebacks that come from other processes: only this one knows the notebook's cells."""

import linecache
import re
import sys

_FRAME = re.compile(r'^(?P<indent> *)File "(?P<file>[^"]*)", line (?P<line>\d+),? in (?P<name>.*)$')


def with_source(text: str) -> str:
    """``text`` with the source line under each frame that lacks it, and a cell called by its number."""
    lines, told = text.splitlines(), []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is None:
            told.append(line)
            continue
        cell = _cell(frame["file"])
        where = cell or f'File "{frame["file"]}"'
        told.append(f"{frame['indent']}{where}, line {frame['line']}, in {frame['name']}")
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if not following.startswith(frame["indent"] + "  ") or _FRAME.match(following):
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            if source:
                told.append(f"{frame['indent']}  {source}")
    return "\n".join(told) + ("\n" if text.endswith("\n") else "")


def _cell(path: str) -> str | None:
    """"Cell In[3]" for the file name that IPython gave to a cell of this kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "compile"):
        return None
    try:
        named = shell.compile.format_code_name(path)
    except Exception:
        return None
    return f"{named[0]} {named[1]}" if named else None
