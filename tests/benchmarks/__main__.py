"""python -m tests.benchmarks [NAME ...]: ours beside its peer, paired in one run; the table, and the same in build/bench.json.

Every module of this folder offers `rows() -> list[dict]` with name, ours, peer, ratio, goal, met, unit. Ratios are compared with goals;
times are for people to read, since no two machines share them.
"""

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BUILD = Path(__file__).resolve().parents[2] / "build"
KEYS = ("name", "ours", "peer", "ratio", "goal", "met", "unit")


def modules() -> list[str]:
    """The benchmarks by name, in order."""
    package = importlib.import_module("tests.benchmarks")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("what", "ours", "peer", "unit", "ratio", "goal", "met")
    for row in rows:
        met = {True: "yes", False: "NO", None: "-"}[row["met"]]
        figures = [f"{row[key]:.4g}" if isinstance(row[key], (int, float)) else str(row[key]) for key in ("ours", "peer")]
        ratio = f"{row['ratio']:.3g}" if isinstance(row["ratio"], (int, float)) else "-"
        table.add_row(row["name"], *figures, row["unit"], ratio, str(row["goal"]), met)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *modules()], help="only these")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    BUILD.mkdir(exist_ok=True)
    for name in options.names or modules():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += [{key: row[key] for key in KEYS} for row in importlib.import_module(f"tests.benchmarks.{name}").rows()]
        (BUILD / "bench.json").write_text(json.dumps(rows, indent=1) + "\n")  # a run that is stopped keeps what it has
    show(rows, Console(width=None if sys.stdout.isatty() else 140))
    missed = [row["name"] for row in rows if row["met"] is False]
    print(f"{len(rows) - len(missed)} of {len(rows)} goals met" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
