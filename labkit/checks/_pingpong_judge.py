"""What the ping-pong observations mean. Every expected value is computed here, from the case alone, in float64."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from labkit.checks._core import Case, Finding, Observation
from labkit.recorder import Recording

SMALL = 1 / 8  # of an activation: scratch that may be made beside the buffers
MAKERS = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "empty_like", "zeros_like", "empty_strided", "new_empty_strided")


def weights_of(case: Case, model: int) -> list[dict[str, torch.Tensor]]:
    """The named tensors of each layer or block of a model, in order."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in case.tensors.items():
        head, _, rest = name.partition("/")
        if head == str(model):
            layer, _, key = rest.partition("/")
            found.setdefault(int(layer), {})[key] = tensor
    return [found[layer] for layer in sorted(found)]


def expected(case: Case, model: int, x: torch.Tensor, skip: str = "added") -> torch.Tensor:
    """The network's output in float64. `skip`: "added", or for blocks what two mistakes give: "lost" and "overwritten"."""
    h = x.double()
    for tensors in weights_of(case, model):
        w = {key: tensor.double() for key, tensor in tensors.items()}
        if "weight" in w:
            h = torch.relu(h @ w["weight"].T + w["bias"])
            continue
        branch = torch.relu(h @ w["up.weight"].T + w["up.bias"]) @ w["down.weight"].T + w["down.bias"]
        h = {"added": h, "lost": torch.zeros_like(h), "overwritten": branch}[skip] + branch
    return h


def error_of(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference in units of the tolerance: right up to 1. nan counts as infinite."""
    if y.shape != reference.shape:
        return float("inf")
    rtol = {torch.float64: 1e-9, torch.bfloat16: 5e-2}.get(y.dtype, 1e-4)
    scale = reference.abs() + reference.abs().mean() if reference.numel() else reference
    worst = ((y.double() - reference).abs() / (rtol * scale + 1e-30)).nan_to_num(nan=float("inf"))
    return float(worst.max()) if worst.numel() else 0.0


def runs_of(case: Case, seen: Observation) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    for number, run in enumerate(case.values["runs"]):
        yield number, run, seen.values[str(number)]


def widths(case: Case, model: int, x: torch.Tensor) -> list[int]:
    """Columns of every activation, the input's first."""
    sizes = [x.shape[1]]
    for tensors in weights_of(case, model):
        sizes += [tensors[key].shape[0] for key in ("weight", "up.weight", "down.weight") if key in tensors]
    return sizes


def unit_bytes(case: Case, model: int, x: torch.Tensor, rows: int | None = None) -> tuple[int, int]:
    """(bytes of the widest activation, bytes from which a storage counts as one)."""
    row = (x.shape[0] if rows is None else rows) * x.element_size()
    sizes = widths(case, model, x)
    return row * max(sizes), row * min(sizes) // 2


def flops_of(case: Case, model: int, rows: int) -> int:
    """Floating point operations of one pass over the network."""
    return sum(2 * rows * t.numel() for layer in weights_of(case, model) for t in layer.values() if t.dim() == 2)


def allocated_bytes(recording: Recording, after: str, until: str) -> int:
    """Bytes of every storage made or grown between two marks, whatever became of them."""
    index, _, live = recording.timeline()
    changes = np.diff(live, prepend=0)
    events = {mark["name"]: mark["event"] for mark in recording.marks}
    return int(changes[(index >= events[after]) & (index < events[until]) & (changes > 0)].sum())


# -- functions: pingpong_forward and residual_forward --


def judge_function(case: Case, seen: Observation, buffers: int) -> list[Finding]:
    """Findings of one case; `buffers` is how many activations may be alive besides the result's own copy."""
    if case.covers:
        return [_edge_cases(case, seen)]
    findings = [_output(case, seen), _untouched(case, seen), _buffers_fit(case, seen, buffers)]
    if case.values["runs"][-1].get("measured"):
        findings += [_created(case, seen, buffers), _peak(case, seen, buffers), _work(case, seen)]
    return findings


def _output(case: Case, seen: Observation) -> Finding:
    wanted = "within 1e-4 of the network's"
    for number, run, facts in runs_of(case, seen):
        reference = expected(case, run["model"], case.tensors[f"x{number}"])
        y = seen.tensors[f"y{number}"]
        if error_of(y, reference) > 1:
            share = float((y.double() - reference).abs().max() / reference.abs().max())
            off = "nan" if share != share else f"off by {100 * share:.2g}% of the largest value"
            hint = why_wrong(case, run["model"], facts, y, f"x{number}")
            return Finding("output", False, wanted, f"{off} ({run['name']})", hint, places_told(facts, hint))
    names = ", ".join(dict.fromkeys(run["name"] for _, run, _ in runs_of(case, seen)))
    return Finding("output", True, wanted, f"right with {names}")


def why_wrong(case: Case, model: int, facts: dict[str, Any], y: torch.Tensor, key: str) -> str:
    """The hint for a wrong output `y` of the input `key`."""
    x, blocks = case.tensors[key], any("up.weight" in layer for layer in weights_of(case, model))
    if error_of(y, x.double()) <= 1 or (facts["layers_seen"] == 0 and not y.any()):
        return "does-nothing"
    if blocks and error_of(y, expected(case, model, x, "lost")) <= 1:
        return "skip-lost"
    others = [t for name, t in case.tensors.items() if name[0] == "x" and name != key and t.shape == x.shape]
    if any(error_of(y, expected(case, model, other)) <= 1 for other in others):
        return "stale"
    per_layer = Counter((product["pass"], product["layer"]) for product in facts["products"])
    if facts["clobbered"] and max(per_layer.values(), default=0) > 2:
        return "own-input"
    if facts["clobbered"]:
        made = [row for row in facts["storages"] if row["op"] in MAKERS]
        places = {product["place"] for product in facts["products"]}
        return "never-flips" if len(places) == 1 and len(made) > 1 else "same-buffer"
    reference = expected(case, model, x)
    if float((y.double() - reference).abs().max()) < 0.03 * float(reference.abs().max()):
        return "precision"
    # In a block the up-product is an even one; what it read is the sum's first term.
    lost = blocks and (any(layer % 2 == 0 for layer in facts["replaced"]) or error_of(y, expected(case, model, x, "overwritten")) <= 1)
    return "skip-source" if lost else "numbers"


def places_told(facts: dict[str, Any], hint: str) -> str:
    """Which buffer each of the first layers wrote, in letters, where the hint is about memory."""
    if hint not in ("same-buffer", "never-flips", "own-input", "skip-source"):
        return ""
    letters: dict[int, str] = {}
    for product in facts["products"]:
        letters.setdefault(product["layer"], chr(ord("A") + min(product["place"], 25)))
    if not letters:
        return ""
    shown = " ".join(letters[layer] for layer in sorted(letters)[:12])
    return f"Memory that the layers wrote, in order: {shown}" + (" ..." if len(letters) > 12 else "")


def _untouched(case: Case, seen: Observation) -> Finding:
    keys = {run["name"]: f"x{number}" for number, run, _ in runs_of(case, seen)}
    changed = [name for name, key in keys.items() if not torch.equal(seen.tensors[key], case.tensors[key])]
    told = f"changed ({changed[0]})" if changed else "unchanged"
    return Finding("input", not changed, "unchanged", told, "input-changed")


def _buffers_fit(case: Case, seen: Observation, buffers: int) -> Finding:
    wanted = "none replaced by torch; the outgrown freed"
    for number, run, facts in runs_of(case, seen):
        if facts["resized"]:
            told = f"torch replaced {len(facts['resized'])} ({run['name']})"
            return Finding("buffers fit", False, wanted, told, "widest", facts["resized"][0])
        if run.get("widens"):
            unit = unit_bytes(case, run["model"], case.tensors[f"x{number}"])[0]
            if facts["alive"] > (buffers + SMALL) * unit + facts["result_bytes"]:
                told = f"{facts['alive'] / unit:.1f} activations alive at a product ({run['name']})"
                return Finding("buffers fit", False, wanted, told, "peak")
    return Finding("buffers fit", True, wanted, "none replaced, none left over")


def counted(case: Case, run: dict[str, Any], x: torch.Tensor, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Storages of activation size, without one that holds nothing but the result; one that grows counts once."""
    least, found = unit_bytes(case, run["model"], x)[1], {}
    for i, row in enumerate(facts["storages"]):
        first = i
        while facts["storages"][first]["grew"] is not None:
            first = facts["storages"][first]["grew"]
        if row["bytes"] >= least and i != facts["result_row"]:
            found[first] = {**facts["storages"][first], "bytes": row["bytes"]}
    return list(found.values())


def _created(case: Case, seen: Observation, buffers: int) -> Finding:
    rows, grown, told = [], [], []
    wanted = f"at most {buffers}, at any depth"
    for number, run, facts in runs_of(case, seen):
        x = case.tensors[f"x{number}"]
        total = sum(tensor.dim() == 2 for layer in weights_of(case, run["model"]) for tensor in layer.values())
        if facts["layers_seen"] < total:
            what = f"{total - facts['layers_seen']} of {total} products ran out of sight ({run['name']})"
            return Finding("tensors created", False, wanted, what, "out-of-sight")
        rows.append(counted(case, run, x, facts))
        grown.append(allocated_bytes(seen.recordings[str(number)], "before", "after") - facts["result_bytes"])
        told.append(f"{len(rows[-1])} with {run['name']}")
    unit = unit_bytes(case, case.values["runs"][0]["model"], case.tensors["x0"])[0]
    few = len(rows[0]) <= buffers and len(rows[-1]) <= buffers
    more = (grown[-1] - grown[0]) / unit
    if few and more <= SMALL:
        return Finding("tensors created", True, wanted, ", ".join(told))
    if few:  # the bytes grow though the tensors do not: one that grows with depth, storages regrown, or many small ones
        deeper, flat = (case.values["runs"][i]["name"] for i in (-1, 0))
        told = [f"{more:.1f} activations' worth of memory more with {deeper} than with {flat}"]
        largest = [max((row["bytes"] for row in found), default=0) for found in rows]
        small = sum(row["bytes"] for row in facts["storages"]) - sum(row["bytes"] for row in rows[-1])
        hint = "arena-grows" if largest[-1] > largest[0] else "per-layer" if small > unit else "buffer-per-layer"
        return Finding("tensors created", False, wanted, ", ".join(told), hint)
    return Finding("tensors created", False, wanted, ", ".join(told), *_why_created(rows, seen))


def _why_created(rows: list[list[dict[str, Any]]], seen: Observation) -> tuple[str, str]:
    facts = seen.values[str(len(rows) - 1)]
    made = Counter(row["op"] if row["born"] else f"{row['op']} (memory from outside torch)" for row in rows[-1])
    detail = "Created in one call: " + ", ".join(f"{count} by {op}" for op, count in made.most_common(4)) if made else ""
    layers = max(facts["layers_seen"], 1)
    fresh = {product["layer"] for product in facts["products"] if product["fresh"]}
    if facts["grad"]:
        return "grad", detail
    if facts["resized"]:
        return "widest", detail
    if len(rows[-1]) == len(rows[0]):
        return "one-too-many", detail
    if len(fresh) > layers / 2:
        return ("copied" if facts["copies"] >= layers / 2 else "per-layer"), detail
    makers = sum(row["op"] in MAKERS or not row["born"] for row in rows[-1])
    return ("buffer-per-layer" if makers > len(rows[-1]) / 2 else "hidden"), detail


def _peak(case: Case, seen: Observation, buffers: int) -> Finding:
    wanted, told, extra, passed, hint, detail = f"at most {buffers} activations and the result", [], [], True, None, ""
    for number, run, facts in runs_of(case, seen):
        unit = unit_bytes(case, run["model"], case.tensors[f"x{number}"])[0]
        extra.append(facts["peak_bytes"])
        told.append(f"{extra[-1] / unit:.1f} with {run['name']}")
        kept = facts["held_bytes"][1] - facts["held_bytes"][0]
        if facts["grad"]:
            passed, hint = False, "grad"
            told[-1] += ", held by an autograd graph"
        elif extra[-1] > (buffers + SMALL) * unit + facts["result_bytes"]:
            passed, hint = False, hint or "peak"
        elif kept > SMALL * unit:
            passed, hint = False, hint or "kept"
            told[-1] += f", and {kept / unit:.1f} more are kept with every call"
        if not passed and not detail:
            detail = f"Alive at the peak ({run['name']}): {seen.recordings[str(number)].alive_summary()}"
    if passed and abs(extra[-1] - extra[0]) > SMALL * unit:
        passed, hint = False, "peak"
    return Finding("memory at the peak", passed, wanted, ", ".join(told), hint, detail)


def _work(case: Case, seen: Observation) -> Finding:
    worst = 0.0
    for number, run, facts in runs_of(case, seen):
        worst = max(worst, facts["flops"] / flops_of(case, run["model"], case.tensors[f"x{number}"].shape[0]))
    return Finding("work", worst <= 1.05, "each layer runs once", f"{worst:.2f} times the FLOPs of one pass", "recomputed")


def _edge_cases(case: Case, seen: Observation) -> Finding:
    for number, run, facts in runs_of(case, seen):
        x = case.tensors[f"x{number}"]
        told = ""
        if facts["error"]:
            told = facts["error"]
        elif error_of(seen.tensors[f"y{number}"], expected(case, run["model"], x)) > 1:
            told = "wrong output"
        elif not torch.equal(seen.tensors[f"x{number}"], x):
            told = "the input was changed"
        elif facts["grad"]:
            told = "the result hangs on an autograd graph"
        if told:
            short = told.splitlines()[0][:120]
            hint, detail = run.get("hint", "edge"), f"With {run['name']}: {told}"
            return Finding("edge cases", False, "right in all", f"{run['name']}: {short}", hint, detail)
    return Finding("edge cases", True, "right in all", f"right in {len(case.values['runs'])}")
