"""The `labkit` command: what this machine can run, and a learner's lab from a terminal.

labkit doctor                    what this machine can run, and what to do about what is missing
labkit check NOTEBOOK            run a notebook's cells and print every verdict
labkit status [FOLDER]           points so far, from the saved notebooks
labkit reset NN EXERCISE         put an exercise's answer cell back to its stub
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="labkit", description="Labs on training models that do not fit, from a terminal.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what this machine can run, and what to do about what is missing")
    check = commands.add_parser("check", help="run a notebook's cells and print every verdict")
    check.add_argument("notebook", type=Path, metavar="NOTEBOOK")
    status = commands.add_parser("status", help="points so far, from the saved notebooks")
    status.add_argument("folder", type=Path, nargs="?", default=Path("."), metavar="FOLDER")
    reset = commands.add_parser("reset", help="put an exercise's answer cell back to its stub (a copy of yours is kept)")
    reset.add_argument("lab", metavar="NN", help="the lab's number, such as 02")
    reset.add_argument("exercise", metavar="EXERCISE", help="the exercise's number, such as 2.2")
    reset.add_argument("--notebook", type=Path, help="the notebook, where it is not found by its name below this folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only when what it did is in order."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "doctor":
            from labkit import doctor

            return doctor.main()
        from labkit import terminal

        if options.command == "check":
            return terminal.check_notebook(options.notebook)
        if options.command == "status":
            return terminal.status(options.folder)
        return terminal.reset(options.lab, options.exercise, options.notebook)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
