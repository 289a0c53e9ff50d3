"""Collectives and messages, read from the c10d operators that pass through the dispatcher."""

import torch

# Bytes that one rank sends and receives, for a payload of n bytes on p ranks, by the ring algorithms of the lectures.
# n is the bytes of the full-size tensor: the input of all_reduce and reduce_scatter, the output of all_gather.
_RING = {
    "all_reduce": lambda n, p: (2 * n * (p - 1) // p, 2 * n * (p - 1) // p),
    "all_gather": lambda n, p: (n * (p - 1) // p, n * (p - 1) // p),
    "reduce_scatter": lambda n, p: (n * (p - 1) // p, n * (p - 1) // p),
    "all_to_all": lambda n, p: (n * (p - 1) // p, n * (p - 1) // p),
    "send": lambda n, p: (n, 0),
    "recv": lambda n, p: (0, n),
    "barrier": lambda n, p: (0, 0),
    "wait": lambda n, p: (0, 0),
}


def kind_of(name: str) -> str:
    """Plain name of a c10d operator: 'c10d._allgather_base_' -> 'all_gather'."""
    base = name.rpartition(".")[2].strip("_").replace("all_", "all")
    for stem, kind in (
        ("allreduce", "all_reduce"), ("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter"),
        ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("reduce", "reduce"), ("scatter", "scatter"),
        ("gather", "gather"), ("send", "send"), ("recv", "recv"), ("barrier", "barrier"), ("wait", "wait"),
    ):
        if base.startswith(stem):
            return kind
    return base


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return 0


def note_collective(log, facts, args, kwargs, out, code, start, end) -> None:
    """Add one collective or message to the log. Seconds count from the recorder's start."""
    kind = kind_of(facts.comm)
    given = {a.name: v for a, v in zip(facts.arguments, args, strict=False)} | kwargs
    group = given.get("process_group")
    size, name = 0, ""
    if group is not None and not isinstance(group, str):
        group = _unbox(group)
        size, name = group.size(), group.group_name
    elif "group_name" in given:
        name = given["group_name"]
        size = torch.distributed.distributed_c10d._resolve_process_group(name).size()
    payload = max(_bytes(args), _bytes(out)) if kind not in ("all_gather", "reduce_scatter", "all_to_all") else max(
        [_bytes(out), *(_bytes(a) for a in args)]
    )
    sent, received = _RING.get(kind, lambda n, p: (0, 0))(payload, max(size, 1))
    log.messages.append(
        {"kind": kind, "op": facts.name, "bytes_sent": sent, "bytes_received": received, "payload_bytes": payload,
         "peer": given.get("dst", given.get("src")), "group": name, "group_size": size,
         "asynchronous": bool(given.get("asyncOp")), "start_s": start, "end_s": end, "code": code}
    )


def _unbox(group: object):
    return torch.distributed.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
