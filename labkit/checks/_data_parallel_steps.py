"""What the checks of wrappers share: steps of training with a candidate on every rank, and the judging of what they leave."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks._allreduce_traffic import shares
from labkit.checks._core import Finding, Observation, WrongResult
from labkit.checks._data_parallel_late import late_all_reduces
from labkit.checks._data_parallel_nets import batch, build, expected_steps, loss_of, trainable
from labkit.recorder import Recorder

FORBIDS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.utils.data.DistributedSampler",
    "torch.distributed._composable.replicate",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.FullyShardedDataParallel",
)
LR = 0.1
# net, seed, cap, steps (each a list of pieces: "", "quiet", or "raises"), keep (zero_grad), options, weigh (bytes alive)
Run = dict[str, Any]


class Interruption(Exception):
    """What a check raises inside no_sync."""


# -- on the ranks --


class Trainer:
    """One run: a fresh module, the candidate around it, and everything that can be seen of its steps."""

    def __init__(self, candidate: Any, run: Run, index: int, seen: Observation, faults: list[str]) -> None:
        self.run, self.index, self.seen, self.faults = run, index, seen, faults
        self.net = build(run["net"], run["seed"], dist.get_rank())
        self.at_gradient = 0
        for p in self.net.parameters():
            if p.requires_grad:  # before the candidate's own hooks
                p.register_post_accumulate_grad_hook(self._gradient)
        self.recorder = Recorder()
        self.row: dict[str, Any] = {"steps": []}
        with self.recorder:
            self.replica = candidate(self.net, bucket_bytes=run["cap"], **run.get("options", {}))
            self._examine()
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR, momentum=0.9)
            for step in range(len(run["steps"])):
                self._step(step)
        seen.values["rows"].append(self.row)

    def _gradient(self, _: torch.Tensor) -> None:
        self.at_gradient = len(self.recorder.log.messages)

    def _examine(self) -> None:
        if not callable(self.replica):
            raise WrongResult(f"a {type(self.replica).__name__} cannot be called with the module's arguments", "output")
        if not hasattr(self.replica, "finish"):
            raise WrongResult(f"the {type(self.replica).__name__} has no method finish")
        for name, tensor in (*self.net.named_parameters(), *self.net.named_buffers()):
            self.seen.tensors[f"{self.index}/start/{name}"] = tensor.detach().clone()

    def _messages(self, first: int) -> list[list[Any]]:
        return [[m["kind"], m["payload_bytes"], bool(m["asynchronous"])] for m in self.recorder.log.messages[first:]]

    def _step(self, step: int) -> None:
        log, name, seed = self.recorder.log, self.run["net"], self.run["seed"]
        self.optimizer.zero_grad(set_to_none=not self.run.get("keep", False))
        before = {key: p.detach().clone() for key, p in self.net.named_parameters()}
        told: dict[str, Any] = {"quiet": [], "output": True}
        for piece, how in enumerate(self.run["steps"][step]):
            x, keywords, generator = batch(name, seed, dist.get_rank(), 10 * step + piece)
            first = len(log.messages)
            if how:
                self._quietly(x, keywords, generator, raises=how == "raises")
                told["quiet"] += self._messages(first)
                continue
            output = self.replica(x, **keywords)
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is None:
                raise WrongResult(f"{name}: calling the wrapper returned a {type(output).__name__}, not what the module returns", "output")
            loss_of(output, generator).backward()
            behind = len(log.messages)
            self.replica.finish()
            rows = self._messages(first)
            told |= {"rows": rows, "behind": behind - first, "at_last": max(0, self.at_gradient - first)}
        for key, p in self.net.named_parameters():
            if p.grad is not None:
                self.seen.tensors[f"{self.index}/{step}/grad/{key}"] = p.grad.detach().clone()
        told["changed"] = [key for key, p in self.net.named_parameters() if not torch.equal(before[key], p.detach())]
        self.optimizer.step()
        for key, p in self.net.named_parameters():
            self.seen.tensors[f"{self.index}/{step}/after/{key}"] = p.detach().clone()
        told["late"] = bool(self.faults)
        self.faults.clear()
        if self.run.get("weigh"):  # all that is alive, but for the check's own copies
            told["alive"] = self.recorder.mark(f"step {step}") - sum(tensor.nbytes for tensor in self.seen.tensors.values())
        self.row["steps"].append(told)

    def _quietly(self, x: torch.Tensor, keywords: dict[str, Any], generator: torch.Generator, raises: bool) -> None:
        try:
            with self.replica.no_sync():
                loss_of(self.replica(x, **keywords), generator).backward()
                if raises:
                    raise Interruption("raised by the check inside no_sync")
        except Interruption:
            return
        if raises:
            raise WrongResult("the exception did not leave no_sync", "swallowed")


def train(candidate: Any, runs: Sequence[Run]) -> Observation:
    """Every run of a case, one after the other, on this rank."""
    seen, faults = Observation({"rows": []}), late_all_reduces()
    for index, run in enumerate(runs):
        Trainer(candidate, run, index, seen, faults)
    return seen


# -- the judge's side: numbers --


def why(observed: torch.Tensor, parts: list[torch.Tensor], rank: int, late: bool) -> str:
    """The hint for a mean over ranks that is none, by what it is made of."""
    world = len(parts)
    used = [index for index, part in enumerate(parts) if bool(part.any())]
    found = shares(observed, [parts[index] for index in used]) if used else None
    if late:
        return "late-write"
    if found is None:
        return "garbage"
    weights = {index: weight * world for index, weight in zip(used, found, strict=True)}
    others = [abs(weight) for index, weight in weights.items() if index != rank]
    if others and max(others) < 0.1:
        return "local" if weights.get(rank, 0) > 0.1 else "missing"
    low, high = min(weights.values()), max(weights.values())
    if high - low > 0.1:
        return "missing"
    if abs(low - 1) < 0.1:
        return "precision"
    if len(used) < world and abs(low - world / len(used)) < 0.1:
        return "users"
    if abs(low - world) < 0.1:
        return "sum"
    if world % 2 and abs(low - world / 2) < 0.1:  # half of an even number may have other reasons
        return "divisor"
    return "small" if low < 1 else "twice"


def judge_mean(
    grads: dict[str, torch.Tensor], wanted: dict[str, Any], rank: int, late: bool = False, rtol: float = 1e-4
) -> tuple[str, str, str] | None:
    """(what was observed, hint, parameter) for the first gradient of a rank that is not the mean, else None."""
    all_of_them = max((part.abs().max().item() for own in wanted["own"] for part in own.values()), default=1.0)
    for key, mean in wanted["mean"].items():
        observed = grads.get(key)
        if observed is None:
            if mean is not None:
                return f"{key}: its gradient is None", "none" if grads else "no-gradients", key
            continue
        mean = torch.zeros_like(observed) if mean is None else mean
        if observed.shape != mean.shape or observed.dtype != mean.dtype:
            told = f"{key}: a gradient of shape {tuple(observed.shape)}, {str(observed.dtype).removeprefix('torch.')}"
            return told, "shape", key
        parts = [own.get(key, torch.zeros_like(mean)) for own in wanted["own"]]
        largest = max(part.abs().max().item() for part in parts)
        off = (observed - mean).abs().max().item()
        if not off <= rtol * max(largest, 1e-2 * all_of_them):  # a bias before BatchNorm has rounding noise for a gradient
            return f"{key}: off by {off:.2g}, ranks' gradients are up to {largest:.2g}", why(observed, parts, rank, late), key
    return None


def judge_steps(name: str, run: Run, seen: Observation, index: int, where: str) -> Finding:
    """Gradients and parameters after every step, on every rank, against one module that sees all ranks' batches."""
    world = len(seen.ranks)
    wanted = expected_steps(run["net"], run["seed"], world, run["steps"], LR)
    expected = "as one process with the full batch"
    started = all(_same_start(run, one, index) for one in seen.ranks)
    for step, goal in enumerate(wanted):
        for rank, one in enumerate(seen.ranks):
            row, place = one.values["rows"][index]["steps"][step], f"{where}, step {step + 1}, rank {rank}"
            if row["changed"]:
                return Finding(name, False, expected, f"{place}: {row['changed'][0]} changed before optimizer.step()", "parameters")
            prefix = f"{index}/{step}/grad/"
            grads = {key.removeprefix(prefix): tensor for key, tensor in one.tensors.items() if key.startswith(prefix)}
            wrong = judge_mean(grads, goal, rank, row["late"])
            if wrong:
                told, hint, _ = wrong
                if not started:
                    hint = "start"
                elif step and hint not in ("shape", "late-write"):
                    hint = "stale" if run.get("keep") else "later-steps"
                elif hint == "garbage" and "branch" in run["net"]:
                    hint = "deadlock"
                return Finding(name, False, expected, f"{place}: {told}", hint)
            for key, value in goal["after"].items():
                other = one.tensors[f"{index}/{step}/after/{key}"]
                if (other - value).abs().max() > 1e-4 * value.abs().max() + 1e-7:
                    hint = "later-steps" if started else "start"
                    return Finding(name, False, expected, f"{place}: {key} is another one", hint)
    return Finding(name, True, expected, "equal, within rounding")


def _same_start(run: Run, one: Observation, index: int) -> bool:
    return all(torch.equal(one.tensors[f"{index}/start/{key}"], p) for key, p in build(run["net"], run["seed"], 0).named_parameters())


def judge_start(name: str, run: Run, seen: Observation, index: int, where: str) -> Finding:
    """Parameters and buffers of all ranks are rank 0's once the wrapper is there."""
    first, expected = build(run["net"], run["seed"], 0), "rank 0's parameters and buffers everywhere"
    for rank, one in enumerate(seen.ranks):
        for kind, named in (("start", first.named_parameters()), ("buffers", first.named_buffers())):
            for key, tensor in named:
                if not torch.equal(one.tensors[f"{index}/start/{key}"], tensor):
                    hint = "root" if rank == 0 else kind
                    return Finding(name, False, expected, f"{where}: {key} of rank {rank} is not rank 0's", hint)
    return Finding(name, True, expected, "so")


def judge_bits(name: str, run: Run, seen: Observation, index: int, where: str) -> Finding:
    for step in range(len(run["steps"])):
        for key in dict(build(run["net"], 0, 0).named_parameters()):
            first = seen.ranks[0].tensors[f"{index}/{step}/after/{key}"]
            for rank, one in enumerate(seen.ranks):
                if not torch.equal(first, one.tensors[f"{index}/{step}/after/{key}"]):
                    told = f"{where}: {key} of rank {rank} after step {step + 1} differs"
                    return Finding(name, False, "equal on all ranks", told, "bits")
    return Finding(name, True, "equal on all ranks", "equal")


def judge_memory(name: str, run: Run, seen: Observation, index: int, where: str) -> Finding:
    """The last step leaves no more bytes alive than the one before it."""
    expected, total = "no more alive after each step", sum(p.nbytes for p in trainable(run["net"]).values())
    for rank, one in enumerate(seen.ranks):
        *_, before, after = (step["alive"] for step in one.values["rows"][index]["steps"])
        if after - before > total / 4:
            told = f"{where}, rank {rank}: {after - before} bytes more after step {len(run['steps'])} than after the one before"
            return Finding(name, False, expected, told, "piles-up")
    return Finding(name, True, expected, "no more")


def worst(criterion: str, expected: str, findings: Sequence[Finding]) -> Finding:
    """One finding for several: the first that failed, under another criterion's name."""
    bad = next((one for one in findings if not one.passed), None)
    if bad is None:
        return Finding(criterion, True, expected, "so")
    return Finding(criterion, False, bad.expected, bad.observed, bad.hint, bad.detail)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(1, 2**20, (), generator=generator))
