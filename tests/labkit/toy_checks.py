"""A check small enough to see through: `double(x)` must return 2x and must not allocate more than one tensor for it."""

from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.recorder import Recorder


def cases(generator: torch.Generator, strict: bool) -> list[Case]:
    sizes = (256, 1000, 4096) if strict else (256, 1000)
    made = [Case(f"{size} numbers", tensors={"x": torch.randn(size, generator=generator)}) for size in sizes]
    return [*made, Case("no numbers", tensors={"x": torch.empty(0)}, covers=("empty input",))]


def probe(candidate: Any, case: Case) -> Observation:
    x = case.tensors["x"].clone()
    with Recorder(watch=[x]) as recorder:
        y = candidate(x)
    if not isinstance(y, torch.Tensor):
        raise WrongResult(f"returned a {type(y).__name__}, expected a tensor of {x.numel()} numbers", "type")
    return Observation(tensors={"y": y}, recordings={"run": recorder.recording})


def judge(case: Case, seen: Observation) -> list[Finding]:
    x, y = case.tensors["x"], seen.tensors["y"]
    if case.covers:
        return [Finding("empty input", y.shape == x.shape, "an empty tensor", f"shape {tuple(y.shape)}", "empty")]
    right = y.shape == x.shape and torch.allclose(y, 2 * x)
    count = len(seen.recordings["run"].allocations(min_bytes=x.numel() * 4))
    return [
        Finding("values", right, "2x", "2x" if right else f"{(y.double().sum() / x.double().sum()).item():.3g}x", "scale"),
        Finding("allocations", count == 1, "1 tensor", f"{count} tensors", "allocations", "made: " + "clone " * count),
    ]


def picture(case: Case, seen: Observation) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1))
    figure.add_subplot().plot([0, 1])
    figure.set_label("one line")
    return figure


TOY = register(
    Check(
        name="toy.double",
        criteria=(
            Criterion("values", "numbers", 1, "recomputed"),
            Criterion("allocations", "technique", 2),
            Criterion("empty input", "cost", 1, "recomputed"),
        ),
        cases=cases,
        probe=probe,
        judge=judge,
        hints={
            "scale": "By what is it off?",
            "allocations": "Which line makes a tensor?",
            "empty": "And with nothing?",
            "type": "What is it?",
            "grad": "Who needs it?",
        },
        forbids=("torch.utils.checkpoint", "torch.mul"),
        on_error=lambda error: "grad" if "grad" in error["message"] else None,
        picture=picture,
        summary=lambda case, seen: "1 tensor made",
        timeout=4.0,
    )
)


def rank_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    return [Case("2 ranks", tensors={"x": torch.randn(5, generator=generator)}, world_size=2)]


def rank_probe(candidate: Any, case: Case) -> Observation:
    x = case.tensors["x"] * (dist.get_rank() + 1)
    candidate(x)
    return Observation(values={"rank": dist.get_rank()}, tensors={"x": x})


def rank_judge(case: Case, seen: Observation) -> list[Finding]:
    right = all(torch.allclose(rank.tensors["x"], 3 * case.tensors["x"]) for rank in seen.ranks)
    order = [rank.values["rank"] for rank in seen.ranks]
    return [Finding("sum", right and order == [0, 1], "3x on both ranks", "3x" if right else "something else", "sum")]


RANKS = register(
    Check(
        name="toy.sum",
        criteria=(Criterion("sum", "numbers", 1, "recomputed"),),
        cases=rank_cases,
        probe=rank_probe,
        judge=rank_judge,
        hints={"sum": "Who adds?"},
    )
)
