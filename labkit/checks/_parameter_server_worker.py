"""Check "parameter_server.worker": a worker that knows only what the server last said, and sends each layer when its gradient is ready.

It meets a mailbox that answers from a script, so that a lost answer is lost each time, at the same moment.
"""

from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._parameter_server_hints import HINTS, on_error
from labkit.checks._parameter_server_mailbox import Net, ScriptedBox, Stuck, loss_on, parameters_of

GRADIENTS, CLOCK, EARLY, LOST, STOP = "gradients", "the server's clock", "layer by layer", "lost and old answers", "stop"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    seed = lambda: number(1, 2**31)  # noqa: E731

    def answers(*clocks: int | None | tuple[int, ...]) -> list[list[dict[str, int]]]:
        """For each pull what arrives: nothing, an answer, or several."""
        rows = [() if clock is None else clock if isinstance(clock, tuple) else (clock,) for clock in clocks]
        return [[{"clock": clock, "seed": seed()} for clock in row] for row in rows]

    start = number(5, 30)
    lost: list[Any] = [None, 0, 1, None, 1, None, None, (1, 2), 3, *[None] * 6, 4, None]
    cases = [
        Case(GRADIENTS, {"kind": GRADIENTS, "answers": answers(0, 1, 2), "data": seed()}),
        Case(CLOCK, {"kind": CLOCK, "answers": answers(start, start + 1, start + number(3, 9)), "data": seed()}, covers=(CLOCK,)),
        Case(LOST, {"kind": LOST, "answers": answers(*lost), "data": seed()}, covers=(LOST,)),
    ]
    if strict:
        more = [None, None, (4, 4), 5, None, 5, (5, 6), None, (6, 6, 9), *[None] * 12, 10]
        cases.append(Case("more " + LOST, {"kind": LOST, "answers": answers(*more), "data": seed()}, covers=(LOST,)))
        cases.append(Case("nothing to do", {"kind": STOP, "answers": [], "data": seed()}, covers=(STOP,)))
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    log: list[list] = []
    gradients: list[torch.Tensor] = []
    torch.manual_seed(case.values["data"])
    model, stuck = Net(), ""
    box = ScriptedBox(case.values["answers"], log, gradients)
    try:
        candidate(box, model, lambda model, clock: loss_on(model, int(clock), case.values["data"], log))
    except Stuck as error:
        stuck = str(error)
    return Observation({"log": log[:400], "stuck": stuck}, {f"g{number}": value for number, value in enumerate(gradients[:200])})


# -- judge --


def gradients_at(seed: int, clock: int, data: int) -> dict[str, torch.Tensor]:
    model = Net()
    model.load_state_dict(parameters_of(seed))
    loss_on(model, clock, data, []).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def _judge(case: Case, seen: Observation) -> list[Finding]:
    kind = case.values["kind"]
    fault = _fault(case, seen)
    wanted = {
        GRADIENTS: "of the pulled parameters, each layer once", CLOCK: "pulls first; the batch is the one that the answer names",
        LOST: "asks again; of two answers, the newer", STOP: "returns when told",
    }[kind]  # fmt: skip
    log = seen.values["log"]
    told = f"{sum(row[0] == 'push' for row in log)} layers, {sum(row[0] == 'pull' for row in log)} pulls"
    seen_words, hint, detail = (*fault, _words(log)) if fault else (told, None, "")
    findings = [Finding(kind, fault is None, wanted, seen_words, hint, detail)]
    if kind == GRADIENTS:
        findings += [_early(log), _stop(seen)]
    return findings


def _fault(case: Case, seen: Observation) -> tuple[str, str] | None:
    log, data, kind = seen.values["log"], case.values["data"], case.values["kind"]
    odd = next((row for row in log if row[0] == "nonsense"), None)
    if odd:
        return f"a message that the server does not know: {odd[1]}", "message"
    if any(row[0] in ("push", "pull") and row[-1] != 0 for row in log):
        return "a message to another rank than 0", "message"
    if not log or log[0][0] != "pull":
        return f"begins with {log[0][0] if log else 'nothing'}", "pull-first"
    answers: list[tuple[int, int]] = []
    sent: dict[int, list[str]] = {}  # number of the answer -> layers of the push that it led to
    for row in log:
        if row[0] == "answer":
            answers.append((row[1], row[2]))
        elif row[0] == "push":
            fault = _push_fault(row, answers, sent, seen, data)
            if fault:
                return fault
    names = [name for name, _ in Net().named_parameters()]
    for number, layers in sent.items():
        if set(layers) != set(names):
            return f"clock {answers[number][0]}: {len(set(layers))} of {len(names)} layers were sent", "lost-layer"
    if seen.values["stuck"]:
        return _stuck_words(seen.values["stuck"]), seen.values["stuck"]
    return _count_fault(kind, [[answer["clock"] for answer in row] for row in case.values["answers"] if row], list(sent))


def _count_fault(kind: str, rows: list[list[int]], sent: list[int]) -> tuple[str, str] | None:
    """rows: the clocks of the answers that came for each pull; sent: the numbers of those that led to a push."""
    clocks = [clock for row in rows for clock in row]
    ends = [sum(map(len, rows[: number + 1])) - 1 for number in range(len(rows))]  # the last answer of each row
    extra = next((number for number in sent if number not in ends), None)
    if extra is not None:
        return f"a push for clock {clocks[extra]}, by an answer that a newer one had overtaken", "old-answer"
    missing = next((number for number in ends if number not in sent), None)
    if missing is None:
        return None
    if any(clocks[number] == clocks[missing] for number in sent if number < missing):
        return f"clock {clocks[missing]} was named again, and not pushed again", "named-again"
    return f"no push for clock {clocks[missing]}", "ask-again" if kind == LOST else "never-stops" if not sent else "wrong-clock"


def _stuck_words(stuck: str) -> str:
    if stuck == "half-second":
        return "waits for longer than half a second before it asks again"
    if stuck == "deadline":
        return "waits without a limit for an answer that is lost"
    return "an answer is lost, and it does not ask again"


def _push_fault(
    row: list, answers: list[tuple[int, int]], sent: dict[int, list[str]], seen: Observation, data: int
) -> tuple[str, str] | None:
    _, clock, layer, number, _ = row
    if not answers:
        return "a push before any answer", "pull-first"
    if clock != answers[-1][0]:
        return f"a push for clock {'None' if clock == -1 else clock}; the last answer said {answers[-1][0]}", "wrong-clock"
    earlier = sent.setdefault(len(answers) - 1, [])
    if layer in earlier:
        return f"{layer} of clock {clock} was sent twice", "twice-sent"
    earlier.append(layer)
    got, right = seen.tensors.get(f"g{number}"), gradients_at(answers[-1][1], clock, data)
    if got is None or layer not in right:
        return f"there is no layer {layer!r}", "message"
    if got.shape == right[layer].shape and torch.allclose(got, right[layer], rtol=1e-4, atol=1e-6):
        return None
    told = f"{layer} of clock {clock} is not the gradient at the pulled parameters"
    if got.shape != right[layer].shape:
        return f"{layer} has shape {tuple(got.shape)}", "sends-what"
    if len(answers) > 1:
        before = gradients_at(answers[-2][1], answers[-2][0], data)[layer]
        if torch.allclose(got, right[layer] + before, rtol=1e-4, atol=1e-6):
            return told, "accumulates"
        share = ((got - right[layer]) * before).sum() / before.square().sum()
        if share.abs() > 0.01 and torch.allclose(got, right[layer] + share * before, rtol=1e-4, atol=1e-6):
            return told, "velocity"
        if torch.allclose(got, gradients_at(answers[-2][1], clock, data)[layer], rtol=1e-4, atol=1e-6):
            return told, "not-loaded"
    if len(answers) == 1:
        if any(torch.allclose(got, _without(left_out, answers[-1][1], clock, data)[layer], rtol=1e-4, atol=1e-6)
               for left_out in ("", "weight", "bias")):  # fmt: skip
            return told, "not-loaded"
        if torch.allclose(got, parameters_of(answers[-1][1])[layer], rtol=1e-4, atol=1e-6) or not got.any():
            return told, "sends-what"
    return told, "own-steps" if len(answers) > 1 else "sends-what"


def _without(left_out: str, seed: int, clock: int, data: int) -> dict[str, torch.Tensor]:
    """Gradients of a model as new, but for what was loaded: all but the names that end with `left_out` (all of them, for "")."""
    torch.manual_seed(data)
    model = Net()
    loaded = {name: value for name, value in parameters_of(seed).items() if not name.endswith(left_out)}
    model.load_state_dict(loaded, strict=False)
    loss_on(model, clock, data, []).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def _early(log: list[list]) -> Finding:
    """In each backward pass the first layer must leave before the last gradient is begun."""
    name, wanted = EARLY, "the last layer's gradient leaves before the first one's is begun"
    sent, passes = False, 0
    for row in log:
        if row[0] == "push":
            sent = True
        elif row[0] == "answer":
            sent = False
        elif row == ["backward", 0]:
            passes += 1
            if not sent:
                return Finding(name, False, wanted, f"backward pass {passes}: nothing has left by then", "after-backward", _words(log))
    return Finding(name, passes > 0, wanted, f"in {passes} backward passes", None if passes else "after-backward")


def _stop(seen: Observation) -> Finding:
    name, wanted, log = STOP, "returns when told, and says no more", seen.values["log"]
    at = next((number for number, row in enumerate(log) if row[0] == "stop"), None)
    if at is None or seen.values["stuck"]:
        return Finding(name, False, wanted, "goes on" if at is not None else "never heard it", "never-stops")
    more = [row for row in log[at + 1 :] if row[0] in ("push", "pull")]
    return Finding(name, not more, wanted, f"{len(more)} more messages" if more else "returns", "never-stops")


def _words(log: list[list]) -> str:
    told = {"push": lambda row: f"push {row[2]} clock {row[1]}", "answer": lambda row: f"answer with clock {row[1]}",
            "backward": lambda row: f"backward reaches layer {row[1]}", "silence": lambda row: "nothing came"}  # fmt: skip
    lines = [told.get(row[0], lambda row: row[0])(row) for row in log[:14]]
    return "In order: " + ", ".join(lines) + (", ..." if len(log) > 14 else "")


def _summary(case: Case, seen: Observation) -> str | None:
    if case.values["kind"] != LOST:
        return None
    log = seen.values["log"]
    return f"{sum(not row for row in case.values['answers'])} answers lost, {sum(row[0] == 'pull' for row in log)} pulls, every push right"


register(Check(
    "parameter_server.worker",
    criteria=(
        Criterion(GRADIENTS, "numbers", 0.75, "recomputed"),
        Criterion(CLOCK, "technique", 0.5, "recomputed"),
        Criterion(EARLY, "technique", 0.75),
        Criterion(LOST, "technique", 0.75, "recomputed"),
        Criterion(STOP, "cost", 0.25),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip
