"""Checks "memory.parameters" and "memory.states": how many parameters, and the bytes of the arrays that have one entry for each."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._memory_truth import RECIPES, config_of, draw, near, number, parameter_count, told, with_
from labkit.gpt import GPT2_XL, GPT3, GPTConfig

KNOWN = {
    "GPT-2 small": with_(GPT2_XL, layers=12, heads=12, width=768),
    "GPT-2 XL": GPT2_XL,
    "GPT-3": GPT3,
}


# -- parameters --


def _small(generator: torch.Generator, tied: bool) -> dict[str, Any]:
    heads = draw(generator, 1, 7)
    vocab, context = draw(generator, 50, 999), draw(generator, 8, 333)
    return asdict(GPTConfig(vocab, context, draw(generator, 1, 12), heads, heads * draw(generator, 3, 33), tied))


def _parameter_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    groups = {}
    for name, tied in (("tied", True), ("untied", False)):
        configs = [_small(generator, tied) for _ in range(5 if strict else 3)]
        configs += [config | {"layers": config["layers"] + 1} for config in configs]  # tells a wrong block from a wrong rest
        groups[f"{name} head"] = configs
    known = [asdict(config) for config in KNOWN.values()]
    if strict:
        known += [asdict(GPTConfig(dropout=0.1)), asdict(GPTConfig(layers=0, tied=False)), asdict(with_(GPT3, tied=False))]
    return [Case("many models", {"groups": groups | {"known models": known}})]


def _parameter_probe(candidate: Any, case: Case) -> Observation:
    def ask(config: dict[str, Any]) -> float:
        return number(candidate(config_of(config)), "gpt_parameter_count")

    return Observation({"counts": {name: [ask(c) for c in configs] for name, configs in case.values["groups"].items()}})


def _usual(config: GPTConfig) -> dict[int, str]:
    """What a count is off by, for the usual reasons, and the hint for each."""
    h, vocab, layers = config.width, config.vocab, config.layers
    table = {
        -layers * 9 * h: "biases",
        -layers * 5 * h: "biases",
        -layers * 4 * h: "norms-or-biases",
        -layers * 4 * h - 2 * h: "norms",
        -layers * 2 * h - h: "norms",
        -2 * h: "last-norm",
        -layers * 13 * h: "biases",
        -layers * 13 * h - 2 * h: "biases",
        -config.context * h: "positions",
        vocab: "head-bias",
    }
    table[vocab * h if config.tied else -vocab * h] = "tied" if config.tied else "untied"
    return table


def _parameter_judge(case: Case, seen: Observation) -> list[Finding]:
    groups = case.values["groups"]
    return [_judge_group(name, [config_of(c) for c in configs], seen.values["counts"][name]) for name, configs in groups.items()]


def _judge_group(name: str, configs: list[GPTConfig], counts: list[float]) -> Finding:
    for config, got in zip(configs, counts, strict=True):
        right = parameter_count(config)
        if got == right:
            continue
        hint = _usual(config).get(got - right)
        if hint is None and name != "known models":
            half = len(configs) // 2
            steps = [b - a for a, b in zip(counts[:half], counts[half:], strict=True)]
            blocks = [12 * c.width**2 + 13 * c.width for c in configs[:half]]
            hint = "outside" if steps == blocks else "block"
        if hint in (None, "outside", "block") and near(got, right, 1e-6):
            hint = "digits"
        what = f"{config.layers} layers of width {config.width}, vocabulary {config.vocab}, context {config.context}"
        observed = f"{got:,} for {what}"
        return Finding(name, False, f"{right:,}", observed, hint or "block")
    return Finding(name, True, "exact", f"{len(configs)} models, exact")


register(Check(
    "memory.parameters",
    criteria=(
        Criterion("tied head", "technique", 1.5, "recomputed"),
        Criterion("untied head", "technique", 0.75, "recomputed"),
        Criterion("known models", "technique", 0.75, "recomputed"),
    ),
    cases=_parameter_cases,
    probe=_parameter_probe,
    judge=_parameter_judge,
    hints={
        "block": "One more layer adds the wrong number. Which matrices, vectors and norms does `GPT(config).blocks[0]` list, "
                 "and what is the shape of each?",
        "outside": "Your blocks are right. Which parameters does the model have before the first block and after the last?",
        "biases": "Print the names of one block's parameters. Which of those that end in .bias did you count?",
        "norms-or-biases": "Off by four widths for every layer. Which vectors of a block did you leave out: print their names?",
        "norms": "A norm has a weight and a bias. How many norms does a block have, and how many stand outside of blocks?",
        "last-norm": "Off by two widths, once. What stands between the last block and the head?",
        "positions": "How does the model know where in the sequence a token stands, and how many rows does that table have?",
        "tied": "A tied head has a name of its own. Do two names always mean two tensors?",
        "untied": "With tied=False, whose weight does the head use, and who counted it?",
        "head-bias": "Look at the head's line in `GPT`. What has it got besides its weight?",
        "digits": "Almost exact. Which kind of number keeps all the digits of a count in the billions?",
    },
    forbids=("labkit.gpt.GPT",),
    summary=lambda case, seen: f"exact for {sum(map(len, seen.values['counts'].values()))} models",
))  # fmt: skip


# -- states --

ARRAYS = ("weights", "gradients", "fp32 gradients", "master weights", "momentum", "variance")
PLAIN, MIXED = ("fp32", "autocast", "16-bit"), ("mixed", "mixed, fp32 gradients", "mixed, gradients twice")
BILLIONS = 1_500_000_000


def _state_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    rows = []
    for size in (1e6, 1e9, 2e11) + ((1e3, 1e10) if strict else ()):
        arrays = {f"array {i}": draw(generator, 1, 8) for i in range(draw(generator, 2, 6))}
        rows.append({"n": int(size * (0.5 + float(torch.rand((), generator=generator)))), "recipe": arrays})
    rows.append({"n": draw(generator, 10**6, 10**8), "recipe": {"weights": 2}})  # inference: weights and nothing else
    rows.append({"n": draw(generator, 10**6, 10**8), "recipe": RECIPES["mixed, fp32 gradients"]})
    if strict:
        rows.append({"n": 16 * draw(generator, 10**6, 10**8), "recipe": {"weights": 0.5, "momentum": 1, "variance": 1}})
    return [
        Case("recipes", {"ask": "recipes"}, covers=("plain recipes", "mixed recipes", "1.5 billion")),
        Case("any recipe", {"ask": "bytes", "rows": rows}, covers=("any recipe",)),
    ]


def _itemsize(value: Any, who: str) -> float | int:
    return value.itemsize if isinstance(value, torch.dtype) else number(value, who)


def _state_probe(candidate: Any, case: Case) -> Observation:
    if not isinstance(candidate, tuple) or len(candidate) != 2:
        raise WrongResult('expected two functions: check("memory.states", recipes, model_state_bytes)')
    recipes, state_bytes = candidate
    if case.values["ask"] == "bytes":
        answers = [state_bytes(row["n"], dict(row["recipe"])) for row in case.values["rows"]]
        return Observation({"bytes": [number(answer, "model_state_bytes") for answer in answers]})
    told_recipes = recipes()
    if not isinstance(told_recipes, Mapping) or not set(RECIPES) <= set(told_recipes):
        raise WrongResult(f"recipes returned {str(told_recipes)[:60]}, expected a dict with the keys {', '.join(RECIPES)}")
    plain: dict[str, dict[str, float]] = {}
    for name in RECIPES:
        recipe = told_recipes[name]
        if not isinstance(recipe, Mapping) or not set(recipe) <= set(ARRAYS):
            raise WrongResult(f"recipe {name!r} is {str(recipe)[:80]}, expected a dict with keys out of {', '.join(ARRAYS)}", "arrays")
        plain[name] = {array: _itemsize(size, f"recipe {name!r}") for array, size in recipe.items()}
    billions = number(state_bytes(BILLIONS, dict(plain["mixed"])), "model_state_bytes")
    return Observation({"recipes": plain, "billions": billions})


def _recipe_fault(name: str, recipe: Mapping[str, float]) -> tuple[str, str] | None:
    """(what is seen, hint) of a recipe that is not right."""
    right = RECIPES[name]
    got = {array: size for array, size in recipe.items() if size}
    if got == right:
        return None
    for array in ("gradients", "momentum", "variance", "weights", "master weights", "fp32 gradients"):
        mine, wanted = got.get(array), right.get(array)
        if mine == wanted:
            continue
        if mine is None:
            return f"no {array}", {"master weights": "master", "fp32 gradients": "copy"}.get(array, "arrays")
        if wanted is None:
            return f"{array} of {mine:g} bytes", "too-many"
        if mine in (16, 32, 8 * wanted):
            return f"{array}: {mine:g} bytes per entry", "bits"
        if name == "autocast":
            return f"{array}: {mine:g} bytes per entry", "autocast"
        hint = {"gradients": "gradient-dtype", "weights": "weight-dtype"}.get(array, "state-dtype")
        return f"{array}: {mine:g} bytes per entry", hint
    return None


def _state_judge(case: Case, seen: Observation) -> list[Finding]:
    if case.values["ask"] == "bytes":
        return [_judge_any(case.values["rows"], seen.values["bytes"])]
    findings = []
    for criterion, names in {"plain recipes": PLAIN, "mixed recipes": MIXED}.items():
        faults = {name: fault for name in names if (fault := _recipe_fault(name, seen.values["recipes"][name]))}
        name = next(iter(faults), None)
        observed = f"{name}: {faults[name][0]}" if name else "right for all three"
        findings.append(Finding(criterion, not faults, "every array, at its size", observed, faults[name][1] if name else None))
    got = seen.values["billions"]
    findings.append(Finding("1.5 billion", near(got, 24e9, 1e-6), "24.000 GB", told(got), "sum"))
    return findings


def _judge_any(rows: list[dict[str, Any]], answers: list[float]) -> Finding:
    for row, got in zip(rows, answers, strict=True):
        n, recipe = row["n"], row["recipe"]
        right = n * sum(recipe.values())
        if near(got, right, 1e-6):
            continue
        ratios: list[tuple[Callable[[], float], str]] = [
            (lambda n=n: 16 * n, "universal"),
            (lambda right=right: 8 * right, "bits"),
            (lambda right=right: right / 8, "bits"),
            (lambda right=right: right / 1e9, "unit"),
            (lambda right=right: right / 2**30, "unit"),
            (lambda recipe=recipe: sum(recipe.values()), "sum"),
        ]
        hint = next((key for wrong, key in ratios if near(got, wrong(), 1e-6)), "sum")
        sizes = ", ".join(f"{size:g}" for size in recipe.values())
        return Finding("any recipe", False, told(right), f"{told(got)} for {n:,} parameters at {sizes} bytes", hint)
    return Finding("any recipe", True, "n times the sum of the sizes", f"right for {len(rows)}")


register(Check(
    "memory.states",
    criteria=(
        Criterion("plain recipes", "technique", 0.75, "recomputed"),
        Criterion("mixed recipes", "technique", 1, "recomputed"),
        Criterion("1.5 billion", "technique", 0.5, "recomputed"),
        Criterion("any recipe", "technique", 0.75, "recomputed"),
    ),
    cases=_state_cases,
    probe=_state_probe,
    judge=_state_judge,
    hints={
        "arrays": "List every array that has one entry per parameter. Which one is not in your recipe, or has another name there?",
        "master": "An update is often a ten-thousandth of the weight. Which array is fine enough to add it to?",
        "copy": "The optimizer of this recipe works on gradients in 32 bit, backward writes 16 bit. How many arrays are that?",
        "too-many": "Read the recipe's sentence again. Does it mention that array?",
        "bits": "How many bytes is one number of 16 bits?",
        "autocast": "Under autocast, 16-bit copies come and go within a step. In which dtype are the arrays that stay?",
        "gradient-dtype": "Which dtype are this recipe's gradients kept in?",
        "weight-dtype": "Which dtype do forward and backward of this recipe compute with?",
        "state-dtype": "In which dtype does this recipe's optimizer keep what it remembers?",
        "universal": "Give your function a recipe with a single array. Does it still charge for five?",
        "unit": "What is the unit of your number, and which one does the docstring ask for?",
        "sum": "Each array has n entries. What is one entry of all of them together, in bytes?",
    },
    summary=lambda case, seen: f"{told(seen.values['billions'])} for 1.5 billion parameters" if "billions" in seen.values else None,
))  # fmt: skip
