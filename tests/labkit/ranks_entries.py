"""Entries for ``launch``: what well-meaning, clumsy and hostile code does in a rank."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time


def echo(payload: bytes, rank: int, world_size: int) -> bytes:
    print(f"rank {rank} of {world_size}")
    return payload + bytes([rank])


def settings(payload, rank, world_size):
    import torch

    text = "|".join([os.getcwd(), os.environ["LABKIT_TEST"], os.environ["RANK"], str(torch.get_num_threads())])
    return text.encode()


def reduce(payload, rank, world_size):
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return str(total.item()).encode()


def raises(payload, rank, world_size):
    error = ValueError("no such \udcff thing")
    error.add_note("seen here")
    raise error


def raises_huge(payload, rank, world_size):
    raise ValueError("x" * 50_000_000)


def raises_unprintable(payload, rank, world_size):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    raise Broken


def wrong_type(payload, rank, world_size):
    return "text"


def too_large(payload, rank, world_size):
    return bytes(100_000)


def leaves(payload, rank, world_size):
    os._exit(3)


def sys_exit(payload, rank, world_size):
    sys.exit(4)


def segfault(payload, rank, world_size):
    import ctypes

    ctypes.string_at(0)


def killed(payload, rank, world_size):
    os.kill(os.getpid(), signal.SIGKILL)


def memory_error(payload, rank, world_size):
    raise MemoryError("too much")


def torch_memory(payload, rank, world_size):
    import torch

    torch.empty(1 << 60)


def loud(payload, rank, world_size):
    os.system("echo from a subprocess")
    os.write(1, b"from C\n")
    print("stderr too", file=sys.stderr)
    for _ in range(50):
        print("x" * 1_000_000)
    print("the end")
    return b""


def keeps_thread(payload, rank, world_size):
    threading.Thread(target=time.sleep, args=(60,), name="sleeper").start()
    return b"done"


def leaves_child(payload, rank, world_size):
    subprocess.Popen(["sleep", "60"])
    # A double fork into a session of its own, as daemons do it.
    subprocess.run([sys.executable, "-c", "import os; os.fork() or (os.setsid(), os.execvp('sleep', ['sleep', '61']))"], check=True)
    return b"done"


def forks(payload, rank, world_size):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return b"parent"


def fork_returns_too(payload, rank, world_size):
    os.fork()
    return b"both"


def closes_output(payload, rank, world_size):
    os.close(1)
    with contextlib.suppress(OSError):
        print("into nothing")
    return b"still here"


def closes_everything(payload, rank, world_size):
    os.closerange(0, 4096)
    return b"lost"


def stubborn(payload, rank, world_size):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("begun")
    while True:
        time.sleep(1)


def blocks_in_c(payload, rank, world_size):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _pipes():
    for fd in range(3, 256):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                yield fd
        except OSError:
            continue


def garbage(payload, rank, world_size):
    for fd in _pipes():
        try:
            os.write(fd, b"\x80\x04not a frame at all")
        except OSError:
            continue
    os._exit(0)


def endless_frame(payload, rank, world_size):
    for fd in _pipes():
        try:
            os.write(fd, b"D" + (1 << 60).to_bytes(8, "little"))
        except OSError:
            continue
    return b""


def forged_error(payload, rank, world_size):
    body = b'{"type": 3, "message": [], "traceback": {}}'
    for fd in _pipes():
        try:
            os.write(fd, b"E" + len(body).to_bytes(8, "little") + body + b"F" + bytes(8))
        except OSError:
            continue
    time.sleep(60)


def kills_supervisor(payload, rank, world_size):
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def random_numbers(payload, rank, world_size):
    import random

    return random.randbytes(8)


def nested(payload, rank, world_size):
    from labkit.ranks import launch

    launch(b"", world_size=1, entry="tests.labkit.ranks_entries:echo", timeout=5, init_process_group=False)


def rank_two_fails(payload, rank, world_size):
    import torch.distributed as dist

    if rank == 2:
        if payload == b"exit":
            os._exit(5)
        raise ValueError("the root")
    dist.barrier()
    return b""
