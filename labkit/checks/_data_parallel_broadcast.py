"""Check "data_parallel.broadcast": all ranks start from rank 0's parameters and buffers."""

from typing import Any

import torch
import torch.distributed as dist

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._data_parallel_hints import HINTS, on_error
from labkit.checks._data_parallel_nets import build
from labkit.checks._data_parallel_steps import FORBIDS, seed_of, worst
from labkit.recorder import Recorder

OTHERS = "other modules and ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def runs(*names: str) -> dict[str, Any]:
        return {"runs": [{"net": name, "seed": seed_of(generator)} for name in names]}

    cases = [
        Case("3 ranks", runs("convolution and BatchNorm", "frozen layer"), world_size=3),
        Case("2 ranks", runs("tied weights", "BatchNorm without weights", "weights in channels_last", "float32 and float64"), world_size=2,
             covers=(OTHERS,)),
    ]
    if strict:
        cases += [
            Case("4 ranks", runs("transformer encoder", "LSTM"), world_size=4, covers=(OTHERS,)),
            Case("one rank", runs("convolution and BatchNorm"), world_size=1, covers=(OTHERS,)),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    seen = Observation({"rows": []})
    for index, run in enumerate(case.values["runs"]):
        net = build(run["net"], run["seed"], dist.get_rank())
        before = {name: (tensor, tensor.data_ptr(), tensor.requires_grad) for name, tensor in _named(net)}
        with Recorder() as recorder:
            candidate(net)
        log = recorder.log.messages
        messages = [[m["kind"], m["payload_bytes"]] for m in log if m["kind"] != "wait"]
        after = dict(_named(net))
        kept = [after.get(name) is tensor and tensor.data_ptr() == place for name, (tensor, place, _) in before.items()]
        flags = [name in after and after[name].requires_grad == flag for name, (_, _, flag) in before.items()]
        seen.values["rows"].append({"messages": messages, "kept": all(kept), "flags": all(flags)})
        for name, (tensor, *_) in before.items():  # what an optimizer made before would hold
            seen.tensors[f"{index}/{name}"] = tensor.detach().clone()
    return seen


def _named(net: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*net.named_parameters(), *net.named_buffers()]


def _judge(case: Case, seen: Observation) -> list[Finding]:
    found = [one for index in range(len(case.values["runs"])) for one in _judge_run(case, seen, index)]
    return found if case.covers is None else [worst(OTHERS, "as with BatchNorm on 3 ranks", found)]


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run, rows = case.values["runs"][index], [one.values["rows"][index] for one in seen.ranks]
    where, first = f"{case.name}, {run['net']}", build(run["net"], run["seed"], 0)
    frozen = {name for name, p in first.named_parameters() if not p.requires_grad}
    equal = {kind: Finding(kind, True, "rank 0's everywhere", "so") for kind in ("parameters", "buffers")}
    buffers = dict(first.named_buffers())
    for name, tensor in _named(first):
        kind = "buffers" if name in buffers else "parameters"
        for rank, one in enumerate(seen.ranks):
            if equal[kind].passed and not torch.equal(one.tensors[f"{index}/{name}"], tensor):
                hint = "root" if rank == 0 else "buffers" if kind == "buffers" else "frozen-start" if name in frozen else "start"
                if not all(row["kept"] for row in rows):
                    hint = "replaced"
                equal[kind] = Finding(kind, False, "rank 0's everywhere", f"{where}: {name} of rank {rank} is not rank 0's", hint)
    kept, flags = all(row["kept"] for row in rows), all(row["flags"] for row in rows)
    same = Finding("same tensors", kept and flags, "the module's own, as they were", f"{where}: {'so' if kept and flags else 'not so'}",
                   None if kept and flags else "flag" if kept else "replaced")  # fmt: skip
    count, tensors = max(len(row["messages"]) for row in rows), len(_named(first))
    few = count <= tensors + 1  # one of them may ask whether there is anything to send
    messages = Finding("messages", few, f"at most {tensors}", f"{where}: {count}", None if few else "too-many-start")
    return [*equal.values(), same, messages]


def _summary(case: Case, seen: Observation) -> str | None:
    count, net = len(seen.values["rows"][0]["messages"]), case.values["runs"][0]["net"]
    return None if case.covers else f"{count} messages for {net}, equal on 3 ranks"


register(Check(
    "data_parallel.broadcast",
    criteria=(
        Criterion("parameters", "technique", 0.5, "recomputed"),
        Criterion("buffers", "technique", 0.5, "recomputed"),
        Criterion("same tensors", "cost", 0.25),
        Criterion("messages", "cost", 0.25, "wire"),
        Criterion(OTHERS, "cost", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip
