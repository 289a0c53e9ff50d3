"""Put an executor through its calls beside the recorder and a trail, and say what was seen."""

import gc
import time
from contextlib import nullcontext
from typing import Any

import torch

from labkit.checks._core import Case, Observation
from labkit.checks._pingpong_cases import SCRIPT
from labkit.checks._pingpong_probe import collect_warnings, examined, facts_of, model_of, outputs_of, weights_of
from labkit.checks._pingpong_trail import Trail
from labkit.recorder import Recorder

UNWRITTEN = float("nan")


def probe_executor(candidate: Any, case: Case) -> Observation:
    """Make candidate(layers, max_batch) in every run of the case and put it through SCRIPT."""
    torch.set_num_threads(1)
    gc.freeze()
    seen = Observation()
    for number, run in enumerate(case.values["runs"]):
        _run(candidate, case, number, run, seen)
    return seen


def _run(candidate: Any, case: Case, number: int, run: dict[str, Any], seen: Observation) -> None:
    modules = model_of(case, run["model"])
    given = [case.tensors[f"x{number}/{index}"] for index in range(len(SCRIPT))]
    xs = [x.clone() for x in given]
    kept = [x.new_empty(x.shape[0], outputs_of(modules, x)) for x in xs]
    after = [torch.empty_like(x) for x in xs]
    outs = {i: torch.full_like(kept[i], UNWRITTEN) for i, call in enumerate(SCRIPT) if call.get("out")}
    watched = [*given, *xs, *kept, *after, *outs.values()]
    trail = Trail(weights_of(modules), [p for m in modules for p in m.parameters()] + watched)
    recorder = Recorder(watch=[*modules, *watched]) if run.get("measured") else None
    seen.values[str(number)] = facts = {"calls": [], "grad": False}
    resized: list[str] = []
    with recorder or nullcontext():
        base = recorder.mark("before") if recorder else 0
        with collect_warnings(resized), trail:
            executor = candidate(modules, run["max_batch"])
            if run.get("small_first"):
                executor(given[3].clone())
        if recorder:
            recorder.mark("call 0")
        for index, call in enumerate(SCRIPT):
            x = xs[call["refills"]].copy_(given[index]) if "refills" in call else xs[index]
            before = len(trail.storages)
            with collect_warnings(resized), trail:
                y = executor(x, out=outs[index]) if index in outs else executor(x)
            fact: dict[str, Any] = {"made": [row["bytes"] for row in trail.storages[before:]]}
            if index in outs:
                fact["returned"] = _returned(y, outs[index])
                y = outs[index]
            else:
                examined(y, tuple(kept[index].shape), x.dtype, f"{run['name']}, call {index + 1}")
            facts["grad"] |= y.requires_grad
            with torch.no_grad():
                kept[index].copy_(y)
                after[index].copy_(x)
            del y
            facts["calls"].append(fact)
            if recorder:
                fact["held"] = recorder.mark(f"call {index + 1}") - base
                fact["reported"] = _reported(executor)
            if index in outs and kept[index][0, 0].isnan():
                time.sleep(0.03)  # time for whoever writes after the call has returned
    facts |= facts_of(trail, None, resized)
    if recorder:
        seen.recordings[str(number)] = recorder.recording
    seen.tensors |= {f"y{number}/{index}": y for index, y in enumerate(kept)}
    seen.tensors |= {f"x{number}/{index}": x for index, x in enumerate(after)}
    seen.tensors |= {f"out{number}/{index}": out.detach() for index, out in outs.items()}


def _returned(y: Any, out: torch.Tensor) -> str:
    """What came back from a call with `out`, for people; nothing if it is `out` or a tensor over the same numbers."""
    if not isinstance(y, torch.Tensor):
        return "nothing (None)" if y is None else f"a {type(y).__name__}"
    same = y.data_ptr() == out.data_ptr() and y.shape == out.shape and y.stride() == out.stride() and y.dtype == out.dtype
    return "" if same else "another tensor"


def _reported(executor: Any) -> Any:
    """`buffer_bytes` as a whole number; None where there is none, text where it is something else."""
    value = getattr(executor, "buffer_bytes", None)
    if callable(value):
        value = value()
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return f"a {type(value).__name__}"
