"""What watching costs: a training loop under `live_memory`, drawn five times a second, against the same loop under the
recorder alone.

Both run in a real kernel whose client asks for a live view (it allows input, as JupyterLab does) and reads every
message, so the whole way out counts: reading, thinning, JSON, signing, sockets. They take turns, and which comes first
alternates; the ratio is the median over pairs. Opening the chart and drawing the picture at the end are outside the
clock: they happen once per cell.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOAL = 1.05
# name, layers, width, batch, sequence length
SIZES = [("4 layers, width 128", 4, 128, 8, 64), ("6 layers, width 256", 6, 256, 8, 64)]
_PAIRS, _WINDOW_S = 8, 1.2

_MEASURE = """
import gc, json, time
from labkit import Recorder, live_memory
from tests.benchmarks.recorder import Step

def window(step, context, steps):
    gc.collect()
    with context:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - start
    return seconds / steps

def pairs(layers, width, batch, length, count, window_s):
    step = Step(layers, width, batch, length)
    for _ in range(3):
        step()
    watch = [step.model, step.optimizer, step.tokens]
    steps = max(3, round(window_s / window(step, Recorder(watch=watch), 3)))
    turns = [("off", lambda: Recorder(watch=watch)), ("on", lambda: live_memory(*watch))]
    seconds = {"on": [], "off": []}
    for number in range(count + 1):
        for name, context in turns if number % 2 else turns[::-1]:
            seconds[name].append(window(step, context(), steps))
    return {name: values[1:] for name, values in seconds.items()}  # the first pair warms up
"""


def rows() -> list[dict]:
    """Seconds per step with the widget (ours) and under the recorder alone (peer), per model size."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        _execute(client, _MEASURE)
        return [_row(name, *_measured(client, size)) for name, *size in SIZES]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _measured(client, size: list[int]) -> tuple[list[float], list[float]]:
    arguments = ", ".join(map(str, [*size, _PAIRS, _WINDOW_S]))
    printed = _execute(client, f"print('RESULT', json.dumps(pairs({arguments})))")
    seconds = json.loads(printed.rpartition("RESULT")[2])
    return seconds["on"], seconds["off"]


def _execute(client, code: str) -> str:
    """Run code as a person's front end would (it could answer `input()`); returns what it printed."""
    printed, problems = [], []

    def read(message: dict) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            problems.append("\n".join(message["content"]["traceback"]))

    client.execute_interactive(code, allow_stdin=True, output_hook=read, timeout=300)
    if problems:
        raise RuntimeError(f"the benchmark failed in its kernel:\n{problems[0]}")
    return "".join(printed)


def _row(name: str, on: list[float], off: list[float]) -> dict:
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    return {
        "name": f"live memory on / recorder alone, {name}",
        "ours": statistics.median(on),
        "peer": statistics.median(off),
        "ratio": ratio,
        "goal": GOAL,
        "met": ratio <= GOAL,
        "unit": "s per step",
    }
