"""Checks of lab 01: two activation buffers for any depth.

Numbers alone do not tell a ping-pong from the plain loop, and the peak hardly does (Python frees what nobody holds: 2 activations
against 3). So these checks grade what was created: storages of activation size, whether their number depends on depth, and what a
second call still makes.
"""

from functools import partial

from labkit.checks._core import Case, Check, Criterion, Observation, register
from labkit.checks._pingpong_calls import probe_executor
from labkit.checks._pingpong_cases import forward_cases, persistent_cases, residual_cases
from labkit.checks._pingpong_executor import judge_executor
from labkit.checks._pingpong_hints import HINTS, typical_error
from labkit.checks._pingpong_judge import judge_function, unit_bytes
from labkit.checks._pingpong_picture import draw_calls, draw_places
from labkit.checks._pingpong_probe import probe_function


def _summary(case: Case, seen: Observation) -> str | None:
    runs = case.values["runs"]
    if not runs[-1].get("measured"):
        return None
    number = len(runs) - 1
    facts, unit = seen.values[str(number)], unit_bytes(case, runs[-1]["model"], case.tensors[f"x{number}"])[0]
    return f"{facts['peak_bytes'] / unit:.1f} activations at {runs[0]['name']} and at {runs[-1]['name']}"


def _summary_of_calls(case: Case, seen: Observation) -> str | None:
    runs = case.values["runs"]
    if not runs[-1].get("measured"):
        return None
    number = len(runs) - 1
    facts = seen.values[str(number)]
    unit = unit_bytes(case, runs[-1]["model"], case.tensors[f"x{number}/0"])[0]
    return f"holds {facts['calls'][1]['held'] / unit:.1f} activations at {runs[-1]['name']}, later calls make nothing"


FORWARD = register(
    Check(
        name="pingpong.forward",
        criteria=(
            Criterion("output", "numbers", 1, "recomputed"),
            Criterion("tensors created", "technique", 1.5, "none"),
            Criterion("memory at the peak", "cost", 0.5, "memory"),
            Criterion("buffers fit", "cost", 0.5, "none"),
            Criterion("input", "cost", 0.5, "recomputed"),
            Criterion("work", "cost", 0.5, "none"),
            Criterion("edge cases", "cost", 0.5, "recomputed"),
        ),
        cases=forward_cases,
        probe=probe_function,
        judge=partial(judge_function, buffers=2),
        hints=HINTS,
        on_error=typical_error,
        picture=partial(draw_places, buffers=2),
        summary=_summary,
    )
)

RESIDUAL = register(
    Check(
        name="pingpong.residual",
        criteria=(
            Criterion("output", "numbers", 1, "recomputed"),
            Criterion("tensors created", "technique", 1, "none"),
            Criterion("memory at the peak", "cost", 0.5, "memory"),
            Criterion("buffers fit", "cost", 0.5, "none"),
            Criterion("input", "cost", 0.5, "recomputed"),
            Criterion("work", "cost", 0.25, "none"),
            Criterion("edge cases", "cost", 0.25, "recomputed"),
        ),
        cases=residual_cases,
        probe=probe_function,
        judge=partial(judge_function, buffers=3),
        hints=HINTS,
        on_error=typical_error,
        picture=partial(draw_places, buffers=3),
        summary=_summary,
    )
)

PERSISTENT = register(
    Check(
        name="pingpong.persistent",
        criteria=(
            Criterion("output", "numbers", 1, "recomputed"),
            Criterion("second call", "technique", 1.5, "none"),
            Criterion("smaller batch", "cost", 0.5, "none"),
            Criterion("memory held", "cost", 0.5, "memory"),
            Criterion("result in out", "cost", 0.5, "recomputed"),
            Criterion("input", "cost", 0.5, "recomputed"),
            Criterion("buffer_bytes", "cost", 0.5, "none"),
        ),
        cases=persistent_cases,
        probe=probe_executor,
        judge=judge_executor,
        hints=HINTS,
        on_error=typical_error,
        picture=draw_calls,
        summary=_summary_of_calls,
    )
)
