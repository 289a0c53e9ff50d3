"""Run a candidate beside the recorder and a trail, and say what was seen."""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from labkit.checks._core import Case, Observation, WrongResult
from labkit.checks._pingpong_trail import Trail
from labkit.models import ResidualBlock
from labkit.recorder import Recorder


def model_of(case: Case, number: int) -> list[nn.Module]:
    """Model `number` of a case: linear layers, or residual blocks where the tensors say so."""
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in case.tensors.items():
        model, _, rest = name.partition("/")
        if model == str(number) and rest:
            layer, _, key = rest.partition("/")
            weights.setdefault(int(layer), {})[key] = tensor
    modules = []
    for layer in sorted(weights):
        tensors = weights[layer]
        if "weight" in tensors:
            module: nn.Module = nn.Linear(*tensors["weight"].shape[::-1], device="meta")
        else:
            module = ResidualBlock(*tensors["up.weight"].shape[::-1], torch.Generator())
        modules.append(module)
        module.load_state_dict({key: tensor.clone() for key, tensor in tensors.items()}, assign=True)
        module.requires_grad_(True)
    return modules


def weights_of(modules: Sequence[nn.Module]) -> list[list[torch.Tensor]]:
    """The tensors that one product each reads, in the order of the products."""
    return [[m.weight] for module in modules for m in module.modules() if isinstance(m, nn.Linear)]


def _input(case: Case, key: str, run: dict[str, Any]) -> torch.Tensor:
    x = case.tensors[key].clone()
    if run.get("strided"):  # every second column of a wider tensor; nan between them shows a read past the view
        wide = x.new_full((x.shape[0], 2 * x.shape[1] + 1), float("nan"))
        x = wide[:, 1::2].copy_(x)
    return x.requires_grad_(bool(run.get("grad")))


def outputs_of(modules: Sequence[nn.Module], x: torch.Tensor) -> int:
    last = modules[-1] if modules else None
    return last.out_features if isinstance(last, nn.Linear) else x.shape[1]


def examined(y: Any, shape: tuple[int, int], dtype: torch.dtype, run: str) -> torch.Tensor:
    """The result, if it is a tensor of the right shape and type; WrongResult that says what came back if not."""
    wanted = f"expected a {shape} tensor of {dtype}"
    if not isinstance(y, torch.Tensor):
        came = "nothing (None)" if y is None else f"a {type(y).__name__}"
        raise WrongResult(f"With {run}: {came} came back, {wanted}.", "nothing-returned" if y is None else None)
    if tuple(y.shape) != shape or y.dtype != dtype:
        hint = "shape" if tuple(y.shape) != shape else "dtype"
        raise WrongResult(f"With {run}: a {tuple(y.shape)} tensor of {y.dtype} came back, {wanted}.", hint)
    return y


@contextmanager
def collect_warnings(resized: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    resized += [str(w.message).split(". ")[0][:200] for w in caught if "resized" in str(w.message)]


def facts_of(trail: Trail, y: Any, resized: list[str]) -> dict[str, Any]:
    row = trail.row_of(y) if isinstance(y, torch.Tensor) else -2
    writers = {product["layer"] for product in trail.products if product["storage"] == row}
    last = max((product["layer"] for product in trail.products), default=-1)
    own = row >= 0 and writers <= {last}  # memory that holds the result and nothing before it
    return {
        "storages": trail.storages,
        "products": trail.products[:400],
        "alive": trail.alive,
        "layers_seen": trail.layers_seen,
        "clobbered": trail.clobbered[:8],
        "replaced": trail.replaced,
        "copies": trail.copies,
        "result_row": row if own else -1,
        "result_bytes": trail.storages[row]["bytes"] if own else 0,
        "resized": resized,
    }


def probe_function(candidate: Any, case: Case) -> Observation:
    """Call candidate(modules, x) in every run of the case."""
    torch.set_num_threads(1)  # products this small only wait for their second thread; the process is the probe's own
    gc.freeze()  # marks collect garbage: only what the candidate makes need be looked at
    seen = Observation()
    models: dict[int, list[nn.Module]] = {}
    x = torch.empty(0)
    for number, run in enumerate(case.values["runs"]):
        if run["model"] not in models:  # the same layers in every run of a model, as in a server
            models[run["model"]] = model_of(case, run["model"])
        modules = models[run["model"]]
        x = x.copy_(case.tensors[f"x{number}"]) if run.get("refills") else _input(case, f"x{number}", run)
        facts: dict[str, Any] = {"error": None}
        seen.values[str(number)] = facts
        try:
            y = _run(candidate, modules, x, run, seen, number)
        except Exception as error:
            if case.covers is None or isinstance(error, NotImplementedError):
                raise
            facts["error"] = str(error) if isinstance(error, WrongResult) else f"{type(error).__name__}: {error}"[:300]
            continue
        seen.tensors[f"y{number}"] = y
        seen.tensors[f"x{number}"] = x.detach().clone()
    return seen


def _run(candidate: Any, modules: list[nn.Module], x: torch.Tensor, run: dict[str, Any], seen: Observation, number: int) -> torch.Tensor:
    """One call and what was seen of it; the result is a copy, since it may lie in memory that the next call uses."""
    resized: list[str] = []
    facts = seen.values[str(number)]
    shape = (x.shape[0], outputs_of(modules, x))
    trail = Trail(weights_of(modules), [p for m in modules for p in m.parameters()] + [x])
    if not run.get("measured"):
        with collect_warnings(resized), trail:
            y = candidate(modules, x)
        facts |= facts_of(trail, y, resized)
        facts["grad"] = examined(y, shape, x.dtype, run["name"]).requires_grad
        return y.detach().clone()
    second, kept = torch.randn_like(x), x.new_empty(shape)
    with Recorder(watch=[*modules, x, second, kept]) as recorder:
        facts["base_bytes"] = recorder.mark("before")
        with recorder.phase("run"), collect_warnings(resized), trail:
            y = candidate(modules, x)
        facts |= facts_of(trail, y, resized)
        facts["grad"] = examined(y, shape, x.dtype, run["name"]).requires_grad
        facts["held_bytes"] = [recorder.mark("after")]
        with torch.no_grad():
            kept.copy_(y)
        with collect_warnings([]):
            again = candidate(modules, second)  # whatever is kept from call to call shows after this one
        del again
        facts["held_bytes"].append(recorder.mark("after another"))
    recording = recorder.recording
    facts["peak_bytes"] = recording.peak("run") - facts["base_bytes"]
    facts["flops"] = recording.flops("run")
    seen.recordings[str(number)] = recording
    return kept
