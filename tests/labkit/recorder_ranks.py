"""Two gloo ranks that record what they send, for test_recorder_ranks.py: prints one JSON object per rank.

Run as ``python -m tests.labkit.recorder_ranks``. Forks its ranks itself, so that PyTorch is imported once.
"""

import json
import multiprocessing
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from labkit.recorder import Recorder

WIDTH = 64
LAYERS = 4
UNIT = WIDTH * WIDTH * 4  # bytes of one layer's weight


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def messages(rank: int) -> dict:
    x = torch.full((100,), float(rank))
    with Recorder() as rec:
        with rec.phase("messages"):
            if rank == 0:
                dist.send(x, 1)
                work = dist.irecv(x, 1)
                work.wait()
            else:
                y = torch.empty(100)
                dist.recv(y, 0)
                dist.isend(x, 0).wait()
        with rec.phase("collectives"):
            dist.all_reduce(x)
            dist.broadcast(x, 1)
            dist.all_gather([torch.empty(100), torch.empty(100)], x)
            dist.all_gather_into_tensor(torch.empty(200), x)
            dist.reduce_scatter_tensor(torch.empty(50), x)
            dist.all_to_all_single(torch.empty(100), x)
            dist.reduce(x, 0)
            dist.barrier()
        with rec.phase("functional"):
            functional.all_reduce(x, "sum", dist.group.WORLD).sum()
    r = rec.recording
    return {
        "messages": [[m.kind, m.bytes_sent, m.bytes_received, m.peer, m.asynchronous, m.group_size]
                     for m in r.comm() if m.phase == "messages"],
        "collectives": [[m.kind, m.bytes_sent, m.bytes_received] for m in r.comm()
                        if m.phase == "collectives" and m.kind != "wait"],
        "functional": [m.kind for m in r.comm() if m.phase == "functional"],
        "by_kind": r.bytes_by_kind(),
    }  # fmt: skip


def ddp(rank: int) -> dict:
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(watch=[model, optimizer]) as rec:
        with rec.phase("backward"):
            model(torch.ones(2, WIDTH) * (rank + 1)).sum().backward()
        rec.mark("after")
        optimizer.step()
    r = rec.recording
    return {"kinds": r.bytes_by_kind(), "gradients": r.by_category("after")["gradients"],
            "in_backward": r.comm("all_reduce")[0].phase == "backward", "recomputed": len(r.recomputed_ops())}  # fmt: skip


def fsdp(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(1, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = []

    def note(module, args, output=None):
        live.append(rec.log.total)

    for layer in model:
        layer.register_forward_hook(note)
    with Recorder(watch=[model, optimizer]) as rec:
        rec.mark("start")
        with rec.phase("forward"):
            loss = model(x).sum()
        rec.mark("between")
        with rec.phase("backward"):
            loss.backward()
        rec.mark("after")
    r = rec.recording
    return {
        "start": r.at("start"), "between": r.at("between"), "after": r.at("after"),
        "peak_forward": r.peak("forward"), "peak": r.peak_bytes, "live": live, "kinds": r.bytes_by_kind(),
        "categories": r.by_category("after"), "recomputed": [o.name for o in r.recomputed_ops()],
    }  # fmt: skip


def late(rank: int) -> dict:
    """A thread that holds what was sent for a moment longer, as gloo's do, and a list that keeps it."""
    kept, let_go = [], threading.Event()

    def hold(tensor: torch.Tensor) -> None:
        let_go.wait()
        time.sleep(0.02)
        del tensor

    with Recorder() as rec:
        short = torch.ones(1000)
        kept.append(torch.ones(10))
        thread = threading.Thread(target=hold, args=(short,))
        thread.start()
        dist.all_reduce(short)
        dist.all_reduce(kept[0])
        del short
        let_go.set()
        after = rec.mark("after")
    thread.join()
    return {"after": after}


def run(rank: int, file: str, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    queue.put((rank, {"messages": messages(rank), "ddp": ddp(rank), "fsdp": fsdp(rank), "late": late(rank)}))
    queue.close()
    queue.join_thread()
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, f"{folder}/store", queue)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            if process.exitcode != 0:
                sys.exit(f"a rank ended with {process.exitcode}")
        results = dict(queue.get() for _ in ranks)
    print(json.dumps([results[0], results[1]]))


if __name__ == "__main__":
    main()
