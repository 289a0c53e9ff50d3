"""Functions that hang together, and functions that only look like it."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def recv_from_finished():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)


def both_send_first():
    peer = 1 - dist.get_rank()
    dist.send(torch.ones(1 << 16), peer)
    dist.recv(torch.ones(1 << 16), peer)


def both_receive_first_async():
    peer = 1 - dist.get_rank()
    dist.irecv(torch.ones(4), peer).wait()
    dist.isend(torch.ones(4), peer).wait()


def wrong_tag():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1, tag=4).wait()
    else:
        dist.irecv(torch.ones(2), 0, tag=3).wait()


def one_too_many():
    for _ in range(3 + dist.get_rank()):
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)


def left_out_of_barrier():
    if dist.get_rank() != 2:
        dist.barrier()


def mixed_up():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(3), 2)
    else:
        dist.barrier()


def subgroup_misses_one():
    group = dist.new_group([0, 2])
    if dist.get_rank() == 0:
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=group)


def group_made_by_one():
    if dist.get_rank() == 1:
        dist.new_group([0, 1])


def batch():
    peer = 1 - dist.get_rank()
    operations = [dist.P2POp(dist.irecv, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.ones(2), peer)]
    if dist.get_rank() == 0:
        operations.append(dist.P2POp(dist.isend, torch.ones(2), peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def any_source():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2))
        dist.recv(torch.ones(2))
    elif dist.get_rank() == 1:
        dist.send(torch.ones(2), 0)


def ring_of_receives():
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.ones(2), (rank - 1) % world)
    dist.send(torch.ones(2), (rank + 1) % world)


def objects():
    if dist.get_rank() == 0:
        dist.broadcast_object_list([{"a": 1}], src=0)
    else:
        dist.recv(torch.ones(1), 0, tag=9)


def ddp_against_barrier():
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    if dist.get_rank() == 0:
        model(torch.ones(2, 3)).sum().backward()
    else:
        dist.barrier()


def functional_alone():
    if dist.get_rank() == 0:
        functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).numpy()


def joins_a_thread_that_waits():
    """The thread that would return has nothing to say; who waits for it by any of Python's ways waits in vain."""
    import concurrent.futures
    import queue
    import threading

    rank, box = dist.get_rank(), queue.Queue()
    if rank == 0:
        thread = threading.Thread(target=lambda: dist.recv(torch.ones(1), 1))
        thread.start()
        thread.join()
    elif rank == 1:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(dist.recv, torch.ones(1), 2).result()
    else:
        threading.Thread(target=lambda: box.put(dist.recv(torch.ones(1), 0))).start()
        box.get()


def after_two_messages():
    value = torch.ones(1)
    for _ in range(2):
        dist.send(value, 1) if dist.get_rank() == 0 else dist.recv(value, 0)
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.recv(value, 0)


# Not deadlocks.


def objects_exchanged():
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, dist.get_rank())
    return got


def thread_that_rests_between_messages():
    """Its wait ends while everything else waits; then it sleeps, and only then it sends what releases the others."""
    import threading

    rank = dist.get_rank()
    if rank == 0:

        def relay():
            dist.recv(torch.ones(1), 1, tag=1)
            time.sleep(3.0)
            dist.send(torch.ones(1), 1, tag=2)

        thread = threading.Thread(target=relay)
        thread.start()
        thread.join()
    else:
        time.sleep(0.3)
        dist.send(torch.ones(1), 0, tag=1)
        dist.recv(torch.ones(1), 0, tag=2)
    return rank


def thread_starts_a_thread():
    """Who will send is started by a thread that is gone, while everybody else waits already."""
    import threading

    rank, box = dist.get_rank(), threading.Event()
    if rank == 0:

        def send_later():
            time.sleep(3.0)
            dist.send(torch.ones(1), 1)
            box.set()

        def start_it():
            time.sleep(0.3)
            threading.Thread(target=send_later).start()

        threading.Thread(target=start_it).start()
        box.wait()
    else:
        dist.recv(torch.ones(1), 0)
    return rank


def waits_for_an_alarm():
    """Nobody waits for a message, and what wakes the waiter is no thread."""
    import signal
    import threading

    rang = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: rang.set())
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    rang.wait()
    return dist.get_rank()


def rings_and_threads(steps: int):
    """Work that has a bit of everything, for a machine with no time to spare."""
    import threading

    rank, world = dist.get_rank(), dist.get_world_size()
    given, got, total = torch.full((1000,), float(rank)), torch.empty(1000), torch.zeros(1)
    for step in range(steps):
        send = dist.isend(given, (rank + 1) % world, tag=step % 3)
        thread = threading.Thread(target=dist.recv, args=(got, (rank - 1) % world), kwargs={"tag": step % 3})
        thread.start()
        thread.join()
        send.wait()
        total += got[0]
        if step % 10 == 0:
            dist.all_reduce(got)
    return total.item()


def slow_peer(how: str, seconds: float):
    if dist.get_rank() == 0:
        end = time.monotonic() + seconds
        if how == "sleep":
            time.sleep(seconds)
        elif how == "python":
            while time.monotonic() < end:
                pass
        elif how == "torch":
            while time.monotonic() < end:
                torch.ones(200, 200) @ torch.ones(200, 200)
        elif how == "subprocess":
            os.system(f"sleep {seconds}")
    dist.barrier()
    return dist.get_rank()


def waits_with_a_timeout():
    """Nothing will come, but the wait ends by itself, and the learner's code counts on that."""
    import datetime

    rank = dist.get_rank()
    if rank == 0:
        try:
            dist.irecv(torch.ones(1), 1).wait(datetime.timedelta(seconds=1.2))
        except RuntimeError:
            return "gave up"
    time.sleep(1.5)
    return rank


def slow_sender_thread():
    """The main thread waits, and so does the peer; what releases them comes from another thread, asleep for now."""
    import threading

    rank = dist.get_rank()
    if rank == 0:

        def later():
            time.sleep(1.5)
            dist.send(torch.ones(1), 1, tag=1)

        threading.Thread(target=later).start()
        dist.recv(torch.ones(1), 1, tag=2)
    else:
        dist.recv(torch.ones(1), 0, tag=1)
        dist.send(torch.ones(1), 0, tag=2)
    return rank


def chatter(messages: int):
    """Ping-pong of messages and collectives, with a burst of large ones, that must survive a loaded machine."""
    rank, peer, total = dist.get_rank(), 1 - dist.get_rank(), torch.zeros(1)
    for number in range(messages):
        data = torch.full((1 << (20 if number % 50 == 0 else 4),), float(number))
        if rank == number % 2:
            dist.send(data, peer, tag=number % 7)
        else:
            dist.recv(data, peer, tag=number % 7)
            total += data[0]
    dist.all_reduce(total)
    return total.item()


def waits_on_an_earlier_message():
    """Everything that is waited for is under way already: large sends posted before their receives."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    sends = [dist.isend(torch.full((1 << 20,), float(rank)), peer, tag=number) for number in range(8)]
    buffers = [torch.empty(1 << 20) for _ in range(8)]
    for number in reversed(range(8)):
        dist.irecv(buffers[number], peer, tag=number).wait()
    for send in sends:
        send.wait()
    return sum(buffer[0].item() for buffer in buffers)
