"""What this machine can run: Python, torch, cards, NCCL, memory, sandbox; and what to do about what is missing."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

from labkit.say import say


@dataclass(frozen=True)
class Finding:
    """One line of the report. `state` is "ok", "info" (works without) or "missing" (the labs need it)."""

    what: str
    state: str
    told: str
    advice: str = ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> list[Finding]:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    found = [
        Finding(
            "Python",
            "ok" if good else "missing",
            version,
            "" if good else "Use Python 3.11, 3.12 or 3.13: make lab PYTHON=python3.12",
        )
    ]
    if sys.platform == "win32":
        found.append(Finding("System", "missing", "Windows", "Install WSL2 and run the labs in its Linux."))
    else:
        found.append(Finding("System", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"))
    memory = _memory_gib()
    if memory is not None:
        enough = memory >= 4
        found.append(
            Finding(
                "Memory",
                "ok" if enough else "missing",
                f"{memory:.1f} GiB",
                "" if enough else "The labs want 4 GiB: close what you can.",
            )
        )
    return found


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        return None


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [Finding("torch", "missing", f"does not import: {error}", "Run `make lab` again, or pip install torch.")]
    found = [Finding("torch", "ok", torch.__version__)]
    if not torch.cuda.is_available():
        found.append(
            Finding(
                "Cards",
                "info",
                "none seen by torch",
                "Every lab runs on the CPU. With an NVIDIA card: check `nvidia-smi` and install a CUDA build of torch.",
            )
        )
    else:
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            native = "bf16 native" if (card.major, card.minor) >= (8, 0) else "bf16 emulated: use fp16"
            found.append(
                Finding(
                    f"Card {index}",
                    "ok",
                    f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}, {native}",
                )
            )
        found.append(_nccl(torch.cuda.device_count(), dist.is_nccl_available()))
    gloo = dist.is_available() and dist.is_gloo_available()
    found.append(
        Finding(
            "gloo",
            "ok" if gloo else "missing",
            "present" if gloo else "not in this torch",
            "" if gloo else "Install a torch build with distributed support.",
        )
    )
    return found


def _nccl(cards: int, there: bool) -> Finding:
    if there and cards > 1:
        return Finding("NCCL", "ok", f"present, for up to {cards} ranks with a card each; more ranks share, over gloo and the host")
    why = "present, and one card" if there else "not in this torch"
    return Finding("NCCL", "info", why, "Ranks that share a card talk over gloo and the host: slower, same results.")


def _transports() -> list[Finding]:
    """What ranks can use besides gloo, each of which one part of the course needs."""
    zmq, hosts = _version("pyzmq"), _version("torchrunx")
    return [
        Finding("ZeroMQ", "ok", f"pyzmq {zmq}") if zmq else
        Finding("ZeroMQ", "info", "not installed", "Needed for the parameter server (lab 08): pip install pyzmq. It comes with Jupyter."),
        Finding("Several hosts", "ok", f"torchrunx {hosts}: run_ranks(..., hosts=[...])") if hosts else
        Finding("Several hosts", "info", "torchrunx not installed", "Only for ranks on several machines: pip install torchrunx."),
    ]  # fmt: skip


def _packages() -> list[Finding]:
    found = []
    for package, why in {
        "jupyterlab": "opens the labs",
        "ipywidgets": "live charts",
        "anywidget": "live charts",
        "matplotlib": "pictures",
        "nbgrader": "Validate, hand-out and hand-in",
    }.items():
        version = _version(package)
        found.append(
            Finding(
                package,
                "ok" if version else "missing",
                version or "not installed",
                "" if version else f"{why}: pip install 'labkit[lab]'",
            )
        )
    return found


def _sandbox() -> list[Finding]:
    """Performs the start of a sandbox rather than asking whether it exists: a container may have the program and forbid its use."""
    program = shutil.which("bwrap")
    if program is None:
        return [
            Finding(
                "Sandbox",
                "info",
                "bubblewrap not found",
                "Needed only to grade other people's notebooks: install Debian's bubblewrap.",
            )
        ]
    try:
        tried = subprocess.run([program, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [
            Finding(
                "Sandbox",
                "info",
                f"bubblewrap does not start: {error}",
                "Needed only to grade other people's notebooks.",
            )
        ]
    if tried.returncode:
        told = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        return [
            Finding(
                "Sandbox",
                "info",
                f"bubblewrap is here, but {told}",
                "Needed only to grade: allow user namespaces on this machine.",
            )
        ]
    return [Finding("Sandbox", "ok", "bubblewrap starts")]


def findings() -> list[Finding]:
    """Everything the doctor looks at, in the order in which it is told."""
    return [*_system(), *_torch(), *_transports(), *_packages(), *_sandbox()]


def main() -> int:
    """Print the report; 1 when something that the labs need is missing."""
    found = findings()
    width = max(len(finding.what) for finding in found)
    for finding in found:
        mark = {"ok": "ok     ", "info": "-      ", "missing": "MISSING"}[finding.state]
        say(f"{mark}  {finding.what:<{width}}  {finding.told}", 11 + width)
        if finding.advice:
            say(f"{'':9}{'':{width}}  -> {finding.advice}", 14 + width)
    missing = [finding.what for finding in found if finding.state == "missing"]
    print()
    say("This machine runs every lab." if not missing else f"To mend before you start: {', '.join(missing)}.")
    return 1 if missing else 0
