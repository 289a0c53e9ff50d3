"""`Link`: what a modelled wire between ranks is, and how long a message or collective takes on it. Pure numbers."""

from dataclasses import asdict, dataclass
from math import ceil, isfinite, log2

RING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TREE = ("broadcast", "reduce")


@dataclass(frozen=True)
class Link:
    """A simulated wire: messages take time and no processor, so that slow networks can be studied on one machine.

    bandwidth_bytes_s : bytes per second of one wire, in one direction
    latency_s         : seconds from the last byte's departure to its arrival; it delays a message and keeps no wire busy
    per               : "pair" (each ordered pair of ranks has a wire of its own) or "rank" (all that a rank sends shares one
                        wire, and so does all that it receives, as behind one network card)

    A message begins when its send and its receive are both posted and the wire is free, keeps the wire busy for bytes /
    bandwidth, and is there a latency later. The send is done at the end of the transmission. What a link adds to the copies
    that the machine really makes is modelled time: recordings and pictures call it simulated. Raises ValueError for a
    bandwidth that is not positive, a latency below 0 or another `per`.
    """

    bandwidth_bytes_s: float
    latency_s: float = 0.0
    per: str = "pair"

    def __post_init__(self) -> None:
        if not (isfinite(self.bandwidth_bytes_s) and self.bandwidth_bytes_s > 0):
            raise ValueError(f"bandwidth_bytes_s is a positive number of bytes per second, not {self.bandwidth_bytes_s!r}")
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is a number of seconds, 0 or more, not {self.latency_s!r}")
        if self.per not in ("pair", "rank"):
            raise ValueError(f'per is "pair" or "rank", not {self.per!r}')

    def as_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        rate, name = self.bandwidth_bytes_s, "B/s"
        for unit in ("kB/s", "MB/s", "GB/s"):
            if rate >= 1000:
                rate, name = rate / 1000, unit
        return f"{rate:.3g} {name}, {self.latency_s * 1e3:.3g} ms" + (" per rank" if self.per == "rank" else "")


def seconds_of(link: Link, kind: str, payload_bytes: int, ranks: int) -> tuple[float, float]:
    """(seconds on the wires, seconds of latency) that `kind` takes among `ranks` ranks, each from the moment all have called it.

    `payload_bytes` is the full-size tensor: the input of all_reduce and reduce_scatter, the output of all_gather. Modelled
    are the ring algorithms of the lectures (Patarasuk and Yuan 2009) for all_reduce, all_gather, reduce_scatter and all_to_all,
    binomial trees for broadcast and reduce, and ceil(log2(ranks)) rounds of empty messages for a barrier.
    """
    if ranks < 2:
        return 0.0, 0.0
    rounds = ceil(log2(ranks))
    if kind in RING:
        steps = (ranks - 1) * (2 if kind == "all_reduce" else 1)
        return steps * (payload_bytes / ranks) / link.bandwidth_bytes_s, steps * link.latency_s
    if kind in TREE:
        return rounds * payload_bytes / link.bandwidth_bytes_s, rounds * link.latency_s
    if kind in ("scatter", "gather"):  # the root's wire: one chunk after the other
        return payload_bytes * (ranks - 1) / ranks / link.bandwidth_bytes_s, link.latency_s
    if kind == "barrier":
        return 0.0, rounds * link.latency_s
    return payload_bytes / link.bandwidth_bytes_s, link.latency_s
