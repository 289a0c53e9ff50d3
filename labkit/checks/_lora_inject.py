"""Check "lora.inject": adapters put on the layers named, everything else frozen."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._lora_hints import INJECT_HINTS, on_error
from labkit.checks._lora_nets import (
    MOMENTUM,
    RATE,
    STEPS,
    below,
    close,
    layout_of,
    make_net,
    mse,
    net_with,
    paths_of,
    randomise,
    tensor_result,
    train_adapters,
    trainable,
)


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def case(name: str, targets: list[str], rank: int, alpha: float, covers: tuple[str, ...] | None = None, **more: Any) -> Case:
        seed = int(torch.randint(1, 2**31, (), generator=generator))
        return Case(name, {"targets": targets, "rank": rank, "alpha": alpha, "seed": seed} | more, covers=covers)

    cases = [
        case("query and value", ["query", "value"], 3, 6),
        case("called again, or with a name that no layer has", ["query", "value"], 2, 2, ("edge cases",), scenario="edges"),
        case("another model's state dict", ["query", "value"], 2, 2, ("state dict",), scenario="state"),
    ]
    if strict:
        cases += [
            case("key alone", ["key"], 1, 4),
            case("three targets, one of them frozen before", ["query", "out", "value_scale"], 4, 1, frozen="blocks.1.attention.out.weight"),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.values
    torch.manual_seed(values["seed"] + 1)
    if "scenario" in values:
        return (_edges if values["scenario"] == "edges" else _state)(candidate, values)
    net, x, target = _net(values)
    plain = net(x).detach()
    own = dict(net.named_parameters())
    returned = candidate(net, values["rank"], values["alpha"], tuple(values["targets"]))
    tensors = {"start": tensor_result(net.train()(x), plain, "the model"), "eval": tensor_result(net.eval()(x), plain, "the model")}
    net.train()
    factors = trainable(net)
    mine = {id(parameter) for parameter in own.values()}
    given = _tensors(returned)
    told: dict[str, Any] = {
        "names": [name for name, _ in factors],
        "shapes": [list(parameter.shape) for _, parameter in factors],
        "old": [name for name, parameter in factors if id(parameter) in mine],
        "new": sum(id(parameter) not in mine for parameter in net.parameters()),
        "returned": None if given is None else len(given),
        "returned right": given is not None and {id(t) for t in given} == {id(parameter) for _, parameter in factors},
        "returned twice": given is not None and len({id(t) for t in given}) < len(given),
        "kind": type(returned).__name__,
    }
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    _keep(tensors, "factors/0", factors)
    trained = given or [parameter for _, parameter in factors]
    if trained and any(tensor.requires_grad for tensor in trained):
        optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)
        for _ in range(STEPS):
            net.zero_grad()
            loss = mse(net(x), target)
            if not loss.requires_grad:
                break
            loss.backward()
            optimizer.step()
        _keep(tensors, f"factors/{STEPS}", factors)
        told["moved"] = [name for name, parameter in own.items() if not torch.equal(parameter, before[name])]
        tensors["after"] = tensor_result(net(x), plain, "the model")
        adam = torch.optim.Adam(trained)
        net.zero_grad()
        loss = mse(net(x), target)
        if loss.requires_grad:
            loss.backward()
            adam.step()
        state = [t for entry in adam.state.values() for t in entry.values() if torch.is_tensor(t) and t.dim()]
        told["state bytes"] = sum(tensor.nbytes for tensor in state)
    return Observation(told, tensors)


def _net(values: dict[str, Any]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    net, x, target = make_net(values["seed"])
    for name, parameter in net.named_parameters():
        if name == values.get("frozen"):
            parameter.requires_grad_(False)
    return net, x, target


def _keep(tensors: dict[str, torch.Tensor], key: str, factors: list[tuple[str, nn.Parameter]]) -> None:
    tensors |= {f"{key}/{index}": parameter.detach().clone() for index, (_, parameter) in enumerate(factors)}


def _tensors(returned: Any) -> list[torch.Tensor] | None:
    """What came back as a list of tensors, or None where it is something else."""
    if isinstance(returned, nn.Module | torch.Tensor | dict) or not isinstance(returned, Iterable):
        return None
    items = list(returned)
    return items if all(isinstance(item, torch.Tensor) for item in items) else None


def _edges(candidate: Any, values: dict[str, Any]) -> Observation:
    """A second call on a model that has its adapters and has been trained; and a name that no layer has."""
    net, x, _ = make_net(values["seed"])
    arguments = values["rank"], values["alpha"], tuple(values["targets"])
    candidate(net, *arguments)
    randomise(net, values["seed"])
    first, before = net.eval()(x).detach().clone(), [(name, p.detach().clone()) for name, p in trainable(net)]
    refuses(candidate, net, *arguments)  # a refusal is as good as leaving things as they are
    second, after = net.eval()(x).detach().clone(), [(name, p.detach()) for name, p in trainable(net)]
    same = len(before) == len(after) and all(a == b and torch.equal(p, q) for (a, p), (b, q) in zip(before, after, strict=True))
    raised = refuses(candidate, make_net(values["seed"])[0], values["rank"], values["alpha"], ("projection",), errors=(ValueError,))
    other = raised or refuses(candidate, make_net(values["seed"])[0], values["rank"], values["alpha"], ("projection",))
    dropping, _, _ = make_net(values["seed"])
    candidate(dropping, *arguments, 0.5)
    randomise(dropping.train(), values["seed"])
    drops = not torch.equal(dropping(x), dropping(x))
    told = {"before": len(before), "after": len(after), "same": same, "raised": raised, "other error": other, "drops": drops}
    return Observation(told, {"first": first, "second": second})


def refuses(function: Any, *arguments: Any, errors: tuple[type[Exception], ...] = (Exception,)) -> str | None:
    """The type of the error that the call raises, or None where it is none of `errors`. What is not written yet is no refusal."""
    try:
        function(*arguments)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__ if isinstance(error, errors) else None
    return None


def _state(candidate: Any, values: dict[str, Any]) -> Observation:
    """The state dict of one model, read by another one that began elsewhere."""
    arguments = values["rank"], values["alpha"], tuple(values["targets"])
    one, x, _ = make_net(values["seed"])
    other, _, _ = make_net(values["seed"] + 1)
    for net in (one, other):
        candidate(net, *arguments)
        net.eval()
    randomise(one, values["seed"])
    other.load_state_dict({key: value.clone() if torch.is_tensor(value) else value for key, value in one.state_dict().items()})
    return Observation({}, {"one": one(x).detach().clone(), "other": other(x).detach().clone()})


# -- judge --


def factors_of(
    names: list[str], tensors: dict[str, torch.Tensor], key: str, paths: list[str], net: nn.Module, rank: int
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Each layer's (A, B) of `tensors[key/...]`, or None if they are not two each. A layer that is not square tells how they are stored."""
    pairs = []
    for path in paths:
        mine = [tensors[f"{key}/{names.index(name)}"] for name in below(path, names)]
        pairs.append(mine)
    found = None
    for path, pair in zip(paths, pairs, strict=True):
        linear = net.get_submodule(path)
        if len({linear.in_features, linear.out_features, rank}) == 3:
            found = found or layout_of(pair, linear.in_features, linear.out_features, rank)
    if found is None or any(len(pair) != 2 for pair in pairs):
        return None
    return [found.factors(pair) for pair in pairs]


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values, told = case.values, seen.values
    if values.get("scenario") == "edges":
        return [_judge_edges(told, seen.tensors)]
    if values.get("scenario") == "state":
        same = close(seen.tensors["other"], seen.tensors["one"], 1e-6)
        return [Finding("state dict", same, "holds base and adapters", "as read" if same else "the reader's output differs", "state-dict")]
    return _judge_main(values, seen)


def _judge_edges(told: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Finding:
    name, wanted = "edge cases", "called twice as called once; ValueError where no layer has the name; dropout handed on"
    if not told["same"]:
        observed = f"{told['before']} trainable tensors before a second call, {told['after']} after, not the same ones"
        return Finding(name, False, wanted, observed, "again")
    if not close(tensors["second"], tensors["first"], 1e-6):
        return Finding(name, False, wanted, "another output after a second call", "again")
    if told["other error"] and not told["raised"]:
        return Finding(name, False, wanted, f"{told['other error']} for a name that no layer has", "other-error")
    if not told["drops"]:
        return Finding(name, False, wanted, "with dropout 0.5 two calls in train mode are equal", "dropout")
    return Finding(name, bool(told["raised"]), wanted, told["raised"] or "no error for a name that no layer has", "no-match")


def _judge_main(values: dict[str, Any], seen: Observation) -> list[Finding]:
    told, tensors, rank = seen.values, seen.tensors, values["rank"]
    net, x, target = _net(values)
    paths = paths_of(values["targets"])
    plain = net(x).detach()
    same = close(tensors["start"], plain, 1e-5) and close(tensors["eval"], plain, 1e-5)
    findings = [Finding("output at the start", same, "the base's", "equal" if same else "differs", "start")]
    adapters, frozen = _judge_adapters(told, net, paths, rank), _judge_frozen(told)
    if not told["new"]:  # a model left as it was: its output and its frozen weights are nobody's work
        findings = [Finding("output at the start", False, "the base's, with adapters", adapters.observed, adapters.hint)]
        frozen = Finding(frozen.criterion, False, frozen.expected, adapters.observed, adapters.hint)
    findings += [adapters, frozen, _judge_training(values, seen, net, x, target, paths)]
    wanted = 8 * sum(rank * (net.get_submodule(path).in_features + net.get_submodule(path).out_features) for path in paths)
    state = told.get("state bytes", 0)
    expected = f"the trainable tensors: {wanted} bytes of Adam's state"
    observed = f"{told['returned']} tensors, {state} bytes" if told["returned"] is not None else f"a {told['kind']}"
    right = told["returned right"] and not told["returned twice"] and state == wanted
    hint = "state" if told["returned right"] and adapters.passed else "optimizer"
    return [*findings, Finding("for the optimizer", right, expected, observed, hint)]


def _judge_adapters(told: dict[str, Any], net: nn.Module, paths: list[str], rank: int) -> Finding:
    name, new = "adapters", [n for n in told["names"] if n not in told["old"]]
    sizes = dict(zip(told["names"], (math.prod(shape) for shape in told["shapes"]), strict=True))
    expected = f"r (in + out) numbers on each of {len(paths)} layers"
    if not new:
        everything = not told["names"]
        return Finding(name, False, expected, "no new trainable tensors", "all-frozen" if everything else "none")
    stray = [n for n in new if not any(n in below(path, [n]) for path in paths)]
    without = [path for path in paths if not below(path, new)]
    if without:
        return Finding(name, False, expected, f"none on {without[0]}", "missing")
    if stray:
        return Finding(name, False, expected, f"one on {stray[0].rpartition('.')[0]} too", "extra")
    for path in paths:
        linear, count = net.get_submodule(path), sum(sizes[n] for n in below(path, new))
        wanted = rank * (linear.in_features + linear.out_features)
        if count != wanted:
            return Finding(name, False, expected, f"{count} on {path}, whose r (in + out) is {wanted}", "count")
    return Finding(name, True, expected, f"{sum(sizes[n] for n in new)} numbers on {len(paths)} layers")


def _judge_frozen(told: dict[str, Any]) -> Finding:
    name, expected = "everything else", "frozen, bit for bit the same after training"
    if told["old"]:
        return Finding(name, False, expected, f"{told['old'][0]} and {len(told['old']) - 1} more still require grad", "frozen")
    if told.get("moved"):
        return Finding(name, False, expected, f"{told['moved'][0]} has changed", "moved")
    return Finding(name, True, expected, "bit for bit")


def _judge_training(
    values: dict[str, Any], seen: Observation, net: nn.Module, x: torch.Tensor, target: torch.Tensor, paths: list[str]
) -> Finding:
    name, expected = "training", f"{STEPS} steps take each factor where its gradient does"
    told, scale = seen.values, values["alpha"] / values["rank"]
    new = [n for n in told["names"] if n not in told["old"]]
    start = factors_of(told["names"], seen.tensors, "factors/0", paths, net, values["rank"]) if new else None
    if start is None or f"factors/{STEPS}/0" not in seen.tensors:
        return Finding(name, False, expected, "nothing to train", "training")
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    wanted = train_adapters(lambda deltas: mse(net_with(net, paths, deltas, x), target), start, scale)
    got = factors_of(told["names"], seen.tensors, f"factors/{STEPS}", paths, net, values["rank"]) or start
    for path, mine, theirs in zip(paths, got, wanted, strict=True):
        for letter, a, b in zip("AB", mine, theirs, strict=True):
            if not close(a, b, 2e-3):
                return Finding(name, False, expected, f"{letter} of {path} is elsewhere", "training")
    deltas = [scale * b @ a for a, b in wanted]
    if not close(seen.tensors["after"], net_with(net, paths, deltas, x), 2e-3):
        return Finding(name, False, expected, "the trained model's output is another", "training")
    return Finding(name, True, expected, "as computed")


def _summary(case: Case, seen: Observation) -> str | None:
    if "state bytes" not in seen.values:
        return None
    numbers = sum(math.prod(shape) for shape in seen.values["shapes"])
    return f"{numbers} numbers train, {seen.values['state bytes']} bytes of optimizer state"


register(Check(
    "lora.inject",
    criteria=(
        Criterion("output at the start", "numbers", 0.5, "recomputed"),
        Criterion("adapters", "technique", 1, "recomputed"),
        Criterion("everything else", "technique", 1, "recomputed"),
        Criterion("training", "technique", 0.5, "recomputed"),
        Criterion("for the optimizer", "cost", 0.5, "memory"),
        Criterion("edge cases", "cost", 0.25, "none"),
        Criterion("state dict", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=INJECT_HINTS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip
