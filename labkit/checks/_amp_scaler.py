"""Check "amp.scaler": a loss scale that finds itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._amp_bench import SHAPES, Bench, play
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._amp_hints import HINTS, on_scaler_error
from labkit.checks._amp_scaler_judge import judge
from labkit.checks._core import Case, Check, Criterion, Observation, WrongResult, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTINGS = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


def random_script(generator: torch.Generator, steps: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Overflows in a fifth of the steps, of the kinds named, in any parameter."""
    script: list[dict[str, Any]] = []
    for _ in range(steps):
        line: dict[str, Any] = {}
        if float(torch.rand((), generator=generator)) < 0.2:
            kind = kinds[int(torch.randint(len(kinds), (), generator=generator))]
            line = {"poison": kind, "at": int(torch.randint(len(SHAPES), (), generator=generator))}
        script.append(line)
    return script


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    inf, late, nan = {"poison": "inf", "at": 0}, {"poison": "-inf", "at": 3}, {"poison": "nan", "at": 2}
    # Growth after three good steps, overflows in the middle of an interval, right after a growth, and two in a row.
    script = [{}, {}, {}, {}, inf, {}, {}, {}, {}, {}, late, {}, {}, {}, nan, {}, {}, inf, inf, {}, {}, {}, {}]
    main = {"settings": SETTINGS, "script": script, "optimizer": "sgd", "how": "step"}
    uneven = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 2}
    up, down = [{}] * 14, [inf] * 9
    bounds = {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "min_scale": 3.0, "max_scale": 100.0}
    half = {"settings": SETTINGS, "part": 7, "script": script[:14], "optimizer": "sgd"}
    cases = [
        Case("scripted overflows", main | {"seed": seed()}),
        Case("a scale that is no power of two", main | {"settings": uneven, "seed": seed()}),
        Case("a finite gradient of 1e30", main | {"script": [{}, {"large": 2}, {}], "seed": seed()}, covers=("test for inf",)),
        Case("Adam", main | {"optimizer": "adam", "script": script[:12], "seed": seed()}),
        Case("unscaled before step", main | {"how": "unscale", "script": script[:8], "seed": seed()}, covers=("unscaled once",)),
        Case("unscale_ called twice", main | {"how": "twice", "script": script[:8], "seed": seed()}, covers=("unscaled once",)),
        Case("clipped by value after unscale_", main | {"how": "clip", "script": script[:9], "seed": seed()},
             covers=("test for inf",)),
        Case("growing on and on", main | {"settings": bounds, "script": up + down, "seed": seed()}, covers=("limits",)),
        Case("a loss in 16 bits", {"settings": SETTINGS | {"init_scale": 65536.0}, "seed": seed()}, covers=("16-bit loss",)),
        Case("saved after 7 steps", half | {"seed": seed()}, covers=("saved and restored",)),
    ]  # fmt: skip
    if strict:
        wild = random_script(generator, 60, ("inf", "-inf", "nan"))
        other = {"init_scale": 2.0**30, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 4, "max_scale": 2.0**40}
        far = bounds | {"min_scale": 0.25, "max_scale": 2.0**15}
        cases += [
            Case("random overflows", main | {"settings": other, "script": wild, "seed": seed()}),
            Case("random overflows, unscaled first", main | {"script": wild[:30], "how": "unscale", "seed": seed()},
                 covers=("unscaled once",)),
            Case("default settings", main | {"settings": {}, "script": script[:9], "seed": seed()}),
            Case("nan, clipped", main | {"how": "clip", "script": [{}, nan, late, {}, inf], "seed": seed()},
                 covers=("test for inf",)),
            Case("shrinking on and on", main | {"settings": far, "script": down + up + up, "seed": seed()}, covers=("limits",)),
            Case("saved right after an overflow", half | {"part": 5, "seed": seed()}, covers=("saved and restored",)),
            Case("saved in the middle of an interval", half | {"part": 13, "settings": uneven | {"growth_interval": 5}, "script": [{}] * 20,
                 "seed": seed()}, covers=("saved and restored",)),
        ]  # fmt: skip
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.values
    scaler = candidate(**values["settings"])
    if case.name == "a loss in 16 bits":
        weight = torch.tensor(3.0, requires_grad=True)
        scaled = scaler.scale(weight.half())
        if not isinstance(scaled, torch.Tensor):
            raise WrongResult(f"scale(loss) returned a {type(scaled).__name__}, expected a 0-dim tensor")
        linked = bool(scaled.requires_grad)
        return Observation({"scaled": float(scaled.detach()), "linked": linked})
    bench = Bench(values["optimizer"], values["seed"])
    if "part" not in values:
        rows, tensors = play(scaler, bench, values["script"], values["seed"], values["how"])
        return Observation({"rows": rows}, tensors)
    first, rest = values["script"][: values["part"]], values["script"][values["part"] :]
    play(scaler, bench, first, values["seed"])
    state = scaler.state_dict()
    if not isinstance(state, dict):
        raise WrongResult(f"state_dict() returned {'None' if state is None else f'a {type(state).__name__}'}, expected a dict", "forgets")
    before = repr(state)
    went_on, _ = play(scaler, bench, rest, values["seed"])
    restored = candidate(**values["settings"] | {"init_scale": 2.0**9})
    restored.load_state_dict(state)
    rows, _ = play(restored, Bench(values["optimizer"], values["seed"]), rest, values["seed"])
    return Observation({"went_on": went_on, "rows": rows, "kept": repr(state) == before})


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """The learner's scale over the first script, its overflows marked."""
    if "rows" not in seen.values or "script" not in case.values:
        return None
    from labkit.figures import lines

    scales = [row["scale"] for row in seen.values["rows"]]
    at = {f"{line['poison']} in {number}": number for number, line in enumerate(case.values["script"]) if "poison" in line}
    series = {"your scale before each step": (range(len(scales)), scales)}
    drawn = lines(series, title=f"Your scale: {case.name}", x="step", y="scale", log="y", marks=at)
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if case.name != "scripted overflows":
        return None
    rows = seen.values["rows"]
    skipped = sum(not row.get("stepped", True) for row in rows)
    return f"scale {rows[0]['scale']:g} to {rows[-1]['scale']:g} over {len(rows) - 1} steps, {skipped} skipped, as scripted"


register(Check(
    "amp.scaler",
    criteria=(
        Criterion("gradients", "numbers", 1, "recomputed"),
        Criterion("skipped steps", "technique", 0.75, "recomputed"),
        Criterion("scale trace", "technique", 1.25, "recomputed"),
        Criterion("unscaled once", "cost", 0.5, "recomputed"),
        Criterion("test for inf", "cost", 0.5, "recomputed"),
        Criterion("limits", "cost", 0.25, "recomputed"),
        Criterion("16-bit loss", "cost", 0.25, "recomputed"),
        Criterion("saved and restored", "cost", 0.5, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(judge),
    hints=HINTS,
    forbids=("torch.amp.GradScaler", "torch._amp_foreach_non_finite_check_and_unscale_", "torch._amp_update_scale_"),
    on_error=on_scaler_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip
