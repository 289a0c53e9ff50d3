"""Collectives and messages, read from the c10d operators that pass through the dispatcher."""

import sys
from collections.abc import Iterable, Iterator

import torch

_STEMS = (
    ("allreduce", "all_reduce"), ("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("reduce", "reduce"), ("scatter", "scatter"),
    ("gather", "gather"), ("send", "send"), ("isend", "send"), ("recv", "recv"), ("irecv", "recv"),
    ("barrier", "barrier"), ("monitored_barrier", "barrier"), ("wait", "wait"),
)  # fmt: skip


def kind_of(name: str) -> str:
    """Plain name of a c10d operator: 'c10d._allgather_base_' -> 'all_gather'."""
    base = name.rpartition(".")[2].strip("_").replace("all_", "all")
    return next((kind for stem, kind in _STEMS if base.startswith(stem)), base)


def traffic(kind: str, payload: int, size: int, is_root: bool) -> tuple[int, int]:
    """Bytes that one of `size` ranks sends and receives.

    `payload` is the bytes of the full-size tensor: the input of all_reduce and reduce_scatter, the output of
    all_gather. Collectives count as the ring algorithms of the lectures do (Patarasuk and Yuan 2009): each rank sends
    and receives (p - 1)/p of the payload for all_gather and reduce_scatter, twice that for all_reduce.
    """
    size = max(size, 1)
    share = payload * (size - 1) // size
    if kind == "all_reduce":
        return 2 * share, 2 * share
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return share, share
    if kind == "send":
        return payload, 0
    if kind == "recv":
        return 0, payload
    if size == 1 or kind in ("barrier", "wait"):
        return 0, 0
    if kind == "broadcast":
        return (payload, 0) if is_root else (0, payload)
    if kind == "reduce":
        return (0, payload) if is_root else (payload, 0)
    if kind == "scatter":
        return (share, 0) if is_root else (0, payload)
    if kind == "gather":
        return (0, share) if is_root else (payload, 0)
    return 0, 0


def note_collective(log, facts, args, kwargs, out, code, start: float, end: float) -> None:
    """Add one collective or message to the log. Seconds count from the recorder's start."""
    given = dict(zip(facts.arguments, args, strict=False)) | kwargs
    kind = kind_of(facts.name)
    group = _group(given)
    size = group.size() if group is not None else 0
    root = given.get("root_rank", given.get("src"))
    payload = 0 if kind in ("barrier", "wait") else max(_bytes(v) for v in (*given.values(), out))
    log.sent(_tensors(given.values()))
    sent, received = traffic(kind, payload, size, group is not None and root == group.rank())
    peer = given.get("dst", given.get("src")) if kind in ("send", "recv") else root
    asynchronous = bool(given.get("async_op", given.get("asyncOp", True)))
    if kind in ("send", "recv") and asynchronous:
        asynchronous = not _called_from(("send", "recv"))
    note_message(
        log, kind, facts.name, code, start, end, bytes_sent=sent, bytes_received=received, payload_bytes=payload,
        peer=None if peer is None else _global_rank(group, int(peer)), group=getattr(group, "group_name", ""),
        group_size=size, asynchronous=asynchronous,
    )  # fmt: skip


def note_message(log, kind: str, op: str, code: int, start: float, end: float, **fields: object) -> None:
    """Add a message whose fields are known. What does not say otherwise was posted at its start and is real."""
    log.messages.append(
        {"kind": kind, "op": op, "code": code, "start_s": start, "end_s": end, "event": log.event_count(),
         "op_index": log.op_count() - 1, "posted_s": start, "simulated": False, **fields}
    )  # fmt: skip


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return 0


def _group(given: dict):
    group = given.get("process_group")
    if isinstance(group, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(group)
    if group is None and "group_name" in given:
        name = given["group_name"]
        if isinstance(name, str):
            return torch.distributed.distributed_c10d._resolve_process_group(name)
        return name if isinstance(name, torch.distributed.ProcessGroup) else None
    return group


def _global_rank(group, rank: int) -> int:
    try:
        return torch.distributed.get_global_rank(group, rank)
    except (RuntimeError, ValueError):  # a group that torch.distributed does not manage
        return rank


def _called_from(names: tuple[str, ...]) -> bool:
    """Whether the call came through one of torch.distributed's functions of these names."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name in names and "distributed" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
