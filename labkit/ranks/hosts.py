"""Several machines: hands the function to torchrunx, which starts ranks over SSH (or Slurm) and brings their values back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from labkit.ranks import travel
from labkit.ranks.errors import RankError


def run_on_hosts(payload: bytes, world_size: int, hosts: Sequence[str], cards: bool) -> tuple[list[Any], float]:
    """What ``call`` returns on each rank, in order, and the seconds that it took; ranks are spread evenly over ``hosts``.

    payload : as ``call`` takes it; every host needs labkit, and the same Python and torch. cards : NCCL, else gloo.
    Raises ImportError without torchrunx, ValueError where ranks do not divide among hosts, RankError with what torchrunx says when a
    host or rank is lost, and what a rank itself raised.
    """
    try:
        import torchrunx
    except ImportError:
        raise ImportError("hosts=[...] needs torchrunx on every host: pip install torchrunx") from None
    if not hosts or world_size % len(hosts):
        raise ValueError(f"{world_size} ranks do not divide among {len(hosts)} hosts")
    launcher = torchrunx.Launcher(
        hostnames=list(hosts), workers_per_host=world_size // len(hosts), backend="nccl" if cards else "gloo"
    )
    launcher.set_logging_handlers(None)
    start = time.perf_counter()
    try:
        results = launcher.run(_on_rank, payload).results
    except (torchrunx.AgentFailedError, torchrunx.WorkerFailedError) as error:
        raise RankError(f"torchrunx lost a host or a rank: {error}") from error
    seconds = time.perf_counter() - start
    return [travel.loads(data) for host in dict.fromkeys(hosts) for data in results[host]], seconds


def _on_rank(payload: bytes) -> bytes:
    import torch.distributed as dist

    from labkit.ranks.call import call
    from labkit.ranks.child import Failure

    try:
        return call(payload, dist.get_rank(), dist.get_world_size())
    except Failure as failure:
        raise failure.cause from None


def available() -> bool:
    """Whether torchrunx is installed here."""
    import importlib.util

    return importlib.util.find_spec("torchrunx") is not None
