"""Lines for people, wrapped to their terminal; a pipe gets them whole."""

import os
import shutil
import sys
import textwrap


def width() -> int | None:
    """Columns of the terminal, at least 40; None where nobody's terminal is being written to."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return None
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def say(text: str, indent: int = 0) -> None:
    """Print lines; what does not fit goes on below, `indent` columns in."""
    columns = width()
    for line in text.split("\n"):
        if columns is not None and len(line) > columns:
            lead = line[: len(line) - len(line.lstrip())]
            line = textwrap.fill(
                line.strip(),
                columns,
                initial_indent=lead[: columns // 4],
                subsequent_indent=" " * min(indent, columns // 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
        print(line)
