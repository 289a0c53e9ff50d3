"""Right accumulation, each built differently: none of these may lose a point."""

import itertools
import math

import numpy as np
import torch

from tests.labs.corpus import right

LARGEST, WINDOW, EPOCH = "accumulation.largest", "accumulation.window", "accumulation.epoch"
TOKENS, AMP = "accumulation.tokens", "accumulation.amp"


# -- 5.1 --


def by_bisection(step, limit):
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        try:
            step(middle)
            low = middle
        except torch.OutOfMemoryError:
            high = middle - 1
    return low


def by_doubling_and_bits(step, limit):
    """Doubles, then adds ever smaller powers of two."""

    def fits(rows):
        if rows > limit:
            return False
        try:
            step(rows)
        except torch.OutOfMemoryError:
            return False
        return True

    power = 1
    while fits(power):
        power *= 2
    found, part = power // 2, power // 4
    while part:
        if fits(found + part):
            found += part
        part //= 2
    return found


def by_recursion(step, limit, low=0):
    """Recursion outside the except block."""
    if low == limit:
        return low
    middle = (low + limit + 1) // 2
    failed = False
    try:
        step(middle)
    except torch.OutOfMemoryError:
        failed = True
    return by_recursion(step, middle - 1, low) if failed else by_recursion(step, limit, middle)


def by_cache_and_name(step, limit):
    """Names the exception, remembers what was tried, tries the answer once more."""
    known = {0: True, limit + 1: False}

    def fits(rows):
        if rows not in known:
            try:
                step(rows)
                known[rows] = True
            except torch.OutOfMemoryError as error:
                message = str(error)
                known[rows] = not message
        return known[rows]

    low, high = 0, limit + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    if low:
        step(low)
    return low


def in_numpy(step, limit):
    low, high = np.int64(0), np.int64(limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            step(int(middle))
        except torch.cuda.OutOfMemoryError:
            high = middle
        else:
            low = middle
    return low


class BySearch:
    """`bisect` of the library over a key that runs the step."""

    def __new__(cls, step, limit):
        import bisect

        def fails(rows):
            try:
                step(rows)
            except torch.OutOfMemoryError:
                return True
            return False

        return bisect.bisect_left(range(1, limit + 1), True, key=fails)


for name, search, pieces in [
    ("bisection from both ends, ceil", by_bisection, lambda batch, largest: math.ceil(batch / largest)),
    ("doubling, then powers of two; floor of the negative", by_doubling_and_bits, lambda batch, largest: -(-batch // largest)),
    ("recursion; rounded up by adding", by_recursion, lambda batch, largest: (batch + largest - 1) // largest),
    ("remembers, names the exception; divmod", by_cache_and_name, lambda b, n: divmod(b, n)[0] + (divmod(b, n)[1] > 0)),
    ("numpy numbers; counting", in_numpy, lambda batch, largest: len(range(0, batch, largest))),
    ("library's bisect; numpy", BySearch, lambda batch, largest: np.int64(np.ceil(batch / largest))),
    ("split of a tensor", by_bisection, lambda batch, largest: len(torch.empty(batch).split(largest))),
]:
    right(name, check=LARGEST)((search, pieces))


# -- 5.2 --


@right("loss divided before backward", check=WINDOW)
def divides_the_loss(model, micro_batches, optimizer, loss_fn):
    total = 0.0
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch) / len(micro_batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


@right("cleared first, set_to_none=False", check=WINDOW)
def clears_first(model, micro_batches, optimizer, loss_fn):
    optimizer.zero_grad(set_to_none=False)
    losses = []
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        (loss * (1 / len(micro_batches))).backward()
        losses.append(float(loss.detach()))
    optimizer.step()
    return sum(losses) / len(losses)


@right("gradients divided afterwards", check=WINDOW)
def divides_gradients(model, micro_batches, optimizer, loss_fn):
    total = torch.zeros(())
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        parameter.grad.div_(len(micro_batches))
    optimizer.step()
    model.zero_grad()
    return total / len(micro_batches)


@right("foreach, gradients divided afterwards, cleared by hand", check=WINDOW)
def by_foreach(model, micro_batches, optimizer, loss_fn):
    parameters, losses = list(model.parameters()), []
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        loss.backward()
        losses.append(loss.item())
        del loss
    torch._foreach_div_([p.grad for p in parameters], float(len(micro_batches)))
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    return np.mean(losses)


@right("torch.autograd.grad and a running sum", check=WINDOW)
def by_autograd_grad(model, micro_batches, optimizer, loss_fn):
    parameters, sums, total = list(model.parameters()), None, 0.0
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        grads = torch.autograd.grad(loss, parameters)
        total += loss.item() / len(micro_batches)
        if sums is None:
            sums = list(grads)
        else:
            torch._foreach_add_(sums, grads)
        del grads, loss
    for parameter, grad in zip(parameters, sums, strict=True):
        parameter.grad = grad / len(micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    return total


@right("gradient handed to backward", check=WINDOW)
def backward_with_a_weight(model, micro_batches, optimizer, loss_fn):
    weight, total = 1 / len(micro_batches), 0.0
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        loss.backward(torch.full_like(loss, weight))
        total += weight * loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.tensor(total)


@right("learning rate for the mean? no: gradients in double precision", check=WINDOW)
def in_double(model, micro_batches, optimizer, loss_fn):
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    total = 0.0
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        loss.backward()
        total += float(loss)
        for one, parameter in zip(sums, parameters, strict=True):
            one += parameter.grad
            parameter.grad = None
    for one, parameter in zip(sums, parameters, strict=True):
        parameter.grad = (one / len(micro_batches)).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return total / len(micro_batches)


@right("hooks that divide as gradients come", check=WINDOW)
def by_hooks(model, micro_batches, optimizer, loss_fn):
    handles = [p.register_hook(lambda grad: grad / len(micro_batches)) for p in model.parameters()]
    losses = []
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        loss.backward()
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses) / len(micro_batches)


@right("a helper per micro-batch, the last one's graph gone by return", check=WINDOW)
def by_helper(model, micro_batches, optimizer, loss_fn):
    def one(micro_batch):
        loss = loss_fn(model, micro_batch)
        torch.autograd.backward(loss / len(micro_batches))
        return loss.detach()

    mean = torch.stack([one(m) for m in micro_batches]).mean()
    optimizer.step()
    optimizer.zero_grad()
    return mean


@right("everything in a closure of the optimizer", check=WINDOW)
def by_closure(model, micro_batches, optimizer, loss_fn):
    def closure():
        optimizer.zero_grad()
        losses = [backward_of(loss_fn(model, m), len(micro_batches)) for m in micro_batches]
        return sum(losses) / len(losses)

    return optimizer.step(closure)


def backward_of(loss, count):
    (loss / count).backward()
    return loss.item()


# -- 5.3 --


@right("slices and a window's function", check=EPOCH)
def by_slices(model, micro_batches, optimizer, loss_fn, window, scheduler):
    losses = []
    for start in range(0, len(micro_batches), window):
        losses.append(divides_the_loss(model, micro_batches[start : start + window], optimizer, loss_fn))
        scheduler.step()
    return losses


@right("one loop, flush at the end", check=EPOCH)
def one_loop(model, micro_batches, optimizer, loss_fn, window, scheduler):
    n, losses, total = len(micro_batches), [], 0.0
    optimizer.zero_grad()
    for i, micro_batch in enumerate(micro_batches):
        size = window if i < n - n % window else n % window
        loss = loss_fn(model, micro_batch) / size
        loss.backward()
        total += loss.item()
        if (i + 1) % window == 0 or i + 1 == n:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
    return losses


@right("last window rescaled by K / r", check=EPOCH)
def rescales_the_last(model, micro_batches, optimizer, loss_fn, window, scheduler):
    losses, waiting = [], []
    for micro_batch in [*micro_batches, None]:
        if len(waiting) == window or (micro_batch is None and waiting):
            for parameter in model.parameters():
                parameter.grad *= window / len(waiting)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()
            losses.append(sum(waiting) / len(waiting))
            waiting = []
        if micro_batch is not None:
            loss = loss_fn(model, micro_batch)
            (loss / window).backward()
            waiting.append(loss.item())
    return losses


@right("iterators, gradients divided afterwards, a tensor of losses", check=EPOCH)
def by_iterators(model, micro_batches, optimizer, loss_fn, window, scheduler):
    supply, losses = iter(micro_batches), []
    while part := list(itertools.islice(supply, window)):
        losses.append(divides_gradients(model, part, optimizer, loss_fn))
        scheduler.step()
    return torch.stack(losses)


@right("edges of an array, numpy losses", check=EPOCH)
def by_edges(model, micro_batches, optimizer, loss_fn, window, scheduler):
    edges = [*range(0, len(micro_batches), window), len(micro_batches)]
    losses = np.zeros(len(edges) - 1)
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        losses[number] = clears_first(model, micro_batches[start:end], optimizer, loss_fn)
        scheduler.step()
    return losses


# -- 5.4 --


def counted(targets):
    return int((targets != -100).sum())


@right("loss times its share of the targets", check=TOKENS)
def by_share(model, micro_batches, optimizer, loss_fn):
    counts = [counted(targets) for _, targets in micro_batches]
    total = 0.0
    for micro_batch, count in zip(micro_batches, counts, strict=True):
        if count:
            loss = loss_fn(model, micro_batch) * count / sum(counts)
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


@right("sums, gradients divided by the total afterwards", check=TOKENS)
def sums_first(model, micro_batches, optimizer, loss_fn):
    optimizer.zero_grad()
    total, targets_seen = 0.0, 0
    for inputs, targets in micro_batches:
        count = counted(targets)
        if count == 0:
            continue
        loss = loss_fn(model, (inputs, targets)) * count
        loss.backward()
        total, targets_seen = total + loss.item(), targets_seen + count
    torch._foreach_div_([p.grad for p in model.parameters()], targets_seen)
    optimizer.step()
    return total / targets_seen


@right("torch.autograd.grad, weights in a tensor", check=TOKENS)
def grads_by_tensor_weights(model, micro_batches, optimizer, loss_fn):
    there = [m for m in micro_batches if (m[1] != -100).any()]
    counts = torch.tensor([counted(t) for _, t in there], dtype=torch.float64)
    weights, parameters = counts / counts.sum(), list(model.parameters())
    sums, losses = [torch.zeros_like(p) for p in parameters], torch.zeros(len(there))
    for number, micro_batch in enumerate(there):
        loss = loss_fn(model, micro_batch)
        for one, grad in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            one.add_(grad, alpha=float(weights[number]))
        losses[number] = loss.detach()
    for parameter, one in zip(parameters, sums, strict=True):
        parameter.grad = one
    optimizer.step()
    optimizer.zero_grad()
    return (losses * weights).sum().float()


@right("looks at the empty ones without a gradient", check=TOKENS)
def looks_at_all(model, micro_batches, optimizer, loss_fn):
    all_counts = sum(counted(t) for _, t in micro_batches)
    mean = 0.0
    for micro_batch in micro_batches:
        count = counted(micro_batch[1])
        if not count:
            with torch.no_grad():
                assert math.isnan(loss_fn(model, micro_batch))
            continue
        loss = loss_fn(model, micro_batch)
        loss.backward(torch.tensor(count / all_counts))
        mean += loss.item() * count / all_counts
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return mean


# -- 5.5 --


@right("one nested loop", check=AMP)
def nested(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    losses = []
    for start in range(0, len(micro_batches), window):
        part, total = micro_batches[start : start + window], 0.0
        for micro_batch in part:
            with torch.autocast(device, dtype=torch.float16):
                loss = loss_fn(model, micro_batch) / len(part)
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@right("a flat loop, own norm, finiteness looked at", check=AMP)
def flat_loop(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    losses, waiting, n = [], [], len(micro_batches)
    optimizer.zero_grad(set_to_none=False)
    for i, micro_batch in enumerate(micro_batches):
        size = min(window, n - i // window * window)
        with torch.amp.autocast(device_type=device, dtype=torch.float16):
            loss = loss_fn(model, micro_batch)
        scaler.scale(loss / size).backward()
        waiting.append(loss.item())
        if len(waiting) == size:
            scaler.unscale_(optimizer)
            grads = [p.grad for p in model.parameters()]
            norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
            if norm > max_norm:
                torch._foreach_mul_(grads, max_norm / norm)
            finite = bool(torch.isfinite(norm))
            scaler.step(optimizer)
            scaler.update()
            if finite:
                scheduler.step()
            optimizer.zero_grad(set_to_none=False)
            losses.append(sum(waiting) / size)
            waiting = []
    return losses


@right("gradients divided after unscaling", check=AMP)
def divides_later(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    losses = []
    for start in range(0, len(micro_batches), window):
        part = micro_batches[start : start + window]
        total = 0.0
        for micro_batch in part:
            with torch.autocast(device, torch.float16):
                loss = loss_fn(model, micro_batch)
            scaler.scale(loss).backward()
            total += loss.detach().float().item()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad.div_(len(part))
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=False)
        stepped = []
        handle = optimizer.register_step_post_hook(lambda *_, stepped=stepped: stepped.append(True))
        scaler.step(optimizer)
        handle.remove()
        scaler.update()
        for _ in stepped:
            scheduler.step()
        model.zero_grad()
        losses.append(total / len(part))
    return np.array(losses)


@right("skips by hand, the scaler told", check=AMP)
def by_hand(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    losses = []
    for start in range(0, len(micro_batches), window):
        part, total = micro_batches[start : start + window], 0.0
        for number in range(len(part)):
            with torch.autocast(device, torch.float16):
                loss = loss_fn(model, part[number]) / len(part)
            scaler.scale(loss).backward()
            total = total + float(loss)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if torch.isfinite(norm):
            optimizer.step()
            scheduler.step()
        scaler.update()
        optimizer.zero_grad()
        losses.append(torch.tensor(total))
    return losses


@right("clipped in scaled units, limit times the scale", check=AMP)
def clips_scaled(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    losses = []
    for start in range(0, len(micro_batches), window):
        part, total = micro_batches[start : start + window], 0.0
        for micro_batch in part:
            with torch.autocast(device, torch.float16):
                loss = loss_fn(model, micro_batch)
            scaler.scale(loss / len(part)).backward()
            total += loss.item() / len(part)
        before = scaler.get_scale()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm * before, norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            scheduler.step()
        losses.append(total)
    return losses


@right("each step moves the schedule, by a hook", check=EPOCH)
def schedule_in_a_hook(model, micro_batches, optimizer, loss_fn, window, scheduler):
    hook = optimizer.register_step_post_hook(lambda *_: scheduler.step())
    losses = []
    try:
        for start in range(0, len(micro_batches), window):
            part, total = micro_batches[start : start + window], 0.0
            for micro_batch in part:
                loss = loss_fn(model, micro_batch) / len(part)
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    finally:
        hook.remove()
    return losses


@right("the optimizer's hook tells whether it stepped", check=AMP)
def told_by_a_hook(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    made, losses = [], []
    hook = optimizer.register_step_post_hook(lambda *_: made.append(1))
    for start in range(0, len(micro_batches), window):
        part, total = micro_batches[start : start + window], 0.0
        optimizer.zero_grad()
        for micro_batch in part:
            with torch.autocast(device, torch.float16):
                loss = loss_fn(model, micro_batch)
            (scaler.scale(loss) / len(part)).backward()
            total += loss.item() / len(part)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.clear()
        scaler.step(optimizer)
        scaler.update()
        if made:
            scheduler.step()
        losses.append(total)
    optimizer.zero_grad()
    hook.remove()
    return losses
