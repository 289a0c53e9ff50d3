"""What the ping-pong checks measured, drawn: where each layer wrote and what was alive; what each call made and what is held."""

from typing import TYPE_CHECKING

import numpy as np

from labkit.checks._core import Case, Observation
from labkit.checks._pingpong_cases import SCRIPT, limit_of
from labkit.checks._pingpong_judge import allocated_bytes, unit_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUFFER, _NEW, _LIMIT, _QUIET = "#0072b2", "#d55e00", "#b00020", "#999999"


def draw_places(case: Case, seen: Observation, buffers: int) -> "Figure | None":
    """Left: the memory that each layer wrote. Right: activations alive while the layers ran, at both depths."""
    if not case.values["runs"][-1].get("measured"):
        return None
    from labkit.figures.picture import styled

    return styled(_places)(case, seen, buffers)


def _places(case: Case, seen: Observation, buffers: int) -> "Figure":
    from labkit.figures.picture import new_picture

    picture, (left, right) = new_picture(8.4, 2.8, ncols=2)
    number = len(case.values["runs"]) - 1
    run, facts = case.values["runs"][number], seen.values[str(number)]
    products = facts["products"]
    rows: dict[int, int] = {}
    for product in products:
        rows.setdefault(product["place"], len(rows))
    for fresh, marker, colour, name in ((False, "s", _BUFFER, "written into a buffer"), (True, "^", _NEW, "a new tensor")):
        chosen = [product for product in products if product["fresh"] == fresh]
        if chosen:
            left.plot([p["layer"] + 1 for p in chosen], [rows[p["place"]] for p in chosen], marker, color=colour, ms=5, label=name)
    shown = max(len(rows), 2)
    left.set(xlabel="product, in order", ylabel="memory", ylim=(shown - 0.4, -0.6), title=f"Where each product went ({run['name']})")
    left.set_yticks(range(shown) if shown <= 10 else [], [chr(ord("A") + i) for i in range(shown)] if shown <= 10 else [])
    if products:
        left.legend(loc="center" if len(rows) <= 4 else "upper right", fontsize=7.5)
    top = buffers + 1.0
    told = []
    for other, colour, style in ((0, _QUIET, "--"), (number, _BUFFER, "-")):
        other_run, other_facts = case.values["runs"][other], seen.values[str(other)]
        unit = unit_bytes(case, other_run["model"], case.tensors[f"x{other}"])[0]
        index, _, live = seen.recordings[str(other)].timeline()
        phase = next(p for p in seen.recordings[str(other)].phases if p["name"] == "run")
        inside = (index >= phase["first_event"]) & (index < phase["last_event"])
        alive = np.concatenate([[0.0], (live[inside] - other_facts["base_bytes"]) / unit])
        share = np.linspace(0, 100, len(alive))
        right.step(share, alive, where="post", color=colour, ls=style, lw=1.5, label=other_run["name"])
        top = max(top, alive.max() * 1.15)
        told.append(f"{alive.max():.1f} activations at {other_run['name']}")
    right.axhline(buffers, color=_LIMIT, ls=(0, (5, 3)), lw=1)
    right.set(xlabel="events of the run (%)", ylabel="activations alive", ylim=(0, top), title="What was alive")
    right.legend(loc="upper left", fontsize=7.5)
    fresh = sum(product["fresh"] for product in products)
    picture.alt = (
        f"{run['name']}: {len(products)} products went to {len(rows)} places in memory, {fresh} of them into new tensors. "
        f"Alive at most: {', '.join(told)}; the line is at {buffers}."
    )
    picture.set_label(picture.alt)
    return picture


def draw_calls(case: Case, seen: Observation) -> "Figure | None":
    """Left: what each call made. Right: what the executor holds after each call."""
    if not case.values["runs"][-1].get("measured"):
        return None
    from labkit.figures.picture import styled

    return styled(_calls)(case, seen)


def _calls(case: Case, seen: Observation) -> "Figure":
    from labkit.figures.picture import new_picture

    picture, (left, right) = new_picture(8.4, 2.8, ncols=2)
    number = len(case.values["runs"]) - 1
    run, facts = case.values["runs"][number], seen.values[str(number)]
    recording = seen.recordings[str(number)]
    unit = unit_bytes(case, run["model"], case.tensors[f"x{number}/0"], run["max_batch"])[0]
    calls = range(1, len(SCRIPT) + 1)
    marks = ["before", *(f"call {call}" for call in (0, *calls))]
    made = [allocated_bytes(recording, a, b) / unit for a, b in zip(marks, marks[1:], strict=False)]  # the constructor's first
    may = [True, *(bool(call.get("may")) for call in SCRIPT)]
    for allowed, colour, name in ((True, _QUIET, "may"), (False, _NEW, "must not")):
        chosen = [i for i in range(len(made)) if may[i] == allowed]
        left.bar(chosen, [made[i] for i in chosen], color=colour, label=name)
    rows = {"max": "all", "less": "few", "other": "some"}
    kinds = [rows[call["rows"]] + (" out" if call.get("out") else "") for call in SCRIPT]
    names = [f"{call}\n{kind}".replace(" ", "\n") for call, kind in zip(calls, kinds, strict=True)]
    left.set_xticks([0, *calls], ["made", *names], fontsize=6)
    left.set(ylabel="activations", ylim=(0, max(2.2, *made) * 1.15), title=f"Allocated by each call ({run['name']})")
    left.legend(loc="upper right", fontsize=7.5)
    held = [call["held"] / unit for call in facts["calls"]]
    right.plot(calls, held, "o-", color=_BUFFER, lw=1.8, ms=4)
    limits = [limit_of(run, call) for call in calls]
    right.step(calls, limits, where="mid", color=_LIMIT, ls=(0, (5, 3)), lw=1)
    right.set(xlabel="after call", ylabel="activations held", ylim=(0, max(*limits, *held) * 1.15), title="Held between calls")
    later = sum(made[i] for i in range(len(made)) if not may[i])
    picture.alt = (
        f"{run['name']}: constructor and first call made {made[0] + made[1]:.1f} activations, "
        f"all calls that must make nothing {later:.1f}; "
        f"held between calls: at most {max(held):.1f} (two buffers are 2.0, a pair per batch size {limits[-1]:.1f})."
    )
    picture.set_label(picture.alt)
    return picture
