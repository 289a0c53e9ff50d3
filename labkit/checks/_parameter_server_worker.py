"""Check "parameter_server.worker": a worker that knows only what the server last said, and sends each layer when its gradient is ready.

It meets a mailbox that answers from a script, so that a lost answer is lost each time, at the same moment.
"""

import json
from typing import Any

import torch
from torch import nn

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._parameter_server_hints import HINTS, on_error

GRADIENTS, CLOCK, EARLY, LOST, STOP = "gradients", "the server's clock", "layer by layer", "lost and old answers", "stop"
PATIENCE, WIDTHS = 50, (4, 5, 3, 2)
Reply = dict[str, int] | None


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    seed = lambda: number(1, 2**31)  # noqa: E731

    def answers(*clocks: int | None | tuple[int, ...]) -> list[list[dict[str, int]]]:
        """For each pull what arrives: nothing, an answer, or several."""
        rows = [() if clock is None else clock if isinstance(clock, tuple) else (clock,) for clock in clocks]
        return [[{"clock": clock, "seed": seed()} for clock in row] for row in rows]

    start = number(5, 30)
    lost: list[Any] = [None, 0, 1, None, None, (1, 2), 3, None]
    cases = [
        Case(GRADIENTS, {"kind": GRADIENTS, "answers": answers(0, 1, 2), "data": seed()}),
        Case(CLOCK, {"kind": CLOCK, "answers": answers(start, start + 1, start + number(3, 9)), "data": seed()}, covers=(CLOCK,)),
        Case(LOST, {"kind": LOST, "answers": answers(*lost), "data": seed()}, covers=(LOST,)),
    ]
    if strict:
        more = [None, None, (4, 4), 5, None, (5, 6), None, (6, 6, 9)]
        cases.append(Case("more " + LOST, {"kind": LOST, "answers": answers(*more), "data": seed()}, covers=(LOST,)))
        cases.append(Case("nothing to do", {"kind": STOP, "answers": [], "data": seed()}, covers=(STOP,)))
    return cases


class _Mark(torch.autograd.Function):
    """Notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int, log: list) -> torch.Tensor:
        ctx.number, ctx.log = number, log
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.append(["backward", ctx.number])
        return grad, None, None


class Net(nn.Module):
    """(batch, 4) -> (batch, 2) through three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False))

    def forward(self, x: torch.Tensor, log: list) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = _Mark.apply(torch.tanh(layer(x)), number, log)
        return x


def parameters_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.6 * torch.randn(value.shape, generator=generator) for name, value in Net().named_parameters()}


def loss_on(model: Net, clock: int, data: int, log: list) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data + clock)
    x, y = torch.randn(6, WIDTHS[0], generator=generator), torch.randn(6, WIDTHS[-1], generator=generator)
    return (model(x, log) - y).square().mean()


class _Stuck(BaseException):
    """Here it would wait for ever."""


class ScriptedBox:
    """What a worker needs of an Endpoint; the server at the other end is a list of answers."""

    rank, world_size, life = 1, 2, 0

    def __init__(self, answers: list[list[dict[str, int]]], log: list, gradients: list[torch.Tensor]) -> None:
        self._answers, self._log, self._gradients = list(answers), log, gradients
        self._mail: list[dict[str, int]] = []
        self._silence = 0

    def send(self, to: int, data: bytes = b"", tensors: dict[str, torch.Tensor] | None = None, timeout_s: float = 10.0) -> int:
        try:
            said = json.loads(bytes(data))
            what, clock, layer = said["do"], int(said.get("clock", -1)), str(said.get("layer", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            what, clock, layer = "nonsense", -1, ""
        if what == "push" and layer and len(tensors or {}) == 1:
            self._gradients.append(next(iter(tensors.values())).detach().clone())
            self._log.append(["push", clock, layer, len(self._gradients) - 1, to])
        elif what == "pull":
            self._log.append(["pull", to])
            self._mail += self._answers.pop(0) if self._answers else [{"stop": 1}]
        else:
            self._log.append(["nonsense", f"{what} with {len(tensors or {})} tensors" if what != "nonsense" else repr(bytes(data)[:40])])
        if len(self._log) > 2000:
            raise _Stuck("ask-again")
        return len(data)

    def poll(self, timeout_s: float = 0.0) -> bool:
        self._silence += not self._mail
        if self._silence > 20 * PATIENCE:
            raise _Stuck("ask-again")
        return bool(self._mail)

    def recv(self, timeout_s: float | None = None) -> Any:
        from labkit.ranks.endpoint import Message

        if not self._mail:
            self._silence += 1
            self._log.append(["silence"])
            if timeout_s is None:
                raise _Stuck("deadline")
            if self._silence > PATIENCE:
                raise _Stuck("ask-again")
            return None
        self._silence = 0
        answer = self._mail.pop(0)
        if "stop" in answer:
            self._log.append(["stop"])
            return Message(0, 0, json.dumps({"stop": True}).encode())
        self._log.append(["answer", answer["clock"], answer["seed"]])
        return Message(0, 0, json.dumps({"clock": answer["clock"]}).encode(), parameters_of(answer["seed"]))

    def close(self, linger_s: float = 1.0) -> None:
        return None


def _probe(candidate: Any, case: Case) -> Observation:
    log: list[list] = []
    gradients: list[torch.Tensor] = []
    torch.manual_seed(case.values["data"])
    model, stuck = Net(), ""
    box = ScriptedBox(case.values["answers"], log, gradients)
    try:
        candidate(box, model, lambda model, clock: loss_on(model, int(clock), case.values["data"], log))
    except _Stuck as error:
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
    sent: dict[int, list[str]] = {}
    for row in log:
        if row[0] == "answer":
            answers.append((row[1], row[2]))
        elif row[0] == "push":
            fault = _push_fault(row, answers, sent, seen, data)
            if fault:
                return fault
    names = [name for name, _ in Net().named_parameters()]
    for clock, layers in sent.items():
        if set(layers) != set(names):
            return f"clock {clock}: {len(set(layers))} of {len(names)} layers were sent", "lost-layer"
    if seen.values["stuck"]:
        return _stuck_words(seen.values["stuck"]), seen.values["stuck"]
    wanted = [row[-1]["clock"] for row in case.values["answers"] if row]
    missing = next((clock for clock in wanted if clock not in sent), None)
    if missing is not None:
        return f"no push for clock {missing}", "ask-again" if kind == LOST else "never-stops" if not sent else "wrong-clock"
    extra = next((clock for clock in sent if clock not in wanted), None)
    return None if extra is None else (f"a push for clock {extra}, which a newer answer had overtaken", "old-answer")


def _stuck_words(stuck: str) -> str:
    if stuck == "deadline":
        return "waits without a limit for an answer that is lost"
    return f"an answer is lost; after {PATIENCE} looks it has not asked again"


def _push_fault(
    row: list, answers: list[tuple[int, int]], sent: dict[int, list[str]], seen: Observation, data: int
) -> tuple[str, str] | None:
    _, clock, layer, number, _ = row
    if not answers:
        return "a push before any answer", "pull-first"
    if clock != answers[-1][0]:
        return f"a push for clock {clock}; the last answer said {answers[-1][0]}", "wrong-clock"
    earlier = sent.setdefault(clock, [])
    if layer in earlier:
        newest = sum(one[0] == clock for one in answers) > 1
        return f"{layer} of clock {clock} was sent twice", "old-answer" if newest else "twice-sent"
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
        if torch.allclose(got, gradients_at(answers[-2][1], clock, data)[layer], rtol=1e-4, atol=1e-6):
            return told, "not-loaded"
    if len(answers) == 1:
        torch.manual_seed(data)
        fresh = Net()
        loss_on(fresh, clock, data, []).backward()
        if torch.allclose(got, dict(fresh.named_parameters())[layer].grad, rtol=1e-4, atol=1e-6):
            return told, "not-loaded"
        if torch.allclose(got, parameters_of(answers[-1][1])[layer], rtol=1e-4, atol=1e-6) or not got.any():
            return told, "sends-what"
    return told, "own-steps" if len(answers) > 1 else "sends-what"


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
