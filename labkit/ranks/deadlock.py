"""Who waits for whom, and whether any of it can still come true. Pure: reads snapshots, knows no process."""

from dataclasses import dataclass, replace

from labkit.ranks.page import ANY_PEER, COLLECTIVE, RECV, SEND, Snapshot, Wait


@dataclass
class Situation:
    """All ranks wait or are done: one sentence per waiting rank, and whether the counts prove that none can go on."""

    sentences: dict[int, str]
    proven: bool


def assess(snapshots: list[Snapshot], done: dict[int, str]) -> Situation | None:
    """The situation, or None while some rank is at work. ``done``: rank -> "finished" or "failed"."""
    waiting = {rank: snapshot.waits for rank, snapshot in enumerate(snapshots) if rank not in done}
    if not waiting or not all(snapshots[rank].communicates for rank in waiting):
        return None
    return _situation(snapshots, done, waiting)


def assess_stacks(snapshots: list[Snapshot], done: dict[int, str], unnoted: dict[int, str]) -> Situation:
    """The same where some ranks wait in what nothing is noted of: ``unnoted`` says what their stacks show. Nothing is proven."""
    snapshots = list(snapshots)
    for rank, kind in unnoted.items():
        snapshots[rank] = replace(snapshots[rank], waits=[Wait(0, kind, 0, ANY_PEER, 0, 0)])
    waiting = {rank: snapshot.waits for rank, snapshot in enumerate(snapshots) if rank not in done}
    return replace(_situation(snapshots, done, waiting), proven=False)


def _situation(snapshots: list[Snapshot], done: dict[int, str], waiting: dict[int, list[Wait]]) -> Situation:
    proven = not any(snapshot.overflow for snapshot in snapshots) and all(
        not _may_come(snapshots, rank, wait) for rank, waits in waiting.items() for wait in waits
    )
    told = {rank: _sentence(snapshots, done, rank, _main(waits)) + _before(snapshots[rank]) for rank, waits in waiting.items()}
    return Situation(told, proven)


def _main(waits: list[Wait]) -> Wait:
    """The wait that tells most: not that of a thread for another one."""
    return next((wait for wait in waits if wait.kind != "thread"), waits[0])


def _before(snapshot: Snapshot) -> str:
    last = snapshot.last
    if last is None:
        return "; it had exchanged nothing before"
    number = f", its {_ordinal(last.index)} of that kind" if last.index > 1 else ""
    return f"; the last that it had done was {_action(last)}{number}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _count(snapshot: Snapshot, direction: int, group: int, peer: int, tag: int) -> int:
    return snapshot.posted.get((direction, group, peer, tag), 0)


def _may_come(snapshots: list[Snapshot], rank: int, wait: Wait) -> bool:
    """Has everything this wait needs been posted by the others (or is it unknown what it needs)?"""
    own = snapshots[rank]
    if wait.kind == "thread":  # comes when that thread comes, and its own wait is looked at, too
        return False
    if wait.kind == "send" and 0 <= wait.peer < len(snapshots):
        peer = snapshots[wait.peer]
        taken = _count(peer, RECV, wait.group, rank, wait.tag) + _count(peer, RECV, wait.group, ANY_PEER, wait.tag)
        return taken >= wait.index
    if wait.kind == "recv" and 0 <= wait.peer < len(snapshots):
        return _count(snapshots[wait.peer], SEND, wait.group, rank, wait.tag) >= wait.index
    if wait.kind == "recv from any rank":
        sent = sum(_count(peer, SEND, wait.group, rank, wait.tag) for peer in snapshots)
        named = sum(_count(own, RECV, wait.group, peer, wait.tag) for peer in range(len(snapshots)))
        return sent >= wait.index + named
    if wait.group in own.groups and wait.kind not in ("wait", "send", "recv"):
        return not _missing(snapshots, wait, own)
    return True


def _missing(snapshots: list[Snapshot], wait: Wait, own: Snapshot) -> list[int]:
    """Members of the group that have not joined this collective."""
    members = [member for member in own.groups.get(wait.group, []) if member < len(snapshots)]
    return [member for member in members if _count(snapshots[member], COLLECTIVE, wait.group, 0, 0) < wait.index]


def _sentence(snapshots: list[Snapshot], done: dict[int, str], rank: int, wait: Wait) -> str:
    said = f"rank {rank} waits in {_action(wait)}"
    if wait.kind in ("send", "recv") and 0 <= wait.peer < len(snapshots):
        return said + f", which {_doing(snapshots, done, wait.peer)}" + _other_tags(snapshots, rank, wait)
    missing = _missing(snapshots, wait, snapshots[rank])
    if missing:
        others = "; ".join(f"rank {member} has not joined and {_doing(snapshots, done, member)}" for member in missing[:4])
        more = f"; and {len(missing) - 4} more ranks" if len(missing) > 4 else ""
        return f"{said}: {others}{more}"
    return said


def _action(wait: Wait) -> str:
    tag = f" with tag {wait.tag}" if wait.tag else ""
    if wait.kind == "send":
        return f"send to rank {wait.peer}{tag}"
    if wait.kind == "recv":
        return f"recv from rank {wait.peer}{tag}"
    if wait.kind == "thread":
        return "Python for another thread"
    return "a communication" if wait.kind == "wait" else wait.kind + tag


def _doing(snapshots: list[Snapshot], done: dict[int, str], rank: int) -> str:
    if rank in done:
        return f"has {done[rank]}"
    return f"waits in {_action(_main(snapshots[rank].waits))}" if snapshots[rank].waits else "does something else"


def _other_tags(snapshots: list[Snapshot], rank: int, wait: Wait) -> str:
    """The near miss: the peer has posted the counterpart, but with another tag."""
    counterpart, own = (SEND, RECV) if wait.kind == "recv" else (RECV, SEND)
    tags = [
        tag
        for (direction, group, peer, tag), count in snapshots[wait.peer].posted.items()
        if (direction, group, peer) == (counterpart, wait.group, rank)
        and tag != wait.tag
        and count > _count(snapshots[rank], own, group, wait.peer, tag)
    ]
    if not tags:
        return ""
    verb = "sent" if wait.kind == "recv" else "asked to receive"
    return f" (rank {wait.peer} has {verb} with tag {', '.join(str(tag) for tag in tags[:4])}, this one has tag {wait.tag})"
