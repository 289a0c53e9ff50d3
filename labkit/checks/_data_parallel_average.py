"""Check "data_parallel.average": every gradient becomes its mean over the ranks."""

from typing import Any

import torch
import torch.distributed as dist

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._data_parallel_hints import HINTS, on_error
from labkit.checks._data_parallel_late import late_all_reduces
from labkit.checks._data_parallel_nets import batch, build, expected_steps, loss_of, trainable
from labkit.checks._data_parallel_steps import FORBIDS, judge_mean, seed_of, worst
from labkit.recorder import Recorder

UNUSED, OTHERS = "unused on one rank", "other modules and ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def runs(*names: str) -> dict[str, Any]:
        return {"runs": [{"net": name, "seed": seed_of(generator)} for name in names]}

    cases = [
        Case("3 ranks", runs("chain", "frozen layer"), world_size=3),
        Case("another branch on each rank", runs("another branch on each rank"), world_size=3, covers=(UNUSED,)),
        Case("2 ranks", runs("tied weights", "convolution and BatchNorm"), world_size=2, covers=(OTHERS,)),
    ]
    if strict:
        cases += [
            Case("2 ranks, frozen after a step", runs("frozen layer") | {"left": True}, world_size=2, covers=(OTHERS,)),
            Case("4 ranks", runs("transformer encoder", "float32 and float64"), world_size=4, covers=(OTHERS,)),
            Case("one rank", runs("LSTM"), world_size=1, covers=(OTHERS,)),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    seen, faults = Observation({"rows": []}), late_all_reduces()
    for index, run in enumerate(case.values["runs"]):
        net = build(run["net"], run["seed"], 0)  # replicas are equal already
        x, keywords, generator = batch(run["net"], run["seed"], dist.get_rank(), 0)
        loss_of(net(x, **keywords), generator).backward()
        for p in net.parameters():
            if case.values.get("left") and not p.requires_grad:
                p.grad = torch.ones_like(p)  # left from before it was frozen
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        with Recorder() as recorder:
            candidate(net)
        messages = [[m["kind"], m["payload_bytes"]] for m in recorder.log.messages if m["kind"] != "wait"]
        changed = [name for name, p in net.named_parameters() if not torch.equal(before[name], p.detach())]
        seen.values["rows"].append({"messages": messages, "changed": changed, "late": bool(faults)})
        faults.clear()
        for name, p in net.named_parameters():
            if p.grad is not None and p.requires_grad:
                seen.tensors[f"{index}/{name}"] = p.grad.detach().clone()
    return seen


def _judge(case: Case, seen: Observation) -> list[Finding]:
    found = [one for index in range(len(case.values["runs"])) for one in _judge_run(case, seen, index)]
    return found if case.covers is None else [worst(case.covers[0], "as with the chain on 3 ranks", found)]


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run, world = case.values["runs"][index], case.world_size
    where, wanted = f"{case.name}, {run['net']}", expected_steps(run["net"], run["seed"], world, [[""]], 0.1)[0]
    mean = Finding("mean", True, "the mean over the ranks", "so")
    bits = Finding("same bits", True, "equal on all ranks", "equal")
    for rank, one in enumerate(seen.ranks):
        row, prefix = one.values["rows"][index], f"{index}/"
        grads = {key.removeprefix(prefix): tensor for key, tensor in one.tensors.items() if key.startswith(prefix)}
        if row["changed"] and mean.passed:
            mean = Finding("mean", False, mean.expected, f"{where}, rank {rank}: {row['changed'][0]} has changed", "parameters")
        wrong = judge_mean(grads, wanted, rank, row["late"], rtol=2e-5)
        if wrong and mean.passed:
            hint = {"missing": "none", "garbage": "deadlock"}.get(wrong[1], wrong[1]) if "branch" in run["net"] else wrong[1]
            mean = Finding("mean", False, mean.expected, f"{where}, rank {rank}: {wrong[0]}", hint)
        for key, tensor in grads.items():
            first = seen.ranks[0].tensors.get(prefix + key)
            if bits.passed and first is not None and not torch.equal(first, tensor):
                bits = Finding("same bits", False, bits.expected, f"{where}: {key} on ranks 0 and {rank}", "bits")
    return [mean, *_judge_messages(run["net"], seen, index, where), bits]


def _judge_messages(net: str, seen: Observation, index: int, where: str) -> list[Finding]:
    sizes = [p.nbytes for p in trainable(net).values()]
    found = [Finding("all-reduces", True, f"at most {len(sizes)}", ""), Finding("bytes", True, f"{sum(sizes)} bytes", "")]
    for rank, one in enumerate(seen.ranks):
        messages = one.values["rows"][index]["messages"]
        if not messages and len(seen.ranks) == 1:
            continue
        others = {kind for kind, _ in messages} - {"all_reduce"}
        hint = "silent" if not messages else "kind" if others else "too-many" if len(messages) > len(sizes) + 1 else None
        if hint and found[0].passed:
            told = ", ".join(sorted(others)) or f"{len(messages)} messages"
            hint = "frozen" if hint == "too-many" and net == "frozen layer" else hint
            found[0] = Finding("all-reduces", False, found[0].expected, f"{where}, rank {rank}: {told}", hint)
        volume = sum(payload for _, payload in messages)
        if not sum(sizes) <= volume <= 1.01 * sum(sizes) + 8 * len(messages) and found[1].passed:
            hint = "bytes-less" if volume < sum(sizes) else "frozen" if net == "frozen layer" else "bytes-more"
            found[1] = Finding("bytes", False, found[1].expected, f"{where}, rank {rank}: {volume} bytes", hint)
    told = seen.ranks[0].values["rows"][index]["messages"]
    texts = str(len(told)), f"{sum(payload for _, payload in told)} bytes"
    return [one if not one.passed else Finding(one.criterion, True, one.expected, text) for one, text in zip(found, texts, strict=True)]


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers:
        return None
    told = seen.values["rows"][0]["messages"]
    return f"{len(told)} all-reduces, {sum(payload for _, payload in told)} bytes, the mean on 3 ranks"


register(Check(
    "data_parallel.average",
    criteria=(
        Criterion("mean", "numbers", 0.5, "recomputed"),
        Criterion("all-reduces", "technique", 0.5, "wire"),
        Criterion("bytes", "technique", 0.25, "wire"),
        Criterion("same bits", "cost", 0.25, "recomputed"),
        Criterion(UNUSED, "cost", 0.25, "recomputed"),
        Criterion(OTHERS, "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip
