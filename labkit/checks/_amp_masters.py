"""Check "amp.masters": a 16-bit model that trains as if its weights were fp32."""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._amp_hints import HINTS, on_error
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SHARE = 0.05  # of the way that fp32 goes; stochastic rounding of all weights strays by 0.7% (one standard deviation)
UPDATES = 200
GAPS = ("down.bias", "up.bias")


class Small(nn.Module):
    """Two Linears in 16 bits and a LayerNorm in fp32; `frozen` is not trained, and `unused` never gets a gradient."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up, self.down = nn.Linear(9, 64, dtype=dtype), nn.Linear(64, 5, dtype=dtype)
        self.norm = nn.LayerNorm(64)
        self.frozen = nn.Parameter(torch.empty(7, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(6, dtype=dtype))
        self.register_buffer("seen", torch.zeros(3))
        self.fill(generator)

    @torch.no_grad()
    def fill(self, generator: torch.Generator) -> None:
        """Weights of size 1 to 2, either sign: all of them have the same spacing to their neighbours."""
        for parameter in self.parameters():
            size = 1.02 + 0.7 * torch.rand(parameter.shape, generator=generator)
            sign = torch.where(torch.rand(parameter.shape, generator=generator) < 0.5, -1.0, 1.0)
            parameter.copy_(size * sign)

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if name not in ("frozen", "unused")}


def gradients(start: dict[str, torch.Tensor], values: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    """This step's gradient of each trained parameter, in its dtype; `start` holds their first values. `steady` ones never change.

    With `gaps`, GAPS has a parameter with a gradient of zeros in the second step, and one without any in the third.
    """
    generator = torch.Generator().manual_seed(values["seed"] + 1 + (0 if values.get("steady") else step))
    found = {}
    for name, first in start.items():
        size = 0.5 + 0.5 * torch.rand(first.shape, generator=generator)
        sign = torch.where(torch.rand(first.shape, generator=generator) < 0.5, -1.0, 1.0)
        if values.get("steady"):  # no weight crosses a power of two: the spacing stays what it is
            sign = torch.where(first.float().abs() < 1.4, -1.0, 1.0) * first.float().sign()
        grad = sign * size * values.get("size", 1.0) * values.get("scale", 1.0)
        if values.get("gaps") and (name, step) == (GAPS[0], 1):
            grad = torch.zeros_like(grad)  # momentum moves it all the same
        if values.get("zeros"):
            grad = torch.where(torch.rand(first.shape, generator=generator) < 0.3, 0.0, grad)
        found[name] = grad.to(first.dtype)
    if values.get("gaps") and step == 2:
        del found[GAPS[1]]
    return found


def optimizer_of(values: dict[str, Any]) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    if values["optimizer"] == "adam":
        return lambda parameters: torch.optim.Adam(parameters, lr=values["lr"], foreach=False)
    return lambda parameters: torch.optim.SGD(parameters, lr=values["lr"], momentum=values.get("momentum", 0.0), foreach=False)


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    tiny = {"bfloat16": 1e-3, "float16": 1.2e-4}  # about an eighth of the spacing between neighbours
    cases = []
    for dtype in ("bfloat16", "float16"):
        plain = {"dtype": dtype, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "steps": 3, "gaps": True}
        cases.append(Case(f"3 steps, {dtype} weights", plain | {"seed": seed()}, covers=("steps", "left alone")))
    for dtype, lr in tiny.items():
        values = {"dtype": dtype, "optimizer": "sgd", "lr": lr, "steps": UPDATES, "steady": True, "seed": seed()}
        if strict or dtype == "bfloat16":
            cases.append(Case(f"{UPDATES} tiny updates, {dtype} weights", values, covers=("small updates",)))
    adam = {"dtype": "float16", "optimizer": "adam", "lr": 0.1, "steps": 3, "size": 1e-4, "zeros": True, "seed": seed()}
    loaded = {"dtype": "bfloat16", "optimizer": "sgd", "lr": 0.05, "steps": 3, "load": seed(), "seed": seed()}
    # A true gradient of 1e-8 is 0 in float16; 65536 times that is a number, and a large rate makes a step of it.
    scaled = {"dtype": "float16", "optimizer": "sgd", "lr": 1e7, "steps": 3, "size": 1e-8, "scale": 65536.0, "seed": seed()}
    cases += [Case("gradients of 1e-8, scaled by 65536", scaled, covers=("scaled gradients",))]
    cases += [Case("Adam, gradients of 1e-4 and 0", adam, covers=("Adam",)), Case("weights loaded", loaded, covers=("after loading",))]
    if strict:
        short = {"dtype": "float16", "optimizer": "sgd", "lr": 1.2e-4, "steps": UPDATES, "steady": True, "load": seed(), "seed": seed()}
        cases += [
            Case("weights loaded, then tiny updates", short, covers=("after loading",)),
            Case("Adam, bfloat16 weights", adam | {"dtype": "bfloat16", "size": 1e-6, "seed": seed()}, covers=("Adam",)),
        ]  # fmt: skip
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.values
    model = Small(DTYPES[values["dtype"]], values["seed"])
    same = {name: id(parameter) for name, parameter in model.named_parameters()}
    training = candidate(model, optimizer_of(values))
    trail = []
    for part in range(2 if "load" in values else 1):
        if part:
            with torch.no_grad():
                model.fill(torch.Generator().manual_seed(values["load"]))
            training.reload()
        start = {name: parameter.detach().clone() for name, parameter in model.trained().items()}
        for step in range(values["steps"]):
            for name, grad in gradients(start, values, step).items():
                parameter = model.get_parameter(name)
                parameter.grad = grad.to(parameter.dtype)
            training.step(*([values["scale"]] if "scale" in values else []))
            model.zero_grad()
            if values.get("gaps") and not step:
                model.frozen.add_(1)  # it is no weight of this training, but somebody else's to change
            trail.append(float(model.up.weight.detach()[0, 0]))
    kept = {name: id(parameter) == same.get(name) for name, parameter in model.named_parameters()}
    return Observation({"kept": kept, "trail": trail}, {name: tensor.detach() for name, tensor in model.state_dict().items()})


# -- judge --


def _expected(values: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """(where fp32 training begins, where it ends, one weight on its way), by name of the trained parameter."""
    return _train(json.dumps(values))


@lru_cache(maxsize=4)  # judge, summary and picture ask for the same
def _train(told: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    values = json.loads(told)
    model = Small(DTYPES[values["dtype"]], values["seed"])
    trail: list[float] = []
    for part in range(2 if "load" in values else 1):
        if part:
            model.fill(torch.Generator().manual_seed(values["load"]))
        first = {name: parameter.detach() for name, parameter in model.trained().items()}
        start = {name: value.float() for name, value in first.items()}
        weights = {name: value.clone().requires_grad_() for name, value in start.items()}
        optimizer = optimizer_of(values)(list(weights.values()))
        for step in range(values["steps"]):
            for name, grad in gradients(first, values, step).items():
                weights[name].grad = grad.float() / values.get("scale", 1.0)
            if values.get("none is zero") and step:
                for weight in weights.values():
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            optimizer.step()
            optimizer.zero_grad()
            trail.append(float(weights["up.weight"].detach()[0, 0]))
    return start, {name: value.detach() for name, value in weights.items()}, trail


def _stray(values: dict[str, Any], seen: Observation, gaps: bool = False) -> tuple[float, str]:
    """How far the worst weight is from fp32's, in spacings of its 16-bit neighbours, and which it is. `gaps`: of GAPS only, or not."""
    _, end, _ = _expected(values)
    worst, where = 0.0, ""
    for name, wanted in end.items():
        if values.get("gaps") and gaps != (name in GAPS):
            continue
        got = seen.tensors[name]
        spacing = torch.finfo(DTYPES[values["dtype"]]).eps * wanted.abs().clamp(min=0.25)
        far = ((got.float() - wanted).abs() / spacing).nan_to_num(nan=1e9, posinf=1e9).max()
        if float(far) > worst:
            worst, where = float(far), name
    return worst, where


def _moved(values: dict[str, Any], seen: Observation) -> float:
    """The way that the 16-bit weights went, as a share of fp32's: 1 is right, 0 is a standstill.

    Of all of them together; of one tensor where that strays by a third and more, which chance does not explain.
    """
    start, end, _ = _expected(values)
    ways = {}
    for name, wanted in end.items():
        if not name.startswith("norm") and wanted.numel() >= 64:
            way = wanted - start[name]
            ways[name] = float(((seen.tensors[name].float() - start[name]) * way).sum()), float(way.square().sum())
    worst = max((got / way for got, way in ways.values()), key=lambda share: abs(share - 1))
    whole = sum(got for got, _ in ways.values()) / sum(way for _, way in ways.values())
    return worst if abs(worst - 1) > 1 / 3 else whole


def _judge_steps(values: dict[str, Any], seen: Observation) -> Finding:
    far, where = _stray(values, seen)
    wanted = "as fp32 training, to 4 spacings of 16-bit numbers"
    if far <= 4:
        return Finding("steps", True, wanted, f"within {far:.1f}")
    start, end, _ = _expected(values)
    moves = [(seen.tensors[name].float() - start[name], end[name] - start[name]) for name in start]
    if all(not move.any() for move, _ in moves):
        return Finding("steps", False, wanted, "nothing moved", "no-step")
    share = sum(float((move * way).sum()) for move, way in moves) / sum(float(way.square().sum()) for _, way in moves)
    hint = "old-gradients" if share > 1.3 else "steps"
    return Finding("steps", False, wanted, f"{where} is {far:.0f} spacings away; moved {share:.2f} times as far", hint)


def _judge_left(values: dict[str, Any], seen: Observation) -> Finding:
    model, wanted = Small(DTYPES[values["dtype"]], values["seed"]), "the rest of the model as it was"
    if values.get("gaps"):
        model.frozen.add_(1)
    state = model.state_dict()
    got = seen.tensors
    bad = [f"{name} changed" for name in ("frozen", "unused", "seen") if not torch.equal(got[name].to(state[name].dtype), state[name])]
    bad += [f"{name} is {got[name].dtype}".replace("torch.", "") for name in state if got[name].dtype != state[name].dtype]
    bad += [f"{name} is another object" for name, kept in seen.values["kept"].items() if not kept]
    # Who keeps all weights in one buffer has zeros where there is no gradient: momentum moves these on, which is as good.
    far = min(_stray(values | {"none is zero": zero}, seen, gaps=True) for zero in (False, True))
    if not bad and far[0] > 4:
        when = "no gradient in step 3" if far[1] == GAPS[1] else "a gradient of zeros in step 2"
        return Finding("left alone", False, wanted, f"{far[1]}, with {when}, is {far[0]:.0f} spacings away", "idle")
    return Finding("left alone", not bad, wanted, ", ".join(bad[:2]) or "yes", "left-alone")


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    names = case.covers or ()
    if "small updates" in names:
        return [_judge_share("small updates", values, seen, "stalls")]
    if "after loading" in names:
        if values.get("steady"):
            return [_judge_share("after loading", values, seen, "stale")]
        far, where = _stray(values, seen)
        observed = f"within {far:.1f}" if far <= 4 else f"{where} is {far:.0f} spacings away"
        return [Finding("after loading", far <= 4, "3 steps from the loaded weights, to 4 spacings", observed, "stale")]
    if "scaled gradients" in names:
        return [_judge_scaled(values, seen)]
    if "Adam" in names:
        far, where = _stray(values, seen)
        broken = [name for name in seen.values["kept"] if not seen.tensors[name].isfinite().all()]
        observed = f"{broken[0]} is not finite" if broken else f"within {far:.1f}" if far <= 4 else f"{where} is {far:.0f} spacings away"
        return [Finding("Adam", far <= 4 and not broken, "as fp32 Adam, to 4 spacings", observed, "adam")]
    found = [_judge_steps(values, seen), _judge_left(values, seen)]
    return [finding for finding in found if finding.criterion in names]


def _judge_scaled(values: dict[str, Any], seen: Observation) -> Finding:
    wanted, (far, where) = "3 steps of the unscaled gradients, to 4 spacings", _stray(values, seen)
    start, end, _ = _expected(values)
    ratio = float(((seen.tensors["up.weight"].float() - start["up.weight"]) / (end["up.weight"] - start["up.weight"])).median())
    hint = "quotient" if abs(ratio) < 0.5 else "too-large"
    observed = f"within {far:.1f}" if far <= 4 else f"{where} moved {ratio:.3g} times as far"
    return Finding("scaled gradients", far <= 4, wanted, observed, hint)


def _judge_share(criterion: str, values: dict[str, Any], seen: Observation, standing: str) -> Finding:
    share = _moved(values, seen)
    good = abs(share - 1) <= SHARE
    return Finding(criterion, good, f"{1 - SHARE:.0%} to {1 + SHARE:.0%} of fp32's way", f"{share:.0%} of it",
                   standing if abs(share) < 0.2 or standing == "stale" else "drifts")  # fmt: skip


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """One weight over the tiny updates, yours and in fp32."""
    if not case.values.get("steady") or "load" in case.values:
        return None
    from labkit.figures import lines

    trail = seen.values["trail"]
    series = {"in fp32": (range(1, UPDATES + 1), _expected(case.values)[2]), "yours": (range(1, UPDATES + 1), trail)}
    drawn = lines(series, title=f"One {case.values['dtype']} weight", x="update", y="value")
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if not case.values.get("steady"):
        return None
    return f"{UPDATES} updates below the spacing of {case.values['dtype']} moved the weights {_moved(case.values, seen):.1%} of fp32's way"


register(Check(
    "amp.masters",
    criteria=(
        Criterion("steps", "numbers", 0.75, "recomputed"),
        Criterion("small updates", "technique", 1.25, "recomputed"),
        Criterion("scaled gradients", "cost", 0.25, "recomputed"),
        Criterion("Adam", "cost", 0.25, "recomputed"),
        Criterion("after loading", "cost", 0.25, "recomputed"),
        Criterion("left alone", "cost", 0.25, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(_judge),
    hints=HINTS,
    on_error=on_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip
