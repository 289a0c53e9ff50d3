"""Check "accumulation.tokens": micro-batches with unequal numbers of counted targets."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_hints import HINTS, on_error
from labkit.checks._accumulation_weights import Fault, told
from labkit.checks._accumulation_window import loss_row, whole_batch
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register

IGNORED, VOCAB, WIDTH = -100, 11, 6


class TokenTally(nn.Module):
    """One weight per token of the window: a token's gradient is its weight in the step."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tokens))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.weight[places]


class TokenNet(nn.Module):
    """Token ids (rows, seq) -> logits (rows, seq, vocab)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.tokens(ids)))


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    cases = [
        Case("equal counts", {"windows": [[4, 4, 4], [3, 3]], "seed": seed()}, covers=("equal counts",)),
        Case("6, 4 and 2 targets", {"windows": [[6, 4, 2], [2, 6], [4, 1, 5]], "seed": seed()},
             covers=("unequal counts", "one graph at a time", "loss")),
        Case("a text model", {"net": True, "windows": [[6, 4, 2], [1, 6, 3]], "seed": seed()}, covers=("unequal counts",)),
        Case("a micro-batch without targets", {"windows": [[3, 0, 5]], "seed": seed()}, covers=("no targets",)),
    ]  # fmt: skip
    if strict:
        cases += [
            Case("one micro-batch", {"windows": [[5], [1]], "seed": seed()}, covers=("equal counts",)),
            Case("many micro-batches", {"windows": [[1, 2, 3, 4, 5, 6], [6, 1, 1, 1]], "seed": seed()}, covers=("unequal counts",)),
            Case("other shapes", {"net": True, "windows": [[8, 2], [5, 9, 1, 4]], "seed": seed(), "ragged": True},
                 covers=("unequal counts",)),
            Case("two without targets", {"net": True, "windows": [[0, 4, 0, 2], [6, 0]], "seed": seed()}, covers=("no targets",)),
        ]  # fmt: skip
    return cases


def make_windows(values: dict[str, Any]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(inputs, targets) per micro-batch, both (rows, seq); as many targets are not IGNORED as the case says.

    For a tally the inputs are places: token after token through the whole case.
    """
    generator, place, windows = torch.Generator().manual_seed(values["seed"]), 0, []
    for counts in values["windows"]:
        window = []
        for number, count in enumerate(counts):
            rows, seq = (2, 4) if not values.get("ragged") else (1 + number % 3, 9)
            size = rows * seq
            targets = torch.randint(VOCAB, (size,), generator=generator)
            targets[torch.randperm(size, generator=generator)[min(count, size) :]] = IGNORED
            ids = torch.randint(VOCAB, (size,), generator=generator) if values.get("net") else torch.arange(place, place + size)
            place += size
            window.append((ids.view(rows, seq), targets.view(rows, seq)))
        windows.append(window)
    return windows


def tally_loss(trace: tools.Trace) -> Any:
    """Mean over the counted targets of a token's weight and, so that losses differ, a share of its target.

    Over none, both the loss and its gradient are nan, as with a mask written by hand.
    """

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        places, targets = batch
        counted = targets != IGNORED
        return trace.noting(((model(places) + targets / VOCAB) * counted).sum() / counted.sum())

    return loss_fn


def text_loss(trace: tools.Trace) -> Any:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        ids, targets = batch
        return trace.noting(F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED))

    return loss_fn


def _run(candidate: Any, values: dict[str, Any]) -> tuple[tools.Trace, list[dict[str, Any]], torch.Tensor]:
    trace, windows = tools.Trace(), make_windows(values)
    tokens = sum(ids.numel() for window in windows for ids, _ in window)
    model = TokenNet(values["seed"]) if values.get("net") else TokenTally(tokens)
    loss_fn = text_loss(trace) if values.get("net") else tally_loss(trace)
    optimizer = tools.make_optimizer(model)
    trace.watch(optimizer)
    rows = []
    for window in windows:
        first_event, first_step = len(trace.events), len(trace.gradients)
        returned = candidate(model, list(window), optimizer, loss_fn)
        events = trace.events[first_event:]
        rows.append({
            "steps": len(trace.gradients) - first_step,
            "forward": events.count("forward"),
            "backward": events.count("backward"),
            "told": " ".join(events[:12]),
        } | loss_row(returned))  # fmt: skip
    return trace, rows, tools.parameters_of(model)


def _probe(candidate: Any, case: Case) -> Observation:
    trace, rows, parameters = _run(candidate, case.values)
    seen = Observation({"rows": rows, "graphs": trace.graphs()}, {"parameters": parameters})
    if trace.gradients:
        seen.tensors["gradients"] = torch.stack(trace.gradients)
    return seen


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    counts = _judge_net(values, seen) if values.get("net") else _judge_tally(values, seen)
    name = (case.covers or ("unequal counts",))[0]
    wanted = "every counted target weighs the same" if name != "no targets" else "it adds nothing"
    if counts and name == "no targets" and counts.hint in ("inf-stepped", "unequal", "net"):
        counts = Fault(counts.text, "no-targets")
    findings = [Finding(name, counts is None, wanted, counts.text if counts else "as wanted", counts and counts.hint)]
    if name == "no targets" and not counts and not values.get("net"):
        if not all(row["loss"] is None or math.isfinite(row["loss"]) for row in seen.values["rows"]):
            findings = [Finding(name, False, wanted, "the loss that came back is not a number", "no-targets")]
    if name == "unequal counts" and not values.get("net"):
        findings += [_judge_once(values, seen), _judge_loss(values, seen)]
    return findings


def _means_of(weights: torch.Tensor, values: dict[str, Any], number: int) -> tuple[list[float], list[int], list[int], torch.Tensor]:
    """Of one window: the weight of each micro-batch's mean, its counted targets, its tokens; and the gradient of all other places."""
    windows, place = make_windows(values), 0
    others = weights.clone()
    means, counted, sizes = [], [], []
    for index, window in enumerate(windows):
        for _, targets in window:
            there = targets.flatten() != IGNORED
            span = slice(place, place + targets.numel())
            place += targets.numel()
            if index == number:
                means.append(float(weights[span][there].sum()))
                counted.append(int(there.sum()))
                sizes.append(targets.numel())
                others[span][there] = 0
    return means, counted, sizes, others


def _judge_tally(values: dict[str, Any], seen: Observation) -> Fault | None:
    observed, first = seen.tensors.get("gradients"), 0
    for number, row in enumerate(seen.values["rows"]):
        if row["steps"] != 1 or observed is None:
            return Fault(f"call {number + 1}: {row['steps']} steps of the optimizer", "no-step" if not row["steps"] else "many-steps")
        weights = observed[first]
        first += 1
        if not torch.isfinite(weights).all():
            return Fault(f"call {number + 1}: a gradient that is not finite", "inf-stepped")
        means, counted, sizes, others = _means_of(weights, values, number)
        fault = _fault_of(means, counted, sizes, others, row["loss"], _mean_loss(values, number))
        if fault:
            return Fault(f"call {number + 1}: {fault.text}", fault.hint)
    return None


def _fault_of(
    means: list[float], counted: list[int], sizes: list[int], others: torch.Tensor, loss: float | None, right_loss: float
) -> Fault | None:
    """What is wrong with the weights of the micro-batches' means, or None."""
    total, pieces = sum(counted), len(counted)
    there = [i for i, count in enumerate(counted) if count]
    got, want = torch.tensor([means[i] for i in there]), torch.tensor([counted[i] / total for i in there])
    if others.any():
        return Fault("gradients of another window are in this step", "stale")
    if torch.allclose(got, want, rtol=1e-4):
        return None
    shown = f"micro-batches with {', '.join(map(str, counted))} targets weigh {told(torch.tensor(means))}"

    def near(value: torch.Tensor) -> bool:
        return torch.allclose(got, value.float(), rtol=1e-3)

    if not got.any():
        return Fault("all gradients are zero when the optimizer steps", "empty-step")
    if (got == 0).any():
        return Fault(shown, "only-last" if bool(got[-1]) else "missing")
    ratios = got / want
    if float(ratios.max() - ratios.min()) < 1e-3 * float(ratios.max()):  # every target alike
        ratio = float(ratios[0])
        if abs(ratio - total / sum(sizes)) < 1e-3 * ratio:
            return Fault(shown, "ignored")
        hint = "twice" if ratio < 1 else "sum"
        return Fault(shown, "only-logged" if hint == "sum" and loss is not None and tools.same_number(loss, right_loss) else hint)
    share = torch.tensor([float(sizes[i]) for i in there])
    if near(torch.full_like(got, 1 / pieces)) or near(torch.full_like(got, 1 / len(there))):
        return Fault(shown, "means")
    if near(torch.ones_like(got)):
        return Fault(shown, "only-logged" if loss is not None and tools.same_number(loss, right_loss) else "means")
    if near(share / sum(sizes)):
        return Fault(shown, "ignored")
    return Fault(shown, "unequal")


def _mean_loss(values: dict[str, Any], number: int) -> float:
    targets = torch.cat([t.flatten() for _, t in make_windows(values)[number]])
    return float((targets[targets != IGNORED] / VOCAB).mean())


def _judge_net(values: dict[str, Any], seen: Observation) -> Fault | None:
    def reference(model: Any, batches: list[Any], optimizer: Any, loss_fn: Any) -> float:
        flat = [tuple(part.reshape(1, -1) for part in batch) for batch in batches]
        joined = [tuple(torch.cat(parts, 1) for parts in zip(*flat, strict=True))] if values.get("ragged") else batches
        whole_batch(model, joined, optimizer, loss_fn)
        return 0.0

    expected, _, parameters = _run(reference, values)
    observed = seen.tensors.get("gradients")
    for number, right in enumerate(expected.gradients):
        if observed is None or number >= len(observed):
            return Fault(f"{number} steps, not {len(expected.gradients)}", "no-step")
        if not torch.isfinite(observed[number]).all():
            return Fault(f"step {number + 1}: a gradient that is not finite", "inf-stepped")
        if not tools.close(observed[number], right):
            ratio = tools.ratio_of(observed[number], right)
            return Fault(f"step {number + 1}: not the gradient of the whole batch", "scale" if ratio else "unequal")
    if not tools.close(seen.tensors["parameters"], parameters):
        return Fault("the parameters after the last step differ", "net")
    return None


def _judge_once(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "one graph at a time", "one forward and one backward per micro-batch, in turn"
    for counts, row in zip(values["windows"], seen.values["rows"], strict=True):
        if row["forward"] != len(counts) or row["backward"] != len(counts):
            told_calls = f"{len(counts)} micro-batches: {row['forward']} forward, {row['backward']} backward"
            return Finding(name, False, wanted, told_calls, "again")
    graphs = seen.values["graphs"]
    return Finding(name, graphs <= 1, wanted, f"at most {graphs} graphs at once", "graphs")


def _judge_loss(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "loss", "the mean over all counted targets, a plain number"
    for number, row in enumerate(seen.values["rows"]):
        if row["loss"] is None:
            return Finding(name, False, wanted, row["loss_error"], row["loss_hint"])
        if not tools.same_number(row["loss"], _mean_loss(values, number)):
            return Finding(name, False, wanted, f"call {number + 1}: {row['loss']:.4g}, not {_mean_loss(values, number):.4g}", "loss-value")
    return Finding(name, True, wanted, "the mean")


# -- what people see --


def _summary(case: Case, seen: Observation) -> str | None:
    if case.values.get("net") or "unequal counts" not in (case.covers or ()):
        return None
    means, counted, _, _ = _means_of(seen.tensors["gradients"][0], case.values, 0)
    return f"micro-batches with {', '.join(map(str, counted))} targets weigh {told(torch.tensor(means))}"


register(Check(
    "accumulation.tokens",
    criteria=(
        Criterion("equal counts", "numbers", 0.75, "recomputed"),
        Criterion("unequal counts", "technique", 1.25, "recomputed"),
        Criterion("no targets", "cost", 0.5, "recomputed"),
        Criterion("one graph at a time", "cost", 0.25),
        Criterion("loss", "cost", 0.25, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(_judge),
    hints=HINTS,
    on_error=on_error,
    summary=bundled_first(_summary),
))  # fmt: skip
