"""Who executes a submission: the Protocol, and the plain engine over a Jupyter kernel.

The kernel engine is nbgrader's `Execute` made to end: a limit for the whole notebook beside that for a cell, a cap on
every output in bytes, and after a dead or deaf kernel a new one that runs the cells above again and goes on.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jupyter_client.manager import KernelManager
from nbclient.client import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_output
from nbgrader import utils
from nbgrader.preprocessors import Execute
from traitlets import Integer
from traitlets.config import Config

from autograder.outputs import OutputBudget
from autograder.project import kernel_environment


@dataclass
class Execution:
    """An executed notebook, seconds per code cell (by index), and what went wrong on the way."""

    notebook: NotebookNode
    seconds: dict[int, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)


class Executor(Protocol):
    """Runs every cell of a notebook that may be hostile, and always comes back."""

    def execute(self, notebook: NotebookNode, folder: Path) -> Execution: ...

    def stop(self) -> None:
        """End what is running, from another thread: the batch was interrupted."""


class KernelExecutor:
    """Runs a notebook in a Jupyter kernel of this machine with the limits of the course's nbgrader_config.py."""

    def __init__(self, config: Config | None = None):
        self.config = config or Config()
        self._running: set[ExecuteSubmission] = set()

    def execute(self, notebook: NotebookNode, folder: Path) -> Execution:
        """Execute a copy of `notebook` with `folder` as working directory."""
        step = ExecuteSubmission(config=self.config)
        self._running.add(step)
        try:
            done, _ = step.preprocess(copy.deepcopy(notebook), {"metadata": {"path": str(folder)}})
        finally:
            self._running.discard(step)
        return Execution(done, step.seconds, step.events)

    def stop(self) -> None:
        for step in list(self._running):
            step.stop()


class ExecuteSubmission(Execute):
    """nbgrader's Execute, which a submission cannot stop, fill or outlast."""

    notebook_timeout = Integer(900, help="Seconds for the whole notebook; cells that find none left score 0").tag(
        config=True
    )
    max_restarts = Integer(3, help="New kernels for a notebook whose kernel dies or hangs").tag(config=True)
    max_output_bytes = Integer(1_000_000, help="Bytes of output kept per cell, over all types").tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: Any = None, km: KernelManager | None = None
    ) -> tuple[NotebookNode, dict[str, Any]]:
        NotebookClient.__init__(self, nb, km)
        self.reset_execution_trackers()
        self._check_assign_resources(resources)
        self.record_timing = False
        self.timeout_func = self._cell_timeout
        self.seconds: dict[int, float] = {}
        self.events: list[str] = []
        self._budgets: dict[int, OutputBudget] = {}
        self._deadline = time.monotonic() + self.notebook_timeout
        self._lost: set[int] = set()
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        start, kernels = 0, 0
        while start < len(nb.cells):
            if kernels > self.max_restarts:
                self._give_up(start, "NotRun", f"The kernel died or hung {kernels} times above; this cell did not run.")
                break
            start = self._run_from(start)
            kernels += 1
        return self.nb, self.resources

    def stop(self) -> None:
        """Leave no time to what has not run and kill the kernel. For another thread than the one that executes."""
        self._deadline = time.monotonic()
        pid = getattr(getattr(self.km, "provisioner", None), "pid", None)
        if pid:
            os.kill(pid, signal.SIGKILL)

    def _cell_timeout(self, cell: NotebookNode) -> int:
        left = math.ceil(self._deadline - time.monotonic())
        return max(1, min(self.timeout or left, left))

    def _run_from(self, start: int) -> int:
        """Run cells from `start` in a new kernel; returns the index to go on with after a lost kernel, or the end."""
        self.km = self.kc = None
        # What a dying kernel or its children write on their own descriptors belongs to no cell and not on our terminal.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with self.setup_kernel(env=kernel_environment(), **quiet):
            info = self.wait_for_reply(self.kc.kernel_info())
            self.nb.metadata["language_info"] = info["content"]["language_info"]
            for index in range(len(self.nb.cells)):
                cell = self.nb.cells[index]
                again = index < start
                if cell.cell_type != "code" or (again and (utils.is_grade(cell) or index in self._lost)):
                    continue
                if time.monotonic() > self._deadline:
                    self._give_up(start, "NotRun", f"The notebook's {self.notebook_timeout} s were used up above.")
                    self.events.append(f"the notebook's {self.notebook_timeout} s were used up")
                    return len(self.nb.cells)
                if not self._run(index, again):
                    self._lost.add(index)
                    return max(start, index + 1)
        return len(self.nb.cells)

    def _run(self, index: int, again: bool) -> bool:
        """Execute one cell; False when the kernel is lost. A cell that runs `again` keeps its first outputs."""
        cell = self.nb.cells[index]
        self._budgets[index] = OutputBudget(self.max_output_bytes)
        started = time.monotonic()
        problem = None
        try:
            self.execute_cell(copy.deepcopy(cell) if again else cell, index, store_history=True)
        except DeadKernelError:
            problem = ("KernelDied", "The kernel died while it ran this cell (out of memory, or os._exit).")
        except CellTimeoutError:
            problem = ("CellTimeoutError", "The cell did not end in time and did not answer an interrupt.")
        self.nb.cells[index] = cell  # execute_cell puts its own argument there
        if again:
            return problem is None
        self.seconds[index] = time.monotonic() - started
        if problem:
            self.events.append(f"cell {index}: {problem[1]}")
            cell.outputs.append(
                new_output("error", ename=problem[0], evalue=problem[1], traceback=[": ".join(problem)])
            )
        elif any(output.get("ename") == "CellTimeoutError" for output in cell.outputs):
            self.events.append(f"cell {index}: stopped after {self.seconds[index]:.0f} s")
        cell.outputs = OutputBudget(self.max_output_bytes).fit(cell.outputs)
        return problem is None

    def _give_up(self, start: int, name: str, reason: str) -> None:
        for index, cell in enumerate(self.nb.cells[start:], start):
            if cell.cell_type == "code" and index not in self.seconds:
                cell.outputs = [new_output("error", ename=name, evalue=reason, traceback=[f"{name}: {reason}"])]

    def output(self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int) -> Any:
        """Drop what is over the cell's budget as it arrives, so that endless output fills neither memory nor disk."""
        if not self._budgets[cell_index].takes(msg):
            return None
        return super().output(outs, msg, display_id, cell_index)

    def handle_comm_msg(self, outs: list[NotebookNode], msg: dict[str, Any], cell_index: int) -> None:
        """Widgets run headless: their traffic has nobody to go to."""
