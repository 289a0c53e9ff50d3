"""Wrong parameter servers, as people really write them (PSV-..: public reports) and as an unkind reviewer would."""

import copy
import json
import math

import torch

from tests.labs.corpus import wrong

STORE, SYNC, BOUNDED = "parameter_server.store", "parameter_server.synchronous", "parameter_server.bounded"
LAYERS, WORKER = "parameter_server.layers", "parameter_server.worker"
EVERYONE, TWICE, BACKUP, DEATHS = "rounds of everyone", "duplicates", "backup workers", "deaths and returns"
ONCE, ASYNC, BOUND, DELAY = "each push, at once", "asynchronous", "bound", "staleness"


def mark(names, table, make):
    """Register `make(flaw)` for each row (name, flaw, criterion, hint)."""
    for name, flaw, criterion, hint in table:
        wrong(name, check=names, criterion=criterion, hint=hint)(make(flaw))


# -- 8.1 --


def stores(flaw):
    class Store:
        def __init__(self, parameters, make_optimizer):
            keep = (lambda p: p.detach()) if flaw == "start" else (lambda p: p.detach().clone())
            self.parameters = {name: keep(p) for name, p in parameters.items()}
            if flaw == "graph":
                self.parameters = {name: p.requires_grad_() for name, p in self.parameters.items()}
            self.make_optimizer, self.version = make_optimizer, 0
            self.optimizer = make_optimizer(list(self.parameters.values()))

        def pull(self):
            if flaw == "graph":
                return self.version, {name: p.clone() for name, p in self.parameters.items()}
            if flaw == "constant":
                return 0, {name: torch.zeros_like(p) for name, p in self.parameters.items()}
            copy = (lambda p: p) if flaw == "pull" else (lambda p: p.detach().clone())
            return self.version, {name: copy(p) for name, p in self.parameters.items()}

        def step(self, gradients):
            for name, p in self.parameters.items():
                parts = [gradient[name] for gradient in gradients]
                if flaw == "sum":
                    p.grad = sum(parts)
                elif flaw == "first":
                    p.grad = parts[0].clone()
                elif flaw == "adds into the first":
                    for part in parts[1:]:
                        parts[0].add_(part)
                    p.grad = parts[0].div_(len(parts)).clone() if len(parts) > 1 else parts[0].mul_(1.0).clone()
                elif flaw == "workers":
                    p.grad = sum(parts) / 3
                elif flaw == "accumulated":
                    mean = torch.stack(parts).mean(0)
                    p.grad = mean if p.grad is None else p.grad + mean
                else:
                    p.grad = torch.stack(parts).mean(0)
            if flaw == "forgets":
                self.optimizer = self.make_optimizer(list(self.parameters.values()))
            self.optimizer.step()

        def apply(self, gradients):
            for part in [[one] for one in gradients] if flaw == "each" else [gradients]:
                self.step(part)
                self.version += flaw == "each"
            if flaw == "no version":
                return
            self.version += {"each": 0, "counts gradients": len(gradients) + 1}.get(flaw, 1)

    return Store


mark(STORE, [
    ("PSV-01 one step for each gradient", "each", "mean", "each-applied"),
    ("PSV-02 sum for mean", "sum", "mean", "scale-store"),
    ("the first of those that came", "first", "mean", "first-only"),
    ("PSV-05 pull returns the live tensors", "pull", "own memory", "aliased-pull"),
    ("steps on the tensors it was given", "start", "own memory", "aliased-start"),
    ("pulled tensors with a graph", "graph", "own memory", "graph"),
    ("PSV-14 a new optimizer for each step", "forgets", "one step", "optimizer-gone"),
    ("gradients pile up", "accumulated", "one step", "accumulated"),
    ("version never counted", "no version", "version", "version"),
    ("PSV-16 version counts gradients", "counts gradients", "version", "version"),
    ("zeros, always", "constant", "one step", "values"),
    ("PSV-02 divided by a fixed number of workers", "workers", "one step", "values"),
], stores)  # fmt: skip


# -- 8.2 --


def rounds(flaw):
    class SyncServer:
        def __init__(self, store, workers, need):
            self.store, self.need, self.workers = store, need, workers
            self.alive, self.waiting = set(range(workers)), set()
            self.arrived, self.seen, self.dropped = {}, set(), []
            self.doubled = []

        def clock(self, worker):
            return self.store.version + (flaw == "clock")

        def pull(self, worker):
            if flaw != "never alive again":
                self.alive.add(worker)
            if flaw == "return waits" and worker not in self.alive:
                self.waiting.add(worker)
                return []
            if worker not in self.arrived or flaw == "answers at once":
                return [worker]
            self.waiting.add(worker)
            return []

        def push(self, worker, clock, gradient):
            if flaw == "each push":
                self.store.apply([gradient])
                return self.wake()
            if flaw == "late is counted in":
                self.arrived[worker] = gradient
                return self.end()
            if (worker, clock) in self.seen and flaw not in ("counts pushes", "reports duplicates"):
                return []
            again = (worker, clock) in self.seen
            self.seen.add((worker, clock))
            if clock < self.store.version:
                if flaw == "late applied":
                    self.store.apply([gradient])
                elif flaw == "reports duplicates" or not again:
                    self.dropped += [] if flaw == "not reported" else [(worker, clock)]
                return []
            if again and flaw == "counts pushes":
                self.doubled.append(gradient)
            self.arrived[worker] = gradient
            return self.end()

        def death(self, worker):
            if flaw == "death ignored":
                return []
            self.alive.discard(worker)
            if flaw != "answers the dead":
                self.waiting.discard(worker)
            if flaw == "forgets what the dead pushed":
                self.arrived.pop(worker, None)
            return [] if flaw == "death ends no round" else self.end()

        def end(self):
            count = len(self.arrived) + len(self.doubled)
            need = self.workers if flaw == "waits for all" else self.need
            if flaw == "off by one":
                need = max(1, need - 1)
            enough = count >= need or self.alive <= self.arrived.keys()
            if not self.arrived or not enough:
                return []
            gradients = [*self.arrived.values(), *self.doubled]
            if flaw == "sums":
                gradients = [{name: sum(one[name] for one in gradients) for name in gradients[0]}]
            if flaw == "first need only":
                gradients = gradients[: max(1, self.need - 1)]
            self.store.apply(gradients)
            if flaw != "never forgets":
                self.arrived, self.doubled = {}, []
            return self.wake()

        def wake(self):
            if flaw == "wakes nobody":
                return []
            answered, self.waiting = sorted(self.waiting), set()
            return list(range(self.workers)) if flaw == "answers everyone" else answered

    return SyncServer


mark(SYNC, [
    ("PSV-01 a step for each push", "each push", EVERYONE, "each-push"),
    ("PSV-02 sums before it applies", "sums", EVERYONE, "scale"),
    ("PSV-08 nobody woken at the end of a round", "wakes nobody", EVERYONE, "not-woken"),
    ("answers who has nothing to do", "answers at once", EVERYONE, "answers-early"),
    ("ends the round one too early", "off by one", EVERYONE, "early"),
    ("the old round is not forgotten", "never forgets", EVERYONE, "waits"),
    ("answers who has not asked", "answers everyone", EVERYONE, "answers-early"),
    ("a clock one ahead", "clock", EVERYONE, "clock"),
    ("one gradient of the round left out", "first need only", EVERYONE, "missing"),
    ("PSV-11 counts pushes, not workers", "counts pushes", TWICE, "early"),
    ("a late duplicate enters the next round", "late is counted in", TWICE, "twice"),
    ("PSV-22 backup workers waited for", "waits for all", BACKUP, "never"),
    ("late gradients applied", "late applied", BACKUP, "late"),
    ("PSV-13 dropped without a word", "not reported", BACKUP, "dropped"),
    ("PSV-13 duplicates reported as dropped", "reports duplicates", BACKUP, "dropped"),
    ("a death changes nothing", "death ignored", DEATHS, "death-stuck"),
    ("a death ends no round", "death ends no round", DEATHS, "death-stuck"),
    ("answers the dead", "answers the dead", DEATHS, "answers-dead"),
    ("forgets what the dead had pushed", "forgets what the dead pushed", DEATHS, "answers-early"),
    ("who returns stays dead", "never alive again", DEATHS, "early"),
], rounds)  # fmt: skip


# -- 8.3 --


def layered(flaw):
    class Layers:
        def __init__(self, names):
            self.names, self.newest, self.parts, self.all = set(names), {}, {}, []

        def arrive(self, worker, life, clock, name, gradient):
            key = {"one for all": (), "by worker": worker, "by clock": (worker, clock)}.get(flaw, (worker, life, clock))
            if flaw == "layer at once":
                return {name: gradient}
            if flaw == "hoards":
                self.all.append(gradient)
            newest = self.newest.get(worker, (-1, -1))
            if (life, clock) < newest and flaw not in ("old ones too", "one for all", "by worker", "by clock"):
                return None
            if (life, clock) > newest:
                self.newest[worker] = life, clock
                if flaw not in ("hoards", "one for all", "by worker", "by clock", "old ones too"):
                    self.parts = {k: v for k, v in self.parts.items() if k[0] != worker}
            if flaw == "old ones too" and life < newest[0]:
                key = (worker, newest[0], newest[1])
            parts = self.parts.setdefault(key, {})
            if parts is None:
                return None
            count = parts.get("count", 0) + 1 if flaw == "counts" else 0
            parts[name] = gradient
            if flaw == "counts":
                parts["count"] = count
                if count < len(self.names):
                    return None
                self.parts[key] = {}
                return {k: v for k, v in parts.items() if k != "count"}
            if parts.keys() != self.names:
                return None
            whole = dict(parts)
            if flaw == "again":
                return whole
            self.parts[key] = {} if flaw in ("one for all", "by worker") else None
            return whole

    return Layers


class Silent:
    def __init__(self, names):
        pass

    def arrive(self, worker, life, clock, name, gradient):
        return None


mark(LAYERS, [
    ("PSV-04 each layer at once", "layer at once", "whole pushes", "half"),
    ("never whole", "one for nobody", "whole pushes", "never-whole"),
    ("counts layers", "counts", "several workers", "half"),
    ("one pile for all workers", "one for all", "several workers", "confused"),
    ("returned again for a duplicate", "again", "several workers", "again-whole"),
    ("PSV-04 lives mixed: by worker and clock", "by clock", "deaths in mid-push", "lives"),
    ("PSV-04 a late layer of the old life goes into the new push", "old ones too", "deaths in mid-push", "lives"),
    ("keeps all that ever came", "hoards", "memory", "hoards"),
], lambda flaw: layered(flaw) if flaw != "one for nobody" else Silent)  # fmt: skip



# -- 8.4 --


def words(**what):
    return json.dumps(what).encode()


def workers(flaw):
    def work(box, model, loss_of):
        names = {p: name for name, p in model.named_parameters()}
        clock, told = (-1 if flaw == "own clock" else None), False

        def send(p):
            sent = p if flaw == "sends the parameter" else torch.zeros_like(p) if flaw == "zeros" else p.grad
            box.send(0, words(do="push", clock=clock, layer="0" + names[p] if flaw == "names" else names[p]), {"gradient": sent})
            if flaw not in ("accumulates", "own steps", "hooks each time, gradients kept"):
                p.grad = None

        def hooks():
            for p in list(names)[flaw == "one left out" :]:
                p.register_post_accumulate_grad_hook(send)

        if flaw not in ("after backward", "one message", "hooks each time", "hooks each time, gradients kept"):
            hooks()
        if flaw == "computes first":
            clock = 0
            loss_of(model, 0).backward()
        while True:
            if not (flaw == "asks once" and told):
                box.send(0, words(do="pull") if flaw != "plain words" else b"pull")
                told = True
            message = box.recv() if flaw == "no deadline" else box.recv(timeout_s=0.1)
            while flaw not in ("first answer", "no deadline") and box.poll():
                message = box.recv(timeout_s=0.1)
            if message is None:
                if flaw == "gives up":
                    return
                continue
            told = False
            said = json.loads(message.data)
            if "stop" in said:
                if flaw == "talks on":
                    box.send(0, words(do="pull"))
                return
            clock = clock + 1 if flaw == "own clock" and clock is not None else said["clock"]
            if flaw != "never loads":
                with torch.no_grad():
                    for p, name in names.items():
                        p.copy_(message.tensors[name])
            if flaw == "own steps":
                with torch.no_grad():
                    for p in names:
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=0.1)
                        p.grad = None
            if flaw in ("hooks each time", "hooks each time, gradients kept"):
                model.zero_grad()
                hooks()
            loss_of(model, clock).backward()
            if flaw == "after backward":
                for p in names:
                    send(p)
            if flaw == "one message":
                box.send(0, words(do="push", clock=clock, layer="all"), {name: p.grad for p, name in names.items()})
                model.zero_grad()

    return work


mark(WORKER, [
    ("computes before it has pulled", "computes first", "gradients", "pull-first"),
    ("never loads what it pulled", "never loads", "gradients", "not-loaded"),
    ("PSV-23 steps of its own in between", "own steps", "gradients", "own-steps"),
    ("gradients pile up", "accumulates", "gradients", "accumulates"),
    ("sends the parameter", "sends the parameter", "gradients", "sends-what"),
    ("zeros for gradients", "zeros", "gradients", "sends-what"),
    ("all layers in one message", "one message", "gradients", "message"),
    ("words of its own", "plain words", "gradients", "message"),
    ("other names", "names", "gradients", "message"),
    ("one layer never sent", "one left out", "gradients", "lost-layer"),
    ("hooks again for each batch", "hooks each time, gradients kept", "gradients", "twice-sent"),
    ("hooks again for each batch, on a gradient that is gone", "hooks each time", "runs", "twice-sent"),
    ("PSV-10 counts its batches itself", "own clock", "the server's clock", "wrong-clock"),
    ("sends when backward is over", "after backward", "layer by layer", "after-backward"),
    ("PSV-19 no deadline", "no deadline", "lost and old answers", "deadline"),
    ("asks once", "asks once", "lost and old answers", "ask-again"),
    ("gives up at the first silence", "gives up", "lost and old answers", "ask-again"),
    ("first answer, not the last", "first answer", "lost and old answers", "old-answer"),
    ("PSV-20 talks on after stop", "talks on", "stop", "never-stops"),
], workers)  # fmt: skip


@wrong("PSV-20 never looks for stop", check=WORKER, criterion="runs", hint=None)
def never_looks(box, model, loss_of):
    names = {p: name for name, p in model.named_parameters()}
    clock = 0

    def send(p):
        box.send(0, words(do="push", clock=clock, layer=names[p]), {"g": p.grad})
        p.grad = None

    for p in names:
        p.register_post_accumulate_grad_hook(send)
    while True:
        box.send(0, words(do="pull"))
        message = box.recv(timeout_s=0.1)
        if message is not None:
            clock = json.loads(message.data)["clock"]
            with torch.no_grad():
                for p, name in names.items():
                    p.copy_(message.tensors[name])
            loss_of(model, clock).backward()


# -- 8.5 --


def bounded(flaw):
    class BoundedServer:
        def __init__(self, store, workers, bound):
            self.store, self.bound = store, bound
            if flaw == "off by one":
                self.bound -= 1
            elif flaw == "one more":
                self.bound += 1
            elif flaw == "always waits":
                self.bound = min(bound, 0)
            elif flaw == "no bound":
                self.bound = math.inf
            self.clocks, self.alive = dict.fromkeys(range(workers), 0), set(range(workers))
            self.waiting, self.read, self.staleness, self.round = set(), {}, [], []

        def clock(self, worker):
            return self.store.version if flaw == "clock is the version" else self.clocks[worker]

        def slowest(self):
            who = self.clocks if flaw == "minimum of the dead too" else self.alive
            numbers = [self.clocks[one] for one in who]
            if flaw == "mean":
                return sum(numbers) / len(numbers)
            if flaw == "no default":
                return min(numbers)
            return min(numbers, default=0)

        def pull(self, worker):
            if worker not in self.alive:
                if flaw == "return at zero":
                    self.clocks[worker] = 0
                elif flaw == "return in the future":
                    self.clocks[worker] = max(self.clocks.values()) + 1
                elif flaw == "minimum, even if its own is larger":
                    self.clocks[worker] = self.slowest()
                elif flaw != "return at its own":
                    self.clocks[worker] = max(self.clocks[worker], self.slowest())
                if flaw != "stays dead":
                    self.alive.add(worker)
            self.waiting.add(worker)
            if flaw == "stays dead" and worker not in self.alive:
                self.waiting.discard(worker)
            if flaw == "looks at who asks only":
                ready = [worker] if self.clocks[worker] - self.slowest() <= self.bound else []
                self.waiting -= set(ready)
                self.read.update(dict.fromkeys(ready, self.store.version))
                return ready
            return self.answer()

        def push(self, worker, clock, gradient):
            if flaw == "applies duplicates" or (flaw == "dedupes on the last only" and clock < self.clocks[worker] - 1):
                pass
            elif clock != self.clocks[worker]:
                return []
            if flaw == "sync path reused":
                self.round.append(gradient)
                self.clocks[worker] += 1
                if len(self.round) < len(self.alive):
                    return []
                self.staleness += [0] * len(self.round)
                self.store.apply(self.round)
                self.round = []
                return self.answer()
            delay = self.store.version - self.read.get(worker, self.store.version)
            self.staleness += {"none": [], "zero": [0], "clock gap": [clock - self.slowest()], "after": [delay + 1]}.get(flaw, [delay])
            self.store.apply([gradient])
            self.clocks[worker] += 1
            return [] if flaw in ("wakes nobody", "looks at who asks only") else self.answer()

        def death(self, worker):
            if flaw == "death ignored":
                return []
            self.alive.discard(worker)
            if flaw != "answers the dead":
                self.waiting.discard(worker)
            return [] if flaw == "death wakes nobody" else self.answer()

        def answer(self):
            ready = [one for one in sorted(self.waiting) if self.clocks[one] - self.slowest() <= self.bound]
            self.waiting.difference_update(ready)
            self.read.update(dict.fromkeys(ready, self.store.version))
            return ready

    return BoundedServer


mark(BOUNDED, [
    ("PSV-22 the synchronous path reused", "sync path reused", ONCE, "once-lost"),
    ("PSV-22 a straggler makes all wait", "always waits", ONCE, "waits"),
    ("clock told is the version", "clock is the version", ASYNC, "clock"),
    ("PSV-11 applies what comes again", "applies duplicates", TWICE, "twice"),
    ("PSV-11 remembers the last push only", "dedupes on the last only", TWICE, "twice"),
    ("PSV-07 one too strict", "off by one", BOUND, "bound-off"),
    ("PSV-07 one too far", "one more", BOUND, "too-far"),
    ("no bound at all", "no bound", BOUND, "too-far"),
    ("ahead of the mean, not of the slowest", "mean", BOUND, "too-far"),
    ("PSV-08 a push wakes nobody", "wakes nobody", BOUND, "not-woken"),
    ("PSV-08 only who asks is looked at", "looks at who asks only", BOUND, "not-woken"),
    ("PSV-10 returns at clock 0", "return at zero", DEATHS, "return-clock"),
    ("PSV-10 returns at its own old clock", "return at its own", DEATHS, "return-clock"),
    ("PSV-10 returns in the future", "return in the future", DEATHS, "return-clock"),
    ("returns behind its own pushes", "minimum, even if its own is larger", DEATHS, "return-clock"),
    ("the dead hold up the others", "minimum of the dead too", DEATHS, "death-stuck"),
    ("a death changes nothing", "death ignored", DEATHS, "death-stuck"),
    ("a death wakes nobody", "death wakes nobody", DEATHS, "death-stuck"),
    ("answers the dead", "answers the dead", DEATHS, "answers-dead"),
    ("who was dead is not answered", "stays dead", DEATHS, "return"),
    ("nobody alive crashes it", "no default", "runs", "death-stuck"),
    ("staleness not kept", "none", DELAY, "staleness-missing"),
    ("staleness always 0", "zero", DELAY, "staleness"),
    ("PSV-17 staleness is the clock gap", "clock gap", DELAY, "staleness"),
    ("PSV-17 staleness counts its own step", "after", DELAY, "staleness"),
], bounded)  # fmt: skip


# -- forged --


class AnswersNobody:
    def __init__(self, store, workers, number):
        self.dropped, self.staleness = [], []

    def clock(self, worker):
        return 0

    def pull(self, worker):
        return []

    push = lambda self, worker, clock, gradient: []  # noqa: E731
    death = pull


wrong("does nothing", check=SYNC, criterion=EVERYONE, hint="waits")(AnswersNobody)
wrong("does nothing", check=BOUNDED, criterion=ONCE, hint="waits")(type("DoesNothing", (AnswersNobody,), {}))


@wrong("patches the store's own count", check=SYNC, criterion=EVERYONE, hint="waits")
class Forged(AnswersNobody):
    def __init__(self, store, workers, number):
        super().__init__(store, workers, number)
        store.version = 10**6
        store.applied += [torch.ones(workers * 10)] * 5


# -- by one who had read the lab's text alone --


@wrong("PSV-05 one snapshot for all who pull the same version", check=STORE, criterion="own memory", hint="aliased-pull")
class SharedSnapshot:
    def __init__(self, parameters, make_optimizer):
        self.p = {name: value.detach().clone() for name, value in parameters.items()}
        self.optimizer, self.version = make_optimizer(list(self.p.values())), 0
        self.snapshot = {name: value.clone() for name, value in self.p.items()}

    def pull(self):
        return self.version, self.snapshot

    def apply(self, gradients):
        for name, p in self.p.items():
            p.grad = sum(one[name] for one in gradients) / len(gradients)
        self.optimizer.step()
        self.version += 1
        self.snapshot = {name: value.clone() for name, value in self.p.items()}


@wrong("keeps the gradients and takes the step at the next pull", check=STORE, criterion="one step", hint="kept-gradient")
class Lazy(SharedSnapshot):
    waiting = None

    def pull(self):
        if self.waiting:
            for name, p in self.p.items():
                p.grad = sum(one[name] for one in self.waiting) / len(self.waiting)
            self.optimizer.step()
            self.waiting = None
        return self.version, {name: value.clone() for name, value in self.p.items()}

    def apply(self, gradients):
        self.waiting, self.version = gradients, self.version + 1


@wrong("the running mean of all that ever came", check=STORE, criterion="one step", hint="values")
class RunningMean(SharedSnapshot):
    seen = 0

    def apply(self, gradients):
        self.seen += len(gradients)
        for name, p in self.p.items():
            total = sum(one[name] for one in gradients)
            p.grad = total / self.seen if p.grad is None else p.grad + (total - len(gradients) * p.grad) / self.seen
        self.optimizer.step()
        self.version += 1
        self.snapshot = {name: value.clone() for name, value in self.p.items()}

    def pull(self):
        return self.version, {name: value.clone() for name, value in self.p.items()}


def strange_rounds(flaw):
    class SyncServer(rounds("")):
        def push(self, worker, clock, gradient):
            if flaw == "a push is a sign of life":
                self.alive.add(worker)
            if flaw == "a push asks, too":
                answered = super().push(worker, clock, gradient)
                self.waiting |= {worker} & self.arrived.keys()
                return answered
            if flaw == "the late one goes into this round":
                clock = max(clock, self.store.version)
            return super().push(worker, clock, gradient)

        def death(self, worker):
            if flaw == "dies only once":
                self.alive.remove(worker)
                self.waiting.discard(worker)
                return self.end()
            if flaw == "needs fewer for ever":
                self.need = min(self.need, len(self.alive - {worker}))
            return super().death(worker)

        def end(self):
            if flaw == "as many as are alive":
                if self.arrived and len(self.arrived) >= min(self.need, len(self.alive)):
                    self.store.apply(list(self.arrived.values()))
                    self.arrived = {}
                    return self.wake()
                return []
            return super().end()

    return SyncServer


mark(SYNC, [
    ("a late push takes a dead worker for alive", "a push is a sign of life", DEATHS, "death-stuck"),
    ("who pushes is answered without asking", "a push asks, too", EVERYONE, "answers-early"),
    ("late ones counted for the round that is on", "the late one goes into this round", TWICE, "twice"),
    ("a second word of the same death crashes", "dies only once", "runs", "news-twice"),
    ("needs fewer for ever after a death", "needs fewer for ever", DEATHS, "early"),
    ("counts as many as are alive, whoever they are", "as many as are alive", DEATHS, "early"),
], strange_rounds)  # fmt: skip


def strange_layers(flaw):
    class Layers:
        def __init__(self, names):
            self.names, self.at, self.parts = list(names), {}, {}

        def arrive(self, worker, life, clock, name, gradient):
            key = clock if flaw == "the clock alone" else (life, clock)
            if self.at.get(worker) != key:  # also back to an older one
                self.at[worker], self.parts[worker] = key, {}
            if self.parts[worker] is None:
                return None
            if flaw == "the last name ends it":
                self.parts[worker][name] = gradient
                if name != self.names[-1]:
                    return None
            else:
                self.parts[worker][name] = gradient
                if len(self.parts[worker]) < len(self.names):
                    return None
            whole, self.parts[worker] = self.parts[worker], None
            return whole

    return Layers


mark(LAYERS, [
    ("whole when the last name has come", "the last name ends it", "whole pushes", "half"),
    ("an old layer begins anew", "any change", "several workers", "old-layer"),
    ("by clock, whichever life", "the clock alone", "several workers", "old-layer"),
], strange_layers)  # fmt: skip


def strange_workers(flaw):
    def work(box, model, loss_of):
        clock, speed = None, {}

        def send(p, name, clock):
            if flaw == "momentum":
                speed[name] = p.grad = p.grad + 0.5 * speed.get(name, 0.0)
            if flaw == "clipped":
                p.grad.clamp_(-0.01, 0.01)
            box.send(0, words(do="push", clock=clock, layer=name), {"gradient": p.grad})
            p.grad = None

        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name, frozen=clock: send(p, name, frozen if flaw == "the clock when the hook was made" else clock)
            )
        silence = 0
        while True:
            if silence == 0 or flaw != "asks after a minute" or silence > 300:
                box.send(0, words(do="pull"))
                silence = 0
            message = box.recv(timeout_s=0.2)
            while box.poll():
                message = box.recv(timeout_s=0.2)
            if message is None:
                silence += 1
                continue
            silence = 0
            said = json.loads(message.data)
            if said.get("stop"):
                return
            if flaw == "never a batch twice" and said["clock"] == clock:
                continue
            clock = said["clock"]
            tensors = {name: value for name, value in message.tensors.items() if flaw != "weights only" or "weight" in name}
            model.load_state_dict(tensors, strict=False)
            loss_of(model, clock).backward()

    return work


mark(WORKER, [
    ("PSV-14 momentum at the worker as well", "momentum", "gradients", "velocity"),
    ("clipped at home", "clipped", "gradients", "sends-what"),
    ("the clock of the moment when the hook was made", "the clock when the hook was made", "gradients", "wrong-clock"),
    ("loads the weights and not the biases", "weights only", "gradients", "not-loaded"),
    ("PSV-11 never computes a batch twice", "never a batch twice", "lost and old answers", "named-again"),
    ("asks again after a minute", "asks after a minute", "lost and old answers", "ask-again"),
], strange_workers)  # fmt: skip


def strange_bounds(flaw):
    class BoundedServer(bounded("")):
        def __init__(self, store, workers, bound):
            super().__init__(store, workers, bound)
            self.asked_at, self.begun = {}, set()

        def slowest(self):
            if flaw == "who has not begun does not count":
                return min((self.clocks[one] for one in self.alive & self.begun), default=0)
            return super().slowest()

        def pull(self, worker):
            self.begun.add(worker)
            self.asked_at[worker] = self.store.version
            return super().pull(worker)

        def push(self, worker, clock, gradient):
            if flaw == "a push is a sign of life":
                self.alive.add(worker)
            return super().push(worker, clock, gradient)

        def answer(self):
            ready = super().answer()
            if flaw == "version when asked":
                self.read.update({worker: self.asked_at[worker] for worker in ready})
            return ready

    return BoundedServer


mark(BOUNDED, [
    ("who has not begun does not count", "who has not begun does not count", BOUND, "too-far"),
    ("a late push takes a dead worker for alive", "a push is a sign of life", DEATHS, "return-clock"),
    ("PSV-17 the version when it asked", "version when asked", DELAY, "staleness"),
], strange_bounds)  # fmt: skip


@wrong("PSV-17 only the first answer of a clock counts", check=BOUNDED, criterion=DELAY, hint="staleness")
class FirstAnswer(bounded("")):
    def answer(self):
        before = dict(self.read)
        ready = super().answer()
        self.told = getattr(self, "told", {})
        for worker in ready:
            if self.told.get(worker) == self.clocks[worker]:
                self.read[worker] = before[worker]
            self.told[worker] = self.clocks[worker]
        return ready


# -- what passes until a Parameter, a second death or a longer silence comes --


@wrong("clones that still hang on the model's Parameters", check=STORE, criterion="runs", hint="non-leaf")
class NotDetached(stores("")):
    def __init__(self, parameters, make_optimizer):
        self.parameters = {name: p.clone() for name, p in parameters.items()}
        self.optimizer, self.version = make_optimizer(list(self.parameters.values())), 0


@wrong("deep copies, which require gradients as what they were made of", check=STORE, criterion="own memory", hint="graph")
class DeepCopies(stores("")):
    def __init__(self, parameters, make_optimizer):
        self.parameters = copy.deepcopy(dict(parameters))
        self.optimizer, self.version = make_optimizer(list(self.parameters.values())), 0

    def pull(self):
        return self.version, copy.deepcopy(self.parameters)


@wrong("a dead worker's late gradient is not noted", check=SYNC, criterion=BACKUP, hint="dropped")
class NotNotedWhenDead(rounds("")):
    def push(self, worker, clock, gradient):
        if clock < self.store.version and worker not in self.alive:
            return []
        return super().push(worker, clock, gradient)


@wrong("a death empties the memory of what has come", check=SYNC, criterion=BACKUP, hint="dropped")
class ForgetsTheDead(rounds("")):
    def death(self, worker):
        self.seen = {key for key in self.seen if key[0] != worker}
        return super().death(worker)


@wrong("compares (clock, life)", check=LAYERS, criterion="deaths in mid-push", hint="old-life")
class ClockFirst(layered("")):
    def arrive(self, worker, life, clock, name, gradient):
        return super().arrive(worker, clock, life, name, gradient)


@wrong("forgets a push that is done", check=LAYERS, criterion="several workers", hint="again-whole")
class ForgetsWhatIsDone(layered("")):
    def arrive(self, worker, life, clock, name, gradient):
        whole = super().arrive(worker, life, clock, name, gradient)
        if whole is not None:
            del self.newest[worker]
            self.parts = {key: parts for key, parts in self.parts.items() if key[0] != worker}
        return whole


@wrong("a second death of the same worker is an error", check=BOUNDED, criterion="runs", hint="news-twice")
class DiesOnce(bounded("")):
    def death(self, worker):
        self.alive.remove(worker)
        return super().death(worker)


@wrong("died while it waited, and is answered when it comes back by another's push", check=BOUNDED, criterion=DEATHS, hint="answers-dead")
class WaitsBeyondDeath(bounded("")):
    def death(self, worker):
        waited = worker in self.waiting
        ready = super().death(worker)
        if waited:
            self.waiting.add(worker)
        return ready


def asking(patience=None, wait_s=0.4, returns=False):
    def work(box, model, loss_of):
        named, clock, silences = dict(model.named_parameters()), 0, 0

        def hook_of(name):
            def hook(p):
                sent = box.send(0, words(do="push", clock=clock, layer=name), {name: p.grad})
                return sent if returns else None

            return hook

        for name, p in named.items():
            p.register_post_accumulate_grad_hook(hook_of(name))
        while patience is None or silences < patience:
            box.send(0, words(do="pull"))
            message = box.recv(timeout_s=wait_s)
            while box.poll():
                message = box.recv(timeout_s=wait_s)
            if message is None:
                silences += 1
                continue
            silences, said = 0, json.loads(message.data)
            if said.get("stop"):
                return
            clock = said["clock"]
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(message.tensors[name])
                    p.grad = None
            loss_of(model, clock).backward()

    return work


wrong("gives up after five silences", check=WORKER, criterion="lost and old answers", hint="ask-again")(asking(patience=5))
wrong("waits for two seconds", check=WORKER, criterion="lost and old answers", hint="half-second")(asking(wait_s=2.0))
wrong("a hook that returns what send returns", check=WORKER, criterion="runs", hint="returns")(asking(returns=True))
