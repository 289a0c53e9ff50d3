"""`python -m labkit.paper`: the headline numbers, measured on this machine beside what papers and lectures say."""

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable

from ._headlines import Headline, headlines

_COLUMNS = f"{'paper':>9} {'measured':>9} {'diff':>7} {'seconds':>8}"


def show(rows: Iterable[Headline], width: int) -> None:
    """Print one row after the other as they are measured: the name before the run, the numbers and a note after it."""
    name_width = 0 if width < 76 else 33
    print(f"{'':<{name_width}}{_COLUMNS}")
    for row in rows:
        title = row.name + (f", {row.unit}" if row.unit else "")
        print(f"{title:<{name_width}}", end="" if name_width else "\n", flush=True)
        start = time.perf_counter()
        measured, note = row.measure()
        seconds = time.perf_counter() - start
        difference = f"{(measured - row.paper) / row.paper:+.1%}"
        print(f"{_short(row.paper):>9} {_short(measured):>9} {difference:>7} {seconds:>8.1f}")
        print(textwrap.fill(note, width - 1, initial_indent="    ", subsequent_indent="    "), flush=True)


def _short(number: float) -> str:
    """Three digits after the point at most, four that count, thousands apart."""
    return f"{number:,.0f}" if number >= 1000 or number == int(number) else f"{number:.4g}"


def main() -> int:
    """Print the table and what it took."""
    argparse.ArgumentParser(prog="python -m labkit.paper", description=__doc__.partition(": ")[2]).parse_args()
    show(headlines(), min(shutil.get_terminal_size().columns, 100))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(f"\nAll of it took {used / 1e9:.1f} GB of real memory.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
