"""``run_ranks``: a function of the notebook on several ranks, as one call."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.ranks import cargo, travel
from labkit.ranks.errors import CargoError, DeadlockError, NestedRanksError, RankError, RankTimeout
from labkit.ranks.faults import Fault
from labkit.ranks.jobs import RankReport, launch, refuse_nesting
from labkit.ranks.link import Link
from labkit.ranks.page import MAX_RANKS

if TYPE_CHECKING:
    from labkit.recorder import Recording

_TOLD_OUTPUT = 2000
_OURS = (RankError.__name__, NestedRanksError.__name__, CargoError.__name__)


@dataclass
class RankResult:
    """What the ranks brought back, each list in the order of ranks. ``outputs``: stdout and stderr as text; ``seconds``: in fn.

    A rank that a planned fault killed has None as its value and its recording. ``lives``: how often each was started.
    """

    values: list[Any]
    recordings: list["Recording"] = field(repr=False)
    outputs: list[str] = field(repr=False)
    seconds: list[float]
    lives: list[int] = field(default_factory=list, repr=False)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 30.0,
    record: bool = False,
    link: Link | None = None,
    faults: Sequence[Fault] = (),
    group: bool = True,
    live: bool | str = False,
    hosts: Sequence[str] = (),
    **kwargs: Any,
) -> RankResult:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` processes of this machine that share a ``torch.distributed`` group (gloo).

    fn: any function, also one defined in a notebook cell; inside, ``dist.get_rank()`` says which rank it is. It travels with the
    globals it uses, at most 64 MiB of them. record: run it under a Recorder on every rank. timeout: seconds, a backstop.
    link: a simulated wire between the ranks, see ``Link``. faults: what happens to ranks on purpose, see ``labkit.ranks.faults``.
    group: False for functions that bring a transport of their own; ``labkit.ranks.rank()`` then says which rank it is.
    live: record, draw every rank's live memory while they run, and leave their lanes; a string is the picture's title.
    hosts: names of machines to spread the ranks over, by torchrunx (SSH, or "slurm"'s); then there are no links, faults, live views
    and deadlock watch.

    Raises what a rank raised, with a note that names the rank and shows its traceback (the rank that failed first, not those that
    fell with it); RankError where there is no such exception or it cannot travel; DeadlockError when every rank waits and nothing
    can come; RankTimeout, with every rank's stack; CargoError when fn would take along what it should not; NestedRanksError in a
    rank. Whatever happens, Ctrl-C included, no process of the ranks is left.
    """
    refuse_nesting()
    if not callable(fn):
        raise TypeError(f"run_ranks takes a function first, not {type(fn).__name__}")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size is a whole number from 1 to {MAX_RANKS}, not {world_size!r}")
    payload = cargo.pack(fn, args, kwargs, "live" if live else "record" if record else "")
    if link is not None and not group:
        raise ValueError("a link carries the messages of a torch.distributed group: with group=False there are none")
    if hosts:
        if link is not None or faults or live or not group:
            raise ValueError("links, faults, live views and group=False are for ranks of one machine: leave hosts out")
        return _on_hosts(payload, world_size, hosts, record)
    how = {"timeout": timeout, "init_process_group": group, "link": link, "faults": faults, "shared": True}
    with _watched(live, world_size, fn, link) as view:
        reports = launch(payload, world_size=world_size, entry="labkit.ranks.call:call", **how, on_live=view.take if view else None)
        if any(report.status not in ("ok", "killed") for report in reports):
            raise _failure(reports, timeout)
        result = _result(reports, bool(record or live))
        if view:
            view.recordings = result.recordings
    return result


def _on_hosts(payload: bytes, world_size: int, hosts: Sequence[str], record: bool) -> RankResult:
    import torch

    from labkit.ranks.hosts import run_on_hosts

    pairs, seconds = run_on_hosts(payload, world_size, hosts, torch.cuda.device_count() >= world_size // len(hosts) > 0)
    return RankResult(
        values=[value for value, _ in pairs],
        recordings=_recordings([wire for _, wire in pairs]) if record else [],
        outputs=[""] * world_size, seconds=[seconds] * world_size, lives=[1] * world_size,
    )  # fmt: skip


def _watched(live: bool | str, world_size: int, fn: Any, link: Link | None) -> Any:
    """What shows the ranks while they run, or nothing; a leaf that only this asks for."""
    if not live:
        return nullcontext()
    from labkit.widgets.ranks import LiveRanks

    title = live if isinstance(live, str) else getattr(fn, "__name__", "Ranks")
    return LiveRanks(world_size, title, f"simulated link: {link}" if link is not None else "")


def _result(reports: list[RankReport], recorded: bool) -> RankResult:
    opened = [travel.loads(report.data) if report.status == "ok" else (None, None) for report in reports]
    return RankResult(
        values=[value for value, _ in opened],
        recordings=_recordings([wire for _, wire in opened]) if recorded else [],
        outputs=[report.output for report in reports],
        seconds=[report.seconds for report in reports],
        lives=[report.lives for report in reports],
    )


def _recordings(wires: Sequence[Any]) -> list["Recording"]:
    from labkit.recorder import Recording

    return [Recording.from_wire(*wire) if wire is not None else None for wire in wires]


def _failure(reports: list[RankReport], timeout: float) -> BaseException:
    """The exception to raise for these reports: of the rank that failed first, unless all are stuck."""
    stuck = [report for report in reports if report.status == "deadlock"]
    if stuck:
        return DeadlockError(_all_stand("The ranks wait for each other and nothing is under way:", stuck, reports))
    failed = [report for report in reports if report.status not in ("ok", "interrupted", "timeout", "killed")]
    if not failed:
        late = [report for report in reports if report.status == "timeout"]
        return RankTimeout(_all_stand(f"{_ranks(late)} not done after {timeout:g} s:", late, reports))
    # A death is seen a moment after the errors that it causes in others.
    cause = min(failed, key=lambda report: report.ended - (0.1 if report.error is None else 0.0))
    error = _own_exception(cause) or RankError(_ending(cause))
    if cause.error is not None and cause.error["type"] not in _OURS:  # those say it all in their message
        error.add_note(f"On rank {cause.rank} of {len(reports)}:\n{cause.error['traceback'].rstrip()}")
    others = [report for report in failed if report is not cause]
    alike = [report for report in others if _kind(report) == _kind(cause)]
    if alike:
        error.add_note(f"The same on {_ranks(alike).rpartition(' ')[0]}.")
    for report in [report for report in others if report not in alike][:8]:
        error.add_note(f"After that, {_short(report)}")
    if cause.output.strip():
        error.add_note(f"Rank {cause.rank} printed:\n{cause.output.rstrip()[-_TOLD_OUTPUT:]}")
    return error


def _own_exception(report: RankReport) -> BaseException | None:
    if not report.data:
        return None
    try:
        error = travel.load_exception(report.data)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _ending(report: RankReport) -> str:
    if report.error is None:
        return f"rank {report.rank}: {report.detail}"
    if report.error["type"] == "SystemExit":
        return f"rank {report.rank} called sys.exit({report.error['message']})"
    return f"rank {report.rank} raised {report.error['type']}: {report.error['message']}"


def _kind(report: RankReport) -> tuple[str, str]:
    return report.status, report.error["type"] if report.error else ""


def _short(report: RankReport) -> str:
    if report.error is None:
        return f"rank {report.rank}: {report.status}"
    message = report.error["message"].splitlines()
    return f"rank {report.rank} raised {report.error['type']}" + (f": {message[0][:100]}" if message else "")


def _all_stand(head: str, told: list[RankReport], reports: list[RankReport]) -> str:
    """Sentences first (who waits for whom), then each rank's stack and the end of what it printed."""
    sentences, stacks = [], []
    for report in told:
        said, _, stack = report.detail.partition(f"rank {report.rank} stood at")
        sentences += [line for line in said.splitlines() if line.startswith(f"rank {report.rank} ")]
        stacks.append(f"rank {report.rank} stood at{stack}" if stack else report.detail)
    done = [report for report in reports if report.status == "ok"]
    if done:
        sentences.append(f"{_ranks(done)} done")
    printed = [f"rank {report.rank} printed:\n{report.output.rstrip()[-_TOLD_OUTPUT:]}" for report in told if report.output.strip()]
    return "\n".join([head, *(f"  {sentence}" for sentence in sentences), "", *stacks, *printed])


def _ranks(reports: list[RankReport]) -> str:
    numbers = [str(report.rank) for report in reports]
    return f"rank {numbers[0]} is" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]} are"
