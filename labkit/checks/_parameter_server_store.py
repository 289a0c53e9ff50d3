"""Check "parameter_server.store": one owner of parameters and optimizer, whose pulls are copies of one version."""

from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._parameter_server_hints import HINTS, on_error

STEPS, MEAN, OWN, VERSION = "one step", "mean", "own memory", "version"
SHAPES = {"b.weight": (3, 5), "a.bias": (7,), "scale": ()}
RATE, MOMENTUM, DECAY = 0.25, 0.75, 0.05
_SCRIBBLE = 1e4


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    counts = [[1, 1, 1, 1], [3, 1, 4, 2], *([[2, 2, 2], [1, 6, 1, 5, 3]] if strict else [])]
    names = [f"gradients per step: {', '.join(map(str, count))}" for count in counts]
    decides = [None, *[(MEAN,)] * (len(counts) - 1)]
    return [
        Case(name, {"counts": count, "seed": seed()}, covers=covers)
        for name, count, covers in zip(names, counts, decides, strict=True)
    ]


def tensors_of(values: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[list[dict[str, torch.Tensor]]]]:
    """The parameters at the start, and for each step its gradients."""
    generator = torch.Generator().manual_seed(values["seed"])
    draw = lambda: {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}  # noqa: E731
    return draw(), [[draw() for _ in range(count)] for count in values["counts"]]


def _read(store: Any) -> tuple[int, dict[str, torch.Tensor]]:
    try:
        version, parameters = store.pull()
        version = int(version)
        good = {name: tuple(value.shape) for name, value in parameters.items()} == SHAPES
    except (TypeError, ValueError, AttributeError):
        raise WrongResult("pull() does not return (version, dict of name -> tensor)", "names") from None
    if not good:
        raise WrongResult("pull() returns other names or shapes than the store was made of", "names")
    return version, parameters


def _copy(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def _probe(candidate: Any, case: Case) -> Observation:
    given, steps = tensors_of(case.values)
    given["b.weight"] = torch.nn.Parameter(given["b.weight"])  # as the lab's own model has them
    start, _ = tensors_of(case.values)
    store = candidate(given, make_optimizer)
    versions, attributes, tensors = [], [], {}
    version, first = _read(store)
    versions.append(version)
    facts = {"graph": any(value.grad_fn is not None or value.requires_grad for value in first.values())}
    for name in SHAPES:
        tensors[f"0/{name}"] = first[name].detach().clone()
    before, sent_changed = _copy(first), False
    for number, gradients in enumerate(steps, 1):
        sent = [_copy(one) for one in gradients]
        store.apply(gradients)
        sent_changed |= not all(_same(a, b) for a, b in zip(gradients, sent, strict=True))
        for one in gradients:  # a worker reuses its memory
            for value in one.values():
                value.fill_(_SCRIBBLE)
        version, pulled = _read(store)
        versions.append(version)
        attributes.append(int(store.version) if hasattr(store, "version") else -1)
        for name in SHAPES:
            tensors[f"{number}/{name}"] = pulled[name].detach().clone()
    facts["later"] = not _same(first, before)
    facts["given"] = not _same(given, start)
    facts["sent"] = sent_changed
    _, now = _read(store)
    kept = _copy(now)
    with torch.no_grad():
        for value in (*now.values(), *given.values()):
            value.add_(7.0)
    _, again = _read(store)
    facts["scribbled"] = not _same(again, kept)
    return Observation({"versions": versions, "attributes": attributes, "facts": facts}, tensors)


def replay(values: dict[str, Any], mixture: str = "mean") -> list[dict[str, torch.Tensor]]:
    """The parameters after each step, by the formulas of SGD in double precision; `mixture`: what the optimizer sees."""
    start, steps = tensors_of(values)
    weights = {name: value.double() for name, value in start.items()}
    speed = {name: torch.zeros_like(value) for name, value in weights.items()}
    left = {name: torch.zeros_like(value) for name, value in weights.items()}
    states = [_copy(weights)]
    for gradients in steps:
        parts = [{name: value.double() for name, value in one.items()} for one in gradients]
        mean = {name: sum(one[name] for one in parts) / len(parts) for name in weights}
        if mixture == "sum":
            mean = {name: len(parts) * value for name, value in mean.items()}
        elif mixture == "accumulated":
            left = mean = {name: left[name] + value for name, value in mean.items()}
        for one in {"each": parts, "first": parts[:1], "last": parts[-1:]}.get(mixture, [mean]):
            for name, weight in weights.items():
                push = one[name] + DECAY * weight
                speed[name] = push if mixture == "forgets" else MOMENTUM * speed[name] + push
                weights[name] = weight - RATE * speed[name]
        states.append(_copy(weights))
    return states


def _fits(seen: Observation, states: list[dict[str, torch.Tensor]]) -> int | None:
    """The first step at which they differ; None where they never do."""
    for number, state in enumerate(states):
        for name, value in state.items():
            if not torch.allclose(seen.tensors[f"{number}/{name}"].double(), value, rtol=1e-4, atol=1e-5):
                return number
    return None


_WHY = {"sum": "scale-store", "each": "each-applied", "first": "first-only", "last": "first-only", "forgets": "optimizer-gone",
        "accumulated": "accumulated"}  # fmt: skip


def _judge(case: Case, seen: Observation) -> list[Finding]:
    several = max(case.values["counts"]) > 1
    name = MEAN if several else STEPS
    wanted = "one optimizer step with the mean gradient" if several else "what SGD with momentum makes of each gradient"
    wrong = _fits(seen, replay(case.values))
    if wrong is not None:
        hint = next((told for mixture, told in _WHY.items() if _fits(seen, replay(case.values, mixture)) is None), "values")
        if hint == "values" and seen.values["facts"]["scribbled"] and wrong == 0:
            hint = "aliased-start"
        elif hint == "values" and max(seen.tensors[f"{wrong}/{one}"].abs().max() for one in SHAPES) > 0.02 * _SCRIBBLE:
            hint = "kept-gradient"
        told = f"other parameters after step {wrong}" if wrong else "other parameters before the first step"
        return [Finding(name, False, wanted, told, hint)]
    found = [Finding(name, True, wanted, f"equal after {len(case.values['counts'])} steps")]
    if not several:
        found += [_own(seen), _version(case, seen)]
    return found


def _own(seen: Observation) -> Finding:
    facts, wanted = seen.values["facts"], "nobody else's memory is read or written"
    for fact, told, hint in (
        ("given", "what the store was made of changes with its steps", "aliased-start"),
        ("scribbled", "writing to what was pulled, or to what the store was made of, changes the store", "aliased-pull"),
        ("later", "what was pulled changes with later steps", "aliased-later"),
        ("sent", "a gradient that was handed in is changed", "aliased-gradient"),
        ("graph", "what was pulled requires a gradient", "graph"),
    ):
        if facts[fact]:
            return Finding(OWN, False, wanted, told, hint)
    return Finding(OWN, True, wanted, "copies only")


def _version(case: Case, seen: Observation) -> Finding:
    right = list(range(len(case.values["counts"]) + 1))
    wanted = "0, then one more with each step, in `version` and in pulls"
    told = f"pulls {seen.values['versions']}, attribute {seen.values['attributes']}"
    return Finding(VERSION, seen.values["versions"] == right and seen.values["attributes"] == right[1:], wanted, told, "version")


def _summary(case: Case, seen: Observation) -> str | None:
    return f"{len(case.values['counts'])} steps equal SGD with momentum in one process; pulls are copies of one version"


register(Check(
    "parameter_server.store",
    criteria=(
        Criterion(STEPS, "numbers", 0.5, "recomputed"),
        Criterion(MEAN, "technique", 0.5, "recomputed"),
        Criterion(OWN, "technique", 0.75),
        Criterion(VERSION, "cost", 0.25),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip
