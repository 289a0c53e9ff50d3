"""Check "amp.scaler": a loss scale that finds itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._amp_hints import HINTS, on_error
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = ((3, 2), (5,), (2, 2, 2), (4,))  # the first two in one group of the optimizer, the others in a second
POISON = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
SETTINGS = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
RTOL = 1e-5


def read_scale(scaler: Any) -> float:
    """What a loss of 1 becomes. Raises WrongResult if that is no tensor."""
    scaled = scaler.scale(torch.ones(()))
    if not isinstance(scaled, torch.Tensor) or scaled.numel() != 1:
        raise WrongResult(f"scale(loss) returned {'None' if scaled is None else f'a {type(scaled).__name__}'}, expected a 0-dim tensor")
    return float(scaled.detach())


def true_gradients(seed: int, step: int) -> list[torch.Tensor]:
    """What the gradients of one step are without a scale: between 0.5 and 1.5 in size, either sign."""
    generator = torch.Generator().manual_seed(seed + 7919 * step)
    return [(0.5 + torch.rand(shape, generator=generator)) * (torch.rand(shape, generator=generator) - 0.5).sign() for shape in SHAPES]


class Bench:
    """Four parameters in two groups, a frozen and an unused one, and an optimizer that notes the gradients it sees."""

    def __init__(self, kind: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
        frozen, unused = torch.ones(3), torch.ones(2, requires_grad=True)
        base = torch.optim.Adam if kind == "adam" else torch.optim.SGD
        options = {"lr": 0.01, "foreach": False} | ({} if kind == "adam" else {"momentum": 0.9})
        bench = self

        class Watched(base):  # type: ignore[misc, valid-type]
            def step(self, closure: Any = None) -> Any:
                bench.seen = [None if p.grad is None else p.grad.clone() for p in bench.parameters]
                return super().step(closure)

        groups = [{"params": [*self.parameters[:2], frozen]}, {"params": [*self.parameters[2:], unused]}]
        self.optimizer, self.seen = Watched(groups, **options), None

    def everything(self) -> list[torch.Tensor]:
        """Copies of the parameters and of all tensors of the optimizer's state."""
        state = [value for p in self.parameters for value in self.optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in (*self.parameters, *state)]


def play(scaler: Any, bench: Bench, script: Sequence[dict[str, Any]], seed: int, how: str = "step") -> tuple[list[Any], dict[str, Any]]:
    """Run a script, one dict per step: {} or {"poison": "inf", "at": index of a parameter}. Returns rows and gradients seen.

    how : "step" leaves unscaling to step(); "unscale" calls unscale_ before it, "twice" two times, "clip" clips by value in between
    """
    rows, tensors = [], {}
    for number, line in enumerate(script):
        bench.optimizer.zero_grad()
        row: dict[str, Any] = {"scale": read_scale(scaler), "told": float(scaler.get_scale())}
        loss = sum((p * g).sum() for p, g in zip(bench.parameters, true_gradients(seed, number), strict=True))
        scaler.scale(loss).backward()
        if "poison" in line:
            bench.parameters[line["at"]].grad.flatten()[-1] = POISON[line["poison"]]
        if how != "step":
            scaler.unscale_(bench.optimizer)
        if how == "twice":
            try:
                scaler.unscale_(bench.optimizer)
            except RuntimeError:
                row["refused"] = True
        if how == "clip":
            torch.nn.utils.clip_grad_value_(bench.parameters, 0.75, foreach=False)
        before, bench.seen = bench.everything(), None
        row["returned"] = _truth(scaler.step(bench.optimizer))
        row["stepped"] = bench.seen is not None
        after = bench.everything()
        row["unchanged"] = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for index, grad in enumerate(bench.seen or ()):
            if grad is not None:
                tensors[f"{number}/{index}"] = grad
        scaler.update()
        rows.append(row)
    rows.append({"scale": read_scale(scaler), "told": float(scaler.get_scale())})
    return rows, tensors


def _truth(value: Any) -> bool | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    return bool(value)


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
    # An overflow at once, growth after three good steps, an overflow in the middle of an interval and one right after a growth.
    script = [inf, {}, {}, {}, {}, {}, late, {}, {}, {}, nan, {}, {}, inf, inf, {}, {}, {}, {}, {}, {}, {}]
    main = {"settings": SETTINGS, "script": script, "optimizer": "sgd", "how": "step"}
    uneven = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 2}
    all_at = ("gradients", "scale trace", "skipped steps")
    up, down = [{}] * 14, [inf] * 9
    bounds = {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "min_scale": 3.0, "max_scale": 100.0}
    half = {"settings": SETTINGS, "part": 5, "script": script[:14], "optimizer": "sgd"}
    cases = [
        Case("scripted overflows", main | {"seed": seed()}),
        Case("a scale that is no power of two", main | {"settings": uneven, "seed": seed()}, covers=all_at),
        Case("Adam", main | {"optimizer": "adam", "script": script[:12], "seed": seed()}, covers=all_at),
        Case("unscaled before step", main | {"how": "unscale", "script": script[:8], "seed": seed()}, covers=("unscaled once",)),
        Case("unscale_ called twice", main | {"how": "twice", "script": script[:8], "seed": seed()}, covers=("unscaled once",)),
        Case("clipped by value after unscale_", main | {"how": "clip", "script": script[:9], "seed": seed()},
             covers=("tested before clipping",)),
        Case("growing on and on", main | {"settings": bounds, "script": up + down, "seed": seed()}, covers=("limits",)),
        Case("a loss in 16 bits", {"settings": SETTINGS | {"init_scale": 65536.0}, "seed": seed()}, covers=("16-bit loss",)),
        Case("saved after 5 steps", half | {"seed": seed()}, covers=("saved and restored",)),
    ]  # fmt: skip
    if strict:
        wild = random_script(generator, 60, ("inf", "-inf", "nan"))
        other = {"init_scale": 2.0**30, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 4, "max_scale": 2.0**40}
        far = bounds | {"min_scale": 0.25, "max_scale": 2.0**15}
        cases += [
            Case("random overflows", main | {"settings": other, "script": wild, "seed": seed()}, covers=all_at),
            Case("random overflows, unscaled first", main | {"script": wild[:30], "how": "unscale", "seed": seed()}, covers=("unscaled once",)),
            Case("default settings", main | {"settings": {}, "script": script[:9], "seed": seed()}, covers=all_at),
            Case("nan, clipped", main | {"how": "clip", "script": [{}, nan, late, {}, inf], "seed": seed()}, covers=("tested before clipping",)),
            Case("shrinking on and on", main | {"settings": far, "script": down + up + up, "seed": seed()}, covers=("limits",)),
            Case("saved right after an overflow", half | {"part": 7, "seed": seed()}, covers=("saved and restored",)),
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
    kept = repr(state) == before
    restored = candidate(**values["settings"] | {"init_scale": 2.0**9})
    restored.load_state_dict(state)
    rows, _ = play(restored, Bench(values["optimizer"], values["seed"]), rest, values["seed"])
    return Observation({"went_on": went_on, "rows": rows, "kept": kept})


# -- judge --


def expected_scales(settings: dict[str, float], overflows: Sequence[bool]) -> list[float]:
    """The scale before each step, and after the last: backs off after an overflow, grows after `growth_interval` good steps in a row."""
    scale, good = settings.get("init_scale", 65536.0), 0
    trace = [scale]
    for overflow in overflows:
        good = 0 if overflow else good + 1
        if overflow:
            scale *= settings.get("backoff_factor", 0.5)
        elif good == settings.get("growth_interval", 2000):
            scale, good = scale * settings.get("growth_factor", 2.0), 0
        scale = min(max(scale, settings.get("min_scale", 1.0)), settings.get("max_scale", 2.0**24))
        trace.append(scale)
    return trace


def same(a: float, b: float) -> bool:
    return abs(a - b) <= RTOL * abs(b)


def judge_trace(settings: dict[str, float], rows: Sequence[dict[str, Any]], overflows: Sequence[bool], criterion: str) -> Finding:
    """The scale step by step, and what kind of fault the first other one shows."""
    wanted = expected_scales(settings, overflows)
    text = f"exact over {len(overflows)} steps"
    for number, (row, scale) in enumerate(zip(rows, wanted, strict=True)):
        if same(row["scale"], scale) and same(row["told"], scale):
            continue
        told = f"{row['scale']:g} after {number} steps, expected {scale:g}"
        if same(row["scale"], scale):
            return Finding(criterion, False, text, f"get_scale() is {row['told']:g}, a loss of 1 becomes {scale:g}", "reported")
        return Finding(criterion, False, text, told, _trace_hint(settings, overflows, number, row["scale"], wanted))
    return Finding(criterion, True, text, text)


def _trace_hint(settings: dict[str, float], overflows: Sequence[bool], number: int, got: float, wanted: Sequence[float]) -> str:
    if not number:
        return "trace"
    if not got <= settings.get("max_scale", 2.0**24) * (1 + RTOL):
        return "no-cap"
    if got < settings.get("min_scale", 1.0) * (1 - RTOL):
        return "no-floor"
    if overflows[number - 1]:
        return "no-backoff" if got >= wanted[number - 1] * (1 - RTOL) else "trace"
    interval = int(settings.get("growth_interval", 2000))
    past = list(overflows[:number])
    last = max((index for index, overflow in enumerate(past) if overflow), default=-1)
    soon = got > wanted[number] * (1 + RTOL)
    # An overflow within the interval, and a growth that came too soon for it: the count went on.
    return "tracker" if soon and last >= 0 and number - 1 - last < interval and number >= interval else "growth"


def judge_gradients(values: dict[str, Any], seen: Observation, overflows: Sequence[bool], criterion: str, clip: float = 0.0) -> Finding:
    """What the optimizer saw, against the gradient without a scale."""
    text = "each step's gradients as without a scale, to 1e-5"
    rows = seen.values["rows"]
    trace = expected_scales(values["settings"], overflows)
    for number, overflow in enumerate(overflows):
        if overflow or not rows[number]["stepped"]:
            continue
        ratios = []
        for index, grad in enumerate(true_gradients(values["seed"], number)):
            got = seen.tensors.get(f"{number}/{index}")
            if got is None or got.shape != grad.shape:
                return Finding(criterion, False, text, f"step {number + 1}: parameter {index + 1} had no gradient", "gradients")
            grad = grad.clamp(-clip, clip) if clip else grad
            ratios.append(float((got.double() * grad).sum() / grad.double().square().sum()))
            if not torch.allclose(got, grad, rtol=RTOL, atol=1e-9) and same(ratios[-1], 1.0):
                return Finding(criterion, False, text, f"step {number + 1}: parameter {index + 1} has another gradient", "gradients")
        if all(same(ratio, 1.0) for ratio in ratios):
            continue
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        told = f"step {number + 1}: {worst:.4g} times as large"
        if clip:
            return Finding(criterion, False, text, told, "gradients")
        return Finding(criterion, False, text, told, _ratio_hint(ratios, worst, trace, number))
    return Finding(criterion, True, text, text.replace(", to 1e-5", ""))


def _ratio_hint(ratios: Sequence[float], worst: float, trace: Sequence[float], number: int) -> str:
    scale = trace[number]
    close = lambda a, b: abs(a - b) <= 1e-3 * abs(b)  # noqa: E731
    if max(ratios) - min(ratios) > 1e-3 * max(abs(ratio) for ratio in ratios):
        return "alike"
    if close(worst, scale):
        return "not-divided"
    if close(worst, 1 / scale):
        return "twice"
    others = [trace[i] for i in (number - 1, number + 1) if 0 <= i < len(trace) and trace[i] != scale]
    return "which-scale" if any(close(worst, scale / other) for other in others) else "gradients"


def judge_skips(rows: Sequence[dict[str, Any]], overflows: Sequence[bool], criterion: str, late: str = "not-skipped") -> Finding:
    """Which steps the optimizer took, and that nothing moved in the others."""
    text = f"{sum(overflows)} of {len(overflows)}, nothing moved in them"
    for number, overflow in enumerate(overflows):
        row, told = rows[number], f"step {number + 1}"
        if overflow and row["stepped"]:
            return Finding(criterion, False, text, f"{told} held an inf or nan, and was taken", late)
        if overflow and not row["unchanged"]:
            return Finding(criterion, False, text, f"{told} was skipped, and parameters or state changed", "skip-changed")
        if not overflow and not row["stepped"]:
            return Finding(criterion, False, text, f"{told} was finite, and was skipped", "skips-good")
        if row["returned"] is not (not overflow):
            return Finding(criterion, False, text, f"{told}: step() returned {row['returned']}", "returned")
    return Finding(criterion, True, text, text)


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    if case.name == "a loss in 16 bits":
        wanted, got = 3 * values["settings"]["init_scale"], seen.values["scaled"]
        good = same(got, wanted) and seen.values["linked"]
        hint = "half-loss" if not same(got, wanted) else "no-graph"
        observed = f"{got:g}" + ("" if seen.values["linked"] else ", and backward cannot start there")
        return [Finding("16-bit loss", good, f"3 times {values['settings']['init_scale']:g} is {wanted:g}", observed, hint)]
    if "part" in values:
        return [_judge_saved(values, seen)]
    overflows, rows = ["poison" in line for line in values["script"]], seen.values["rows"]
    trace = judge_trace(values["settings"], rows, overflows, "scale trace")
    if case.covers == ("limits",):
        return [Finding("limits", trace.passed, f"from {values['settings']['min_scale']:g} to {values['settings']['max_scale']:g}, exact",
                        trace.observed, trace.hint)]  # fmt: skip
    if case.covers == ("tested before clipping",):
        skips = judge_skips(rows, overflows, "tested before clipping", "late-test")
        return [skips if not skips.passed else judge_gradients(values, seen, overflows, "tested before clipping", clip=0.75)]
    if case.covers == ("unscaled once",):
        grads = judge_gradients(values, seen, overflows, "unscaled once")
        return [grads if not grads.passed else judge_skips(rows, overflows, "unscaled once")]
    return [judge_gradients(values, seen, overflows, "gradients"), trace, judge_skips(rows, overflows, "skipped steps")]


def _judge_saved(values: dict[str, Any], seen: Observation) -> Finding:
    name, text = "saved and restored", "the same scales as without a stop"
    first, rest = values["script"][: values["part"]], values["script"][values["part"] :]
    wanted = expected_scales(values["settings"], ["poison" in line for line in values["script"]])[len(first) :]
    if not seen.values["kept"]:
        return Finding(name, False, text, "the saved state changed while training went on", "alive-state")
    for number, (row, scale) in enumerate(zip(seen.values["rows"], wanted, strict=True)):
        if not same(row["scale"], scale):
            stays = all(same(a["scale"], b["scale"]) for a, b in zip(seen.values["went_on"], seen.values["rows"], strict=True))
            told = f"{row['scale']:g} {number} steps after loading, expected {scale:g}"
            return Finding(name, False, text, told, "trace" if stays else "forgets")
    return Finding(name, True, text, f"{len(rest)} steps alike")


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """The learner's scale over the first script, its overflows marked."""
    if "rows" not in seen.values or "script" not in case.values:
        return None
    from labkit.figures import lines

    scales = [row["scale"] for row in seen.values["rows"]]
    overflows = [number for number, line in enumerate(case.values["script"]) if "poison" in line]
    at = {f"{case.values['script'][number]['poison']}": number for number in overflows[:3]}
    series = {"your scale before each step": (range(len(scales)), scales)}
    if overflows:
        series["overflow in this step"] = (overflows, [scales[number] for number in overflows])
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
        Criterion("scale trace", "technique", 1.25, "recomputed"),
        Criterion("skipped steps", "technique", 0.75, "recomputed"),
        Criterion("unscaled once", "cost", 0.5, "recomputed"),
        Criterion("tested before clipping", "cost", 0.5, "recomputed"),
        Criterion("limits", "cost", 0.25, "recomputed"),
        Criterion("16-bit loss", "cost", 0.25, "recomputed"),
        Criterion("saved and restored", "cost", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("torch.amp.GradScaler", "torch._amp_foreach_non_finite_check_and_unscale_", "torch._amp_update_scale_"),
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip
