"""What the all-reduce checks share: running a candidate on every rank, reading its messages, and saying what a sum is made of."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._allreduce_flight import Flight
from labkit.checks._core import Finding, Observation
from labkit.recorder import Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_object_list", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "all_gather_coalesced", "gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
)  # fmt: skip
FORBIDS = (*(f"torch.distributed.{name}" for name in COLLECTIVES), "torch.distributed._functional_collectives")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
          "int32": torch.int32, "int64": torch.int64, "int16": torch.int16}  # fmt: skip
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of a sum's largest term, per rank


# -- on the ranks --


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int, rank: int) -> torch.Tensor:
    """A rank's own values, the same in every process."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    width = {torch.int16: 12, torch.int32: 27, torch.int64: 59}[dtype]  # beyond what floats of the size hold, and the sum still fits
    return torch.randint(-(2**width), 2**width, tuple(shape), generator=generator).to(dtype)


class Observer:
    """Context manager around the runs of a case on this rank: what each returned, and its messages in order."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def __enter__(self) -> "Observer":
        self.recorder.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.recorder.__exit__(*exception)

    def run(self, candidate: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, Any]]:
        """(what came back, {"messages": rows of [kind, peer, bytes sent, bytes received], "faults": see `Flight`})."""
        messages = self.recorder.log.messages
        self.recorder.watch([x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor)])
        first, flight = len(messages), Flight()
        with flight:
            result = candidate(*args)
            flight.finish()
        rows = [[m["kind"], m["peer"], m["bytes_sent"], m["bytes_received"]] for m in messages[first:]]
        return result, {"messages": rows, "faults": flight.faults}


# -- the judge's side --


def sends(seen: dict[str, Any]) -> list[tuple[int, int]]:
    """(to whom, bytes) of every message that a rank sent, in order."""
    return [(peer, sent) for kind, peer, sent, _ in seen["messages"] if kind == "send"]


def received_bytes(seen: dict[str, Any]) -> int:
    return sum(got for kind, _, _, got in seen["messages"] if kind == "recv")


def collective(rows: Sequence[dict[str, Any]]) -> str | None:
    """A collective that some rank called, if any did."""
    return next((m[0] for row in rows for m in row["messages"] if m[0] not in ("send", "recv", "wait")), None)


def in_flight(rows: Sequence[dict[str, Any]], where: str, name: str = "buffers in flight") -> Finding:
    """The finding on buffers between post and wait, over all ranks of one run."""
    expected = "untouched until the wait"
    for rank, row in enumerate(rows):
        for fault in row["faults"][:1]:
            told = "not every message is waited for" if fault["kind"] == "unfinished" else f"rank {rank} touched one too early"
            return Finding(name, False, expected, f"{where}: {told}", f"flight-{fault['kind']}", f"Rank {rank}: {fault['told']}.")
    return Finding(name, True, expected, "untouched")


def close(observed: torch.Tensor, expected: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Equal, up to the rounding that adding `parts` in any order makes. `expected` is exact (float64, or integers)."""
    if observed.shape != expected.shape:
        return False
    if not observed.dtype.is_floating_point:
        return torch.equal(observed, expected.to(observed.dtype))
    largest = max((part.abs().max().item() for part in parts if part.numel()), default=0.0)
    tolerance = ROUNDING[observed.dtype] * len(parts) * max(largest, 1e-30)
    return bool(((observed.double() - expected).abs() <= tolerance).all())  # nan is not close


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The exact sum: float64 for floating point, the dtype itself (which wraps) for integers."""
    wide = [part.double() if part.dtype.is_floating_point else part for part in parts]
    return torch.stack(wide).sum(0) if wide[0].dtype == torch.float64 else sum(wide[1:], wide[0].clone())


def shares(observed: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[float] | None:
    """How often each rank's part is in `observed`: [1, 1, 1, 1] for a sum over 4 ranks. None where it is no such mixture."""
    if observed.numel() < 2 * len(parts) or not torch.isfinite(observed.double()).all():
        return None
    matrix, target = torch.stack([part.flatten().double() for part in parts], 1), observed.flatten().double()
    found = torch.linalg.lstsq(matrix, target).solution
    if ((matrix @ found - target).abs().max() > 2e-2 * target.abs().max()).item():
        return None
    return [round(value, 2) + 0.0 for value in found.tolist()]


def why_wrong(found: list[float] | None, rank: int) -> str:
    """The hint for a sum that is none, by what it is made of."""
    if found is None:
        return "garbage"
    if all(abs(value - (index == rank)) < 0.05 for index, value in enumerate(found)):
        return "nothing"
    if max(found) < 0.05:
        return "missing"
    if max(found) - min(found) < 0.05:
        return "scaled"
    return "counted-twice" if max(found) > 1.5 else "missing"


def made_of(found: list[float] | None, place: str) -> str:
    """A line of detail: "rank 2, chunk 1: rank 0's part 1 times, rank 1's 2 times"."""
    if found is None:
        return f"{place}: not a mixture of the ranks' parts."
    return f"{place}: " + ", ".join(f"rank {rank}'s part {value:g} times" for rank, value in enumerate(found)) + "."


def successor(rows: Sequence[dict[str, Any]], where: str, quiet: bool = False, name: str = "one successor") -> Finding:
    """Each rank sends to at most one other, no two to the same one, and all on one ring. Messages without bytes count as well.

    quiet : there is nothing to send, so that nobody may
    """
    expected, ranks = "each rank sends to one neighbour, in one ring", len(rows)
    called = collective(rows)
    if called:
        return Finding(name, False, expected, f"{called} was called", "collective")
    peers = [sorted({peer for peer, _ in sends(row)}) for row in rows]
    if ranks == 1:
        return Finding(name, not peers[0], expected, "no message" if not peers[0] else "one rank alone sends messages", "alone")
    if not any(peers):
        return Finding(name, quiet, expected, "nobody sends", None if quiet else "silent")
    for rank, mine in enumerate(peers):
        if len(mine) > 1:
            return Finding(name, False, expected, f"{where}: rank {rank} sends to ranks {', '.join(map(str, mine))}", "successor")
    arrows = {rank: mine[0] for rank, mine in enumerate(peers) if mine}
    if len(set(arrows.values())) < len(arrows) or any(_back_after(arrows, rank) not in (None, ranks) for rank in arrows):
        told = ", ".join(f"{rank} to {peer}" for rank, peer in arrows.items())
        return Finding(name, False, expected, f"{where}: {told}", "successor")
    return Finding(name, True, expected, "one ring")


def _back_after(arrows: dict[int, int], start: int) -> int | None:
    """After how many arrows one is back where one started, if ever."""
    at, steps = arrows.get(start), 1
    while at is not None and at != start and steps <= len(arrows):
        at, steps = arrows.get(at), steps + 1
    return steps if at == start else None


def traffic_picture(rows: Sequence[dict[str, Any]], title: str) -> "Figure":
    """Who sent how much to whom."""
    from labkit.figures import traffic

    table = [[[0, 0] for _ in rows] for _ in rows]
    for rank, row in enumerate(rows):
        for peer, count in sends(row):
            table[rank][peer][0] += 1
            table[rank][peer][1] += count
    drawn = traffic(table, title=title)
    drawn.set_label(drawn.alt)
    return drawn


def rows_of(seen: Observation, index: int) -> list[dict[str, Any]]:
    """Every rank's row of the `index`-th run of a case."""
    return [one.values["rows"][index] for one in seen.ranks]
