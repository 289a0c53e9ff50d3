"""Right parameter servers, each built differently: none of these may lose a point."""

import copy
import json
import math
import queue
import threading
import time
from collections import Counter, OrderedDict, deque

import numpy as np
import torch
from torch import nn

from tests.labs.corpus import right

STORE, SYNC, BOUNDED = "parameter_server.store", "parameter_server.synchronous", "parameter_server.bounded"
LAYERS, WORKER = "parameter_server.layers", "parameter_server.worker"


# -- 8.1 --


@right("nn.Parameters, .grad added up, under a lock", check=STORE)
class Locked:
    def __init__(self, parameters, make_optimizer):
        self.lock = threading.RLock()
        self.held = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(p.detach().clone()) for name, p in parameters.items()})
        self.optimizer = make_optimizer([self.held[name] for name in self.held])
        self.version = 0

    def pull(self):
        with self.lock:
            return self.version, {name.replace("/", "."): p.detach().clone() for name, p in self.held.items()}

    def apply(self, gradients):
        with self.lock:
            self.optimizer.zero_grad(set_to_none=False)
            for one in gradients:
                for name, value in one.items():
                    p = self.held[name.replace(".", "/")]
                    p.grad = value / len(gradients) if p.grad is None else p.grad + value / len(gradients)
            self.optimizer.step()
            self.version += 1


@right("one flat vector, double precision for the mean, version as a tensor", check=STORE)
class Flat:
    def __init__(self, parameters, make_optimizer):
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        self.optimizer = make_optimizer([self.flat])
        self.version = torch.tensor(0)

    def pull(self):
        parts = self.flat.clone().split([shape.numel() for shape in self.shapes.values()])
        return int(self.version), OrderedDict((n, part.clone().view(s)) for part, (n, s) in zip(parts, self.shapes.items(), strict=True))

    def apply(self, gradients):
        rows = [torch.cat([one[name].reshape(-1) for name in self.shapes]) for one in gradients]
        self.flat.grad = torch.stack(rows).double().mean(0).float()
        self.optimizer.step()
        self.version = self.version + 1


@right("snapshots made when a step is done, handed out as copies", check=STORE)
class Snapshots:
    def __init__(self, parameters, make_optimizer):
        self.p = copy.deepcopy({name: p.detach() for name, p in parameters.items()})
        self.optimizer = make_optimizer(self.p.values())
        self.history = [copy.deepcopy(self.p)]

    @property
    def version(self):
        return len(self.history) - 1

    def pull(self):
        return [self.version, copy.deepcopy(self.history[-1])]

    def apply(self, gradients):
        for name in self.p:
            self.p[name].grad = sum(g[name].clone() for g in gradients) / len(gradients)
        self.optimizer.step()
        self.history.append({name: p.detach().clone() for name, p in self.p.items()})


@right("two lists, a foreach mean, numbers counted by numpy", check=STORE)
class Lists:
    def __init__(self, parameters, make_optimizer):
        self.names, self.tensors = list(parameters), [torch.empty_like(p).copy_(p.detach()) for p in parameters.values()]
        self.optimizer = make_optimizer(self.tensors)
        self.version = np.int64(0)

    def pull(self):
        return self.version, {name: p.clone() for name, p in zip(self.names, self.tensors, strict=True)}

    def apply(self, gradients):
        total = [torch.zeros_like(p) for p in self.tensors]
        for one in gradients:
            torch._foreach_add_(total, [one[name] for name in self.names])
        torch._foreach_div_(total, len(gradients))
        for p, grad in zip(self.tensors, total, strict=True):
            p.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1


# -- 8.2 --


@right("a table of all gradients by round and worker", check=SYNC)
class Table:
    def __init__(self, store, workers, need):
        self.store, self.need, self.workers = store, need, workers
        self.table, self.over = {}, 0
        self.dead, self.asking, self.late = set(), [], {}

    @property
    def dropped(self):
        return np.array(list(self.late)) if self.late else []

    def clock(self, worker):
        return np.int64(self.over)

    def now(self):
        return {w: g for (r, w), g in self.table.items() if r == self.over}

    def pull(self, worker):
        self.dead.discard(worker)
        if worker in self.now():
            if worker not in self.asking:
                self.asking.append(worker)
            return ()
        return (worker,)

    def push(self, worker, clock, gradient):
        if (clock, worker) in self.table:
            return None
        self.table[clock, worker] = None if clock < self.over else gradient
        if clock < self.over:
            self.late[worker, clock] = True
            return None
        return self.look()

    def death(self, worker):
        self.dead.add(worker)
        if worker in self.asking:
            self.asking.remove(worker)
        return self.look()

    def look(self):
        now = self.now()
        missing = [w for w in range(self.workers) if w not in self.dead and w not in now]
        if not now or (missing and len(now) < self.need):
            return None
        mean = {name: sum(g[name] for g in now.values()) / len(now) for name in next(iter(now.values()))}
        self.store.apply([mean])  # the mean of one is that one
        self.over += 1
        answered, self.asking = self.asking[::-1], []
        return answered


@right("generators that yield who is answered", check=SYNC)
class Yielding:
    def __init__(self, store, workers, need):
        self.store, self.need = store, need
        self.state = {worker: "idle" for worker in range(workers)}
        self.alive = [True] * workers
        self.grads, self.known, self.dropped = {}, {}, deque()

    def clock(self, worker):
        return torch.tensor(self.store.version)

    def pull(self, worker):
        self.alive[worker] = True
        if worker in self.grads:
            self.state[worker] = "waits"
        else:
            yield worker

    def push(self, worker, clock, gradient):
        if clock in self.known.setdefault(worker, set()):
            return
        self.known[worker].add(clock)
        if clock != self.store.version:
            self.dropped.append([worker, clock])
            return
        self.grads[worker] = gradient
        yield from self.check()

    def death(self, worker):
        self.alive[worker] = False
        self.state[worker] = "idle"
        yield from self.check()

    def check(self):
        if self.grads and (len(self.grads) >= self.need or all(w in self.grads for w, a in enumerate(self.alive) if a)):
            self.store.apply([self.grads[w] for w in sorted(self.grads)])
            self.grads.clear()
            for worker, state in self.state.items():
                if state == "waits":
                    self.state[worker] = "idle"
                    yield worker


@right("the last clock of each worker, since its messages keep their order", check=SYNC)
class LastClock:
    def __init__(self, store, workers, need):
        self.store, self.need, self.count = store, need, 0
        self.last, self.gone, self.patient = [-1] * workers, [], []
        self.gradients, self.dropped = [None] * workers, []

    def clock(self, worker):
        return self.count

    def pull(self, worker):
        if worker in self.gone:
            self.gone.remove(worker)
        if self.last[worker] < self.count:
            return [worker]
        self.patient.append(worker)
        return []

    def push(self, worker, clock, gradient):
        if clock <= self.last[worker]:
            return []
        self.last[worker] = clock
        if clock < self.count:
            self.dropped.append((worker, clock))
            return []
        self.gradients[worker] = gradient
        return self._end_if_enough()

    def death(self, worker):
        if worker not in self.gone:
            self.gone.append(worker)
        while worker in self.patient:
            self.patient.remove(worker)
        return self._end_if_enough()

    def _end_if_enough(self):
        here = [g for g in self.gradients if g is not None]
        all_alive = all(g is not None or w in self.gone for w, g in enumerate(self.gradients))
        if here and (len(here) >= self.need or all_alive):
            self.store.apply(here)
            self.count += 1
            self.gradients = [None] * len(self.gradients)
            answered, self.patient = self.patient, []
            return answered
        return []


class Round:
    def __init__(self):
        self.gradients, self.waiting = {}, set()


@right("an object for each round, under a lock, answers as a dict", check=SYNC)
class OfRounds:
    def __init__(self, store, workers, need):
        self.store, self.need, self.rounds = store, need, [Round()]
        self.alive, self.lock, self._dropped = dict.fromkeys(range(workers), True), threading.RLock(), {}

    @property
    def dropped(self):
        return tuple(self._dropped)

    def clock(self, worker):
        return len(self.rounds) - 1

    def pull(self, worker):
        with self.lock:
            self.alive[worker] = True
            now = self.rounds[-1]
            if worker in now.gradients:
                now.waiting.add(worker)
                return {}
            return {worker: self.store.version}

    def push(self, worker, clock, gradient):
        with self.lock:
            its = self.rounds[clock]
            if worker in its.gradients:
                return {}
            if its is not self.rounds[-1]:
                self._dropped[worker, clock] = None
                return {}
            its.gradients[worker] = {name: value.clone() for name, value in gradient.items()}
            return self.close()

    def death(self, worker):
        with self.lock:
            self.alive[worker] = False
            self.rounds[-1].waiting -= {worker}
            return self.close()

    def close(self):
        now = self.rounds[-1]
        awaited = {worker for worker, alive in self.alive.items() if alive} - set(now.gradients)
        if len(now.gradients) < self.need and (awaited or not now.gradients):
            return {}
        self.store.apply([*now.gradients.values()])
        now.gradients = dict.fromkeys(now.gradients)  # who was in it; the tensors may go
        self.rounds.append(Round())
        return dict.fromkeys(now.waiting, self.store.version)


# -- 8.3 --


@right("one dict by (worker, life, clock), old ones swept", check=LAYERS)
class Swept:
    def __init__(self, names):
        self.names, self.held, self.last = list(names), {}, {}

    def arrive(self, worker, life, clock, name, gradient):
        self.last[worker] = max(self.last.get(worker, (0, 0)), (life, clock))
        for key in [key for key in self.held if key[0] == worker and key[1:] < self.last[worker]]:
            del self.held[key]
        if (life, clock) < self.last[worker]:
            return None
        whole = self.held.setdefault((worker, life, clock), {})
        before = len(whole)
        whole.setdefault(name, gradient.clone())
        return dict(whole) if before < len(whole) == len(self.names) else None


@right("two numbers per worker, layers in a list", check=LAYERS)
class Slots:
    def __init__(self, names):
        self.index = {name: number for number, name in enumerate(names)}
        self.at, self.slots = {}, {}

    def arrive(self, worker, life, clock, name, gradient):
        old_life, old_clock = self.at.get(worker, (-1, -1))
        if life < old_life or (life == old_life and clock < old_clock):
            return
        if life > old_life or clock > old_clock:
            self.at[worker] = life, clock
            self.slots[worker] = [None] * len(self.index)
        slots = self.slots[worker]
        if slots[self.index[name]] is not None:
            return
        slots[self.index[name]] = gradient
        if all(slot is not None for slot in slots):
            return {name: slots[number] for name, number in self.index.items()}


@right("a file for each worker that says what is missing", check=LAYERS)
class Missing:
    class File:
        def __init__(self, key, names):
            self.key, self.missing, self.layers = key, set(names), {}

    def __init__(self, names):
        self.names = tuple(names)
        self.files = {}

    def arrive(self, worker, life, clock, name, gradient):
        key = life, clock
        file = self.files.get(worker)
        if file is None or file.key < key:
            file = self.files[worker] = Missing.File(key, self.names)
        if file.key != key or name not in file.missing:
            return None
        file.missing.remove(name)
        file.layers[name] = gradient.detach().clone()
        if file.missing:
            return None
        whole, file.layers = file.layers, {}
        return whole


@right("a list of all that is held, searched each time", check=LAYERS)
class Searched:
    def __init__(self, names):
        self.names, self.rows, self.out = names, [], {}

    def arrive(self, worker, life, clock, name, gradient):
        mine = [row for row in self.rows if row[0] == worker]
        newest = max([self.out.get(worker, (-1, -1)), *[row[1] for row in mine]])
        if (life, clock) < newest or self.out.get(worker) == (life, clock):
            return None
        self.rows = [row for row in self.rows if row[0] != worker or row[1] == (life, clock)]
        if not any(row[0] == worker and row[2] == name for row in self.rows):
            self.rows.append((worker, (life, clock), name, gradient))
        mine = OrderedDict((row[2], row[3]) for row in self.rows if row[0] == worker)
        if len(mine) < len(self.names):
            return None
        self.rows = [row for row in self.rows if row[0] != worker]
        self.out[worker] = life, clock
        return mine


# -- 8.4 --


@right("tensor hooks, which see the gradient before it is stored", check=WORKER)
def tensor_hooks(box, model, loss_of):
    state = {"clock": -1}

    def hook_for(name):
        def hook(grad):
            data = json.dumps({"layer": name, "clock": state["clock"], "do": "push"}, indent=1).encode()
            box.send(to=0, data=data, tensors={name: grad})

        return hook

    handles = [p.register_hook(hook_for(name)) for name, p in model.named_parameters()]
    silent = True
    while True:
        if silent:
            box.send(0, bytearray(b'{"do":"pull"}'))
        message, newest = box.recv(0.3), None
        while message is not None:
            newest = message
            message = box.recv(0)
        silent = True
        if newest is None:
            continue
        said = json.loads(newest.data)
        if said.get("stop"):
            break
        state["clock"] = said["clock"]
        model.load_state_dict(newest.tensors)
        model.zero_grad()
        loss_of(model, said["clock"]).backward()
    for handle in handles:
        handle.remove()
    return state["clock"]


@right("gradients asked for layer by layer, no hooks", check=WORKER)
def by_hand(box, model, loss_of):
    named = list(model.named_parameters())
    while True:
        box.send(0, json.dumps({"do": "pull"}).encode(), {})
        if not box.poll(0.25):
            continue
        while box.poll():
            message = box.recv(timeout_s=0.25)
        said = json.loads(message.data)
        if "clock" not in said:
            return
        with torch.no_grad():
            for name, p in named:
                p.data = message.tensors[name]
        loss = loss_of(model, said["clock"])
        for name, p in reversed(named):
            (grad,) = torch.autograd.grad(loss, [p], retain_graph=True)
            box.send(0, json.dumps({"do": "push", "clock": said["clock"], "layer": name}).encode(), {"grad": grad})


@right("a thread that sends from a queue", check=WORKER)
def from_a_queue(box, model, loss_of):
    names, clock, out = {id(p): name for name, p in model.named_parameters()}, [None], queue.Queue()

    def sender():
        while (item := out.get()) is not None:
            box.send(0, item[0], item[1])
            item[2].set()

    thread = threading.Thread(target=sender, daemon=True)
    thread.start()

    def hand_over(data, tensors):
        done = threading.Event()
        out.put((data, tensors, done))
        done.wait()

    def hook(p):
        said = {"do": "push", "clock": clock[0], "layer": names[id(p)]}
        hand_over(json.dumps(said).encode(), {"gradient": p.grad.clone()})
        p.grad.zero_()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    last = None
    while True:
        hand_over(b'{"do": "pull"}', None)
        answers = [box.recv(timeout_s=0.5)]
        while box.poll(0):
            answers.append(box.recv(timeout_s=0))
        if answers[-1] is None:
            continue
        said = json.loads(answers[-1].data.decode())
        if said.get("stop", False):
            out.put(None)
            thread.join()
            return
        if said["clock"] != last or True:
            clock[0] = said["clock"]
            for name, p in model.named_parameters():
                p.data.copy_(answers[-1].tensors[name])
            loss_of(model, clock[0]).backward()


@right("looks at a clock of its own while it waits", check=WORKER)
def by_the_clock(box, model, loss_of):
    import time

    def hook(p, name):
        box.send(0, json.dumps({"do": "push", "clock": now, "layer": name}).encode(), {name: p.grad.detach()})
        p.grad.zero_()

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: hook(p, name))
    while True:
        box.send(0, json.dumps({"do": "pull"}).encode())
        message, end = None, time.monotonic() + 0.15
        while message is None and time.monotonic() < end:
            while box.poll():
                message = box.recv(timeout_s=0.0)
        if message is None:
            continue
        said = json.loads(message.data)
        if "stop" in said:
            break
        now = said["clock"]
        model.load_state_dict(dict(message.tensors), strict=True)
        loss_of(model, now).backward()


@right("hooks on the nodes that accumulate, old ones removed", check=WORKER)
def on_the_nodes(box, model, loss_of):
    def ask():
        for wait_s in (0.1, 0.2, 0.4, *[0.5] * 1000):
            box.send(0, b'{"do": "pull"}')
            newest = box.recv(timeout_s=wait_s)
            while (message := box.recv(timeout_s=0)) is not None:
                newest = message
            if newest is not None:
                return json.loads(newest.data), newest.tensors

    def sender(p, name, clock):
        def ready(*_):
            box.send(0, json.dumps({"do": "push", "clock": clock, "layer": name}).encode(), {"g": p.grad})
            p.grad = None

        return ready

    said, tensors = ask()
    while "stop" not in said:
        handles, nodes = [], []
        for name, p in model.named_parameters():
            p.data = tensors[name].clone()
            nodes.append(p.expand_as(p).grad_fn.next_functions[0][0])
            handles.append(nodes[-1].register_hook(sender(p, name, said["clock"])))
        loss_of(model, said["clock"]).backward()
        for handle in handles:
            handle.remove()
        said, tensors = ask()


# -- 8.5 --


@right("recomputed from a log of all messages", check=BOUNDED)
class FromALog:
    def __init__(self, store, workers, bound):
        self.store, self.bound = store, bound
        self.rows = {w: {"clock": 0, "alive": True, "asks": False, "version": 0} for w in range(workers)}
        self.delays = []

    @property
    def staleness(self):
        return torch.tensor(self.delays, dtype=torch.long)

    def clock(self, worker):
        return float(self.rows[worker]["clock"])

    def pull(self, worker):
        row = self.rows[worker]
        if not row["alive"]:
            others = [other["clock"] for other in self.rows.values() if other["alive"]]
            row["clock"] = max([row["clock"], *([min(others)] if others else [])])
        row.update(alive=True, asks=True)
        return self.go()

    def push(self, worker, clock, gradient):
        row = self.rows[worker]
        if clock == row["clock"]:
            self.delays.append(self.store.version - row["version"])
            self.store.apply((gradient,))
            row["clock"] += 1
        return self.go()

    def death(self, worker):
        self.rows[worker].update(alive=False, asks=False)
        return self.go()

    def go(self):
        answered = set()
        for worker, row in self.rows.items():
            ahead = max((row["clock"] - other["clock"] for other in self.rows.values() if other["alive"]), default=0)
            if row["asks"] and (math.isinf(self.bound) or ahead <= self.bound):
                row.update(asks=False, version=self.store.version)
                answered.add(worker)
        return answered


@right("counts how many are at each clock, and remembers all pushes", check=BOUNDED)
class Counted:
    def __init__(self, store, workers, bound):
        self.store, self.bound = store, bound
        self.at = np.zeros(workers, dtype=np.int64)
        self.on = np.ones(workers, dtype=bool)
        self.queue, self.seen, self.based, self.staleness = [], set(), np.zeros(workers, dtype=np.int64), []

    def clock(self, worker):
        return self.at[worker]

    def pull(self, worker):
        if not self.on[worker] and self.on.any():
            self.at[worker] = max(self.at[worker], self.at[self.on].min())
        self.on[worker] = True
        if worker not in self.queue:
            self.queue.append(worker)
        return self._release()

    def push(self, worker, clock, gradient):
        if (worker, clock) in self.seen or clock < self.at[worker]:
            return []
        self.seen.add((worker, clock))
        self.staleness.append(self.store.version - self.based[worker])
        self.store.apply([{name: value.clone() for name, value in gradient.items()}])
        self.at[worker] += 1
        return self._release()

    def death(self, worker):
        self.on[worker] = False
        self.queue = [one for one in self.queue if one != worker]
        return self._release()

    def _release(self):
        floor = self.at[self.on].min() if self.on.any() else 0
        go = np.array([one for one in self.queue if self.at[one] - floor <= self.bound], dtype=np.int64)
        self.queue = [one for one in self.queue if one not in go]
        self.based[go] = self.store.version
        return go


@right("sorted clocks, one method for all that may have changed, under a condition", check=BOUNDED)
class Sorted:
    def __init__(self, store, workers, bound):
        self.store, self.bound, self.change = store, bound, threading.Condition()
        self.all = [{"who": w, "clock": 0, "alive": True, "asked": False, "had": None} for w in range(workers)]
        self.staleness = deque()

    def clock(self, worker):
        return self.all[worker]["clock"]

    def minimum(self):
        alive = sorted(one["clock"] for one in self.all if one["alive"])
        return alive[0] if alive else -math.inf

    def changed(self):
        self.change.notify_all()
        low = self.minimum()
        for one in self.all:
            if one["asked"] and not one["clock"] > low + self.bound:
                one["asked"], one["had"] = False, self.store.version
                yield one["who"]

    def pull(self, worker):
        with self.change:
            one = self.all[worker]
            if not one["alive"]:
                one["clock"] = max(one["clock"], self.minimum())
                one["alive"] = True
            one["asked"] = True
            return list(self.changed())

    def push(self, worker, clock, gradient):
        with self.change:
            one = self.all[worker]
            if clock < one["clock"]:
                return []
            self.staleness.append(self.store.version - one["had"])
            self.store.apply([gradient])
            one["clock"] = clock + 1
            return list(self.changed())

    def death(self, worker):
        with self.change:
            self.all[worker].update(alive=False, asked=False)
            return list(self.changed())


@right("updates numbered by itself, waiting ones in the order of their asking", check=BOUNDED)
class Numbered:
    def __init__(self, store, workers, bound):
        self.store, self.bound, self.number = store, bound, 0
        self.pushes, self.dead, self.line, self.answered_at = Counter({w: 0 for w in range(workers)}), set(), {}, {}
        self.notes = []

    @property
    def staleness(self):
        return [late for _, _, late in self.notes]

    def clock(self, worker):
        return torch.tensor(self.pushes[worker])

    def floor(self):
        return min([count for worker, count in self.pushes.items() if worker not in self.dead] or [0])

    def pull(self, worker):
        if worker in self.dead:
            self.pushes[worker] = max(self.pushes[worker], self.floor())
            self.dead.remove(worker)
        self.line[worker] = True
        return self.serve_the_line()

    def push(self, worker, clock, gradient):
        if any(note[:2] == (worker, clock) for note in self.notes) or clock != self.pushes[worker]:
            return None
        self.notes.append((worker, clock, self.number - self.answered_at[worker]))
        self.store.apply([gradient])
        self.number += 1
        self.pushes[worker] += 1
        return self.serve_the_line()

    def death(self, worker):
        self.dead |= {worker}
        self.line.pop(worker, None)
        return self.serve_the_line()

    def serve_the_line(self):
        answered = [worker for worker in self.line if self.pushes[worker] <= self.floor() + self.bound]
        for worker in answered:
            self.line.pop(worker)
            self.answered_at[worker] = self.number
        return answered


@right("goes by a clock of its own, in short looks", check=WORKER)
def own_watch(box, model, loss_of):
    named = dict(model.named_parameters())
    while True:
        box.send(0, json.dumps({"do": "pull"}).encode())
        end, message = time.monotonic() + 0.45, None
        while message is None and time.monotonic() < end:
            message = box.recv(timeout_s=0.05)
        while message is not None and box.poll():
            message = box.recv(timeout_s=0) or message
        if message is None:
            continue
        said = json.loads(message.data)
        if said.get("stop"):
            return
        for name, p in named.items():
            p.data, p.grad = message.tensors[name], None

        def hook_of(name, clock):
            def hook(parameter):
                box.send(0, json.dumps({"do": "push", "clock": clock, "layer": name}).encode(), {name: parameter.grad})

            return hook

        handles = [p.register_post_accumulate_grad_hook(hook_of(name, said["clock"])) for name, p in named.items()]
        loss_of(model, said["clock"]).backward()
        for handle in handles:
            handle.remove()
