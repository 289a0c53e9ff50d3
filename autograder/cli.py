"""Command line of the instructor's side: build, check, course, grade."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autograder.project import Project


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m autograder", description=__doc__)
    top.add_argument("--root", type=Path, help="project folder (default: the repository this package lies in)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="sources to release and solution notebooks and manifests")
    build.add_argument("labs", nargs="*", metavar="LAB", help="02, 02_checkpointing or a path (default: all)")

    check = commands.add_parser("check", help="fail when anything committed is stale or a lab does not hold its rules")
    check.add_argument("labs", nargs="*", metavar="LAB", help="labs to check (default: all)")
    check.add_argument("--quick", action="store_true", help="only what needs no kernel")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 when something is wrong with the labs or a submission, 2 for wrong usage."""
    options = parser().parse_args(arguments)
    project = Project(options.root.resolve()) if options.root else Project.default()
    try:
        return {"build": _build, "check": _check}[options.command](project, options)
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2


def _build(project: Project, options: argparse.Namespace) -> int:
    from autograder.build import build

    problems, warnings = build(project, options.labs)
    return _report(problems, warnings)


def _check(project: Project, options: argparse.Namespace) -> int:
    from autograder.build.verify import check

    problems, warnings = check(project, options.labs, quick=options.quick)
    return _report(problems, warnings, done="All labs hold.")


def _report(problems: Sequence[str], warnings: Sequence[str], done: str = "") -> int:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}.", file=sys.stderr)
    elif done:
        print(done)
    return 1 if problems else 0
