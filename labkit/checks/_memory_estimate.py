"""Checks "memory.estimate" and "memory.card": the peak of a training step by category, and the smallest card that holds it."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._memory_truth import (
    RECIPES,
    config_of,
    draw,
    estimate,
    near,
    number,
    parameter_count,
    random_config,
    record_step,
    told,
    with_,
)
from labkit.gpt import GPT2_XL
from labkit.recorder.categories import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATE_TOLERANCE, TOLERANCE = 0.02, 0.05


def large_vocabulary(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a vocabulary so large that the peak stands at the loss: more than attention's tables and a block's inside."""
    config = config_of(row["config"])
    enough = 4 * config.heads * row["seq"] + 8 * config.width
    return row | {"config": vars(with_(config, vocab=max(config.vocab, enough)))}


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    kinds = ("loss", "wide", "long") + (("wide", "long", "loss") if strict else ())
    rows = [large_vocabulary(random_config(generator, kind=kind)) | {"recipe": "fp32"} for kind in kinds]
    rows[0]["batch"] = min(rows[0]["batch"], 3)  # the judge runs this one
    half = ("16-bit", "mixed", "mixed, gradients twice")
    rows += [large_vocabulary(random_config(generator, kind="wide")) | {"recipe": recipe} for recipe in half]
    if strict:
        rows += [large_vocabulary(random_config(generator, kind="loss")) | {"recipe": "mixed, fp32 gradients"}]
        rows += [{"config": vars(GPT2_XL), "batch": draw(generator, 1, 16), "seq": 1024, "recipe": "mixed"}]
    return [Case("training steps", {"rows": rows})]


def _probe(candidate: Any, case: Case) -> Observation:
    rows = []
    for row in case.values["rows"]:
        answer = candidate(config_of(row["config"]), row["batch"], row["seq"], dict(RECIPES[row["recipe"]]))
        if not isinstance(answer, Mapping) or set(answer) != set(CATEGORIES):
            raise WrongResult(f"estimate returned {str(answer)[:60]}, expected a dict with the keys {', '.join(CATEGORIES)}", "keys")
        rows.append({name: number(answer[name], f"estimate, {name!r}") for name in CATEGORIES})
    return Observation({"rows": rows})


def _measured(row: Mapping[str, Any]) -> dict[str, int] | None:
    """What the recorder measures at the peak of a step of the judge's own, where this recipe can be run as it is."""
    dtype = {"fp32": torch.float32, "16-bit": torch.bfloat16}.get(row["recipe"])
    config = config_of(row["config"])
    if dtype is None or parameter_count(config) > 2e6:
        return None
    return record_step(config, row["batch"], row["seq"], dtype).by_category("peak")


def _judge(case: Case, seen: Observation) -> list[Finding]:
    states = Finding("states", True, "within 2% of the recorder", "right")
    batch = Finding("with the batch", True, "within 5% of the recorder", "right")
    peak = Finding("the peak", True, "within 5% of the recorder", "right")
    worst = {"states": 0.0, "batch": 0.0, "peak": 0.0}
    for number_, (row, got) in enumerate(zip(case.values["rows"], seen.values["rows"], strict=True)):
        config = config_of(row["config"])
        right = estimate(config, row["batch"], row["seq"], RECIPES[row["recipe"]])
        measured = _measured(row) if number_ == 0 else None
        source = ", measured just now" if measured else ""
        right = measured or right
        for name in ("parameters", "gradients", "optimizer state"):
            worst["states"] = max(worst["states"], abs(got[name] - right[name]) / right[name])
            if states.passed and not near(got[name], right[name], STATE_TOLERANCE):
                observed = f"{name} {told(got[name])}, recipe {row['recipe']}"
                states = Finding("states", False, f"{told(right[name])}, within 2%{source}", observed, _state_hint(name, got, right))
        for name in ("activations", "input data"):
            worst["batch"] = max(worst["batch"], abs(got[name] - right[name]) / right[name])
            if batch.passed and not near(got[name], right[name], TOLERANCE):
                observed = f"{name} {told(got[name])}, recipe {row['recipe']}"
                hint = "numbers" if near(got[name] * RECIPES[row["recipe"]]["weights"], right[name] * 4, 0.01) else "batch"
                batch = Finding("with the batch", False, f"{told(right[name])}, within 5%{source}", observed, hint)
        mine, whole = sum(got.values()), sum(right.values())
        worst["peak"] = max(worst["peak"], abs(mine - whole) / whole)
        if peak.passed and not (near(mine, whole, TOLERANCE) and near(got["other"], right["other"], 0.1)):
            observed = f"{told(mine)}, of which other {told(got['other'])}, recipe {row['recipe']}"
            expected = f"{told(whole)}, within 5%, of which other {told(right['other'])}{source}"
            size = RECIPES[row["recipe"]]["weights"]
            hint = "numbers" if size != 4 and near(got["other"] * size, right["other"] * 4, 0.01) else _peak_hint(got, right)
            peak = Finding("the peak", False, expected, observed, hint)
    if peak.passed:
        peak = Finding("the peak", True, peak.expected, f"within {worst['peak']:.1%}")
    return [states, batch, peak]


def _state_hint(name: str, got: Mapping[str, float], right: Mapping[str, float]) -> str:
    three = ("parameters", "gradients", "optimizer state")
    return "states-place" if near(sum(got[key] for key in three), sum(right[key] for key in three), 0.02) else "states"


def _peak_hint(got: Mapping[str, float], right: Mapping[str, float]) -> str:
    if not near(got["other"], right["other"], 0.1):
        return "other-none" if got["other"] < 0.1 * right["other"] else "other-half" if got["other"] < right["other"] else "other-more"
    return "sum"


def _picture(case: Case, seen: Observation) -> "Figure":
    """The first step's estimate beside what it must be, by category."""
    from labkit.figures import stacked_bars

    row = case.values["rows"][0]
    right = _measured(row) or estimate(config_of(row["config"]), row["batch"], row["seq"], RECIPES[row["recipe"]])
    bars = {"yours": seen.values["rows"][0], "recorder": right}
    drawn = stacked_bars(
        {name: {category: max(0.0, parts[category]) / 2**20 for category in CATEGORIES} for name, parts in bars.items()},
        title=f"Peak of a training step, recipe {row['recipe']}",
        y="MiB",
    )
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str:
    row, got = case.values["rows"][0], seen.values["rows"][0]
    right = estimate(config_of(row["config"]), row["batch"], row["seq"], RECIPES[row["recipe"]])
    return f"the peak within {abs(sum(got.values()) / sum(right.values()) - 1):.2%} of the recorder (at most 5%)"


register(Check(
    "memory.estimate",
    criteria=(
        Criterion("states", "technique", 1, "recomputed"),
        Criterion("with the batch", "technique", 0.75, "recomputed"),
        Criterion("the peak", "technique", 1.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints={
        "keys": "Which six names do the recorder's categories have?",
        "states": "Try `model_state_bytes` on a part of the recipe. Which arrays belong to this category?",
        "states-place": "Your three states add up, but not by category. Whose are master weights and copies: model's or optimizer's?",
        "batch": "Which of your functions counts this category, and did its own check pass?",
        "numbers": "In this recipe the weights are not in 32 bit. In how many bytes is an activation kept, or a gradient of the loss?",
        "other-none": "Look at what is alive at the peak. Which tensors are there that are neither states nor kept for backward?",
        "other-half": "Backward has just begun. How many tensors as large as the logits are alive, and which is counted already?",
        "other-more": "Which tensors as large as the logits are alive at the same instant, and which is counted already?",
        "sum": "Does each category of yours stand for what is alive at one instant, the peak?",
    },
    forbids=("labkit.gpt.GPT",),
    picture=_picture,
    summary=_summary,
))  # fmt: skip


# -- which card --

CARDS = {"RTX 3080": 10, "laptop": 8, "H200": 141, "RTX 4080": 16, "A100 40": 40, "RTX 4090": 24, "A100 80": 80}
GIB = 2**30


def _card_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    half, rows = GIB // 2, []
    for size in (8, 16, 24, 80) + ((24, 40, 80, 141) if strict else ()):  # well below the border, whatever a GB is
        fill = int(size * GIB * (0.7 + 0.1 * float(torch.rand((), generator=generator))))
        rows.append([fill, CARDS, half])
    some = {"small": draw(generator, 3, 7), "large": draw(generator, 20, 30), "middle": draw(generator, 10, 15)}
    rows.append([int(0.75 * some["middle"] * GIB), some, half])
    rows.append([int(9.7e9) - half, {"a part": 9.75, "whole": 20}, half])  # more than 9 GiB, less than 9.75 of any GB
    units = [[24.0e9, {"24": 24, "40": 40}, half], [int(79.2e9), CARDS, GIB], [int(23.3 * GIB), CARDS, half]]
    context = [[39 * GIB, CARDS, 2 * GIB], [int(7.8 * GIB), CARDS, half]]
    context += [[24 * GIB - half, {"24": 24, "40": 40}, half], [24 * GIB - half + 1, {"24": 24, "40": 40}, half]]
    none = [[int(1e14), CARDS, 0], [141 * GIB, CARDS, half], [GIB, {}, 0]]
    if strict:
        context += [[draw(generator, 1, 140) * GIB, CARDS, draw(generator, 1, 2 * GIB)] for _ in range(8)]
        none += [[8 * GIB, {"a": 8, "b": 8}, 1], [10 * GIB, {"one": 5}, GIB]]
    groups = {"smallest that fits": rows, "GB and GiB": units, "context": context}
    return [
        Case("needs and cards", {"groups": groups}, covers=tuple(groups)),
        Case("none fits", {"groups": {"none fits": none}}, covers=("none fits",)),  # some right code stumbles over no cards at all
    ]


def smallest(needed: float, cards: Mapping[str, float], context: float) -> str | None:
    """The smallest card whose GiB hold what is needed and the context."""
    fitting = [name for name, size in cards.items() if needed + context <= size * GIB]
    return min(fitting, key=lambda name: cards[name], default=None)


def _card_probe(candidate: Any, case: Case) -> Observation:
    given: dict[tuple[Any, ...], dict[str, float]] = {}  # who takes cards out of a dict does not find them at the next call

    def ask(needed: float, cards: Mapping[str, float], context: float) -> str | None:
        answer = candidate(needed, given.setdefault(tuple(cards.items()), dict(cards)), context)
        if answer is not None and not isinstance(answer, str):
            raise WrongResult(f"which_card returned {str(answer)[:60]}, expected a card's name or None")
        return answer

    found = {name: [ask(*row) for row in rows] for name, rows in case.values["groups"].items()}
    return Observation({"cards": found, "changed": any(tuple(cards.items()) != before for before, cards in given.items())})


def _card_judge(case: Case, seen: Observation) -> list[Finding]:
    changed = seen.values["changed"]
    return [_judge_choices(name, rows, seen.values["cards"][name], changed) for name, rows in case.values["groups"].items()]


def _rounds(rows: list[list[Any]], answers: list[str | None]) -> bool:
    """Whether these are the answers of one who computes in whole GiB."""
    ways: list[Callable[[float, float], float]] = [
        lambda need, more: math.ceil(need / GIB) + math.ceil(more / GIB),
        lambda need, more: need // GIB + more // GIB,
        lambda need, more: (need + more) // GIB,
        lambda need, more: round((need + more) / GIB),
    ]
    rounded = [[smallest(way(need, more) * GIB, cards, 0) for need, cards, more in rows] for way in ways]
    return answers in rounded


def _judge_choices(name: str, rows: list[list[Any]], answers: list[str | None], changed: bool) -> Finding:
    for (needed, cards, context), got in zip(rows, answers, strict=True):
        right = smallest(needed, cards, context)
        if got == right or (got in cards and right in cards and cards[got] == cards[right]):
            continue
        sizes = {**cards, None: float("inf")}
        hint = {"GB and GiB": "units", "context": "context", "none fits": "none"}.get(name, "smallest")
        if changed:
            hint = "changed"
        elif got is not None and got not in cards:
            hint = "name"
        elif right is not None and needed + context == cards[right] * GIB:
            hint = "full"
        elif right is None or sizes[got] < sizes[right]:
            forgets = smallest(needed, cards, 0) == got
            hint = "rounds" if name == "context" and _rounds(rows, answers) else "context" if forgets and context else hint
        elif got == smallest(needed * GIB / 1e9, cards, context * GIB / 1e9):
            hint = "units"
        elif _rounds(rows, answers):
            hint = "rounds"
        observed = f"{got} for {needed / GIB:.2f} GiB and {context / GIB:.2f} GiB of context"
        return Finding(name, False, f"{right}", observed, hint)
    return Finding(name, True, "the smallest that holds both", f"right {len(rows)} times")


register(Check(
    "memory.card",
    criteria=(
        Criterion("smallest that fits", "technique", 0.25, "recomputed"),
        Criterion("GB and GiB", "technique", 0.25, "recomputed"),
        Criterion("context", "technique", 0.25, "recomputed"),
        Criterion("none fits", "cost", 0.25, "recomputed"),
    ),
    cases=_card_cases,
    probe=_card_probe,
    judge=_card_judge,
    hints={
        "smallest": "Several cards hold it. Which of them do you return, and does the order of the dict decide?",
        "units": "A card's number counts GiB. How many bytes is one of those?",
        "context": "Before your first tensor, something of yours is on the card already. Does it still fit then?",
        "full": "What is needed and the context are the card's size to the byte. Does that exceed it?",
        "none": "When no card is large enough, what does the docstring say that you return?",
        "rounds": "Half a GiB and half a GiB are one. Where do you round to whole GiB, and has it to be there?",
        "changed": "After your function has run, which cards are left in the dict that it was given?",
        "name": "The answer is one of the dict's keys. Is yours?",
    },
    on_error=lambda error: "none" if error["type"] in ("ValueError", "IndexError") else None,
    summary=lambda case, seen: "right at the borders, GB and GiB apart",
))  # fmt: skip
