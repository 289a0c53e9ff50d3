"""Wrong accumulation, as people really write it (ACC-.., AMP-..: public reports) and as an unkind reviewer would."""

import math

import torch

from tests.labs.corpus import wrong

LARGEST, WINDOW, EPOCH = "accumulation.largest", "accumulation.window", "accumulation.epoch"
TOKENS, AMP = "accumulation.tokens", "accumulation.amp"


# -- 5.1 --


def pieces(batch, largest):
    return math.ceil(batch / largest)


def fits(step, rows):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        return False
    return True


def bisect(step, limit, fits=fits, start=0):
    low, high = start, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(step, middle) else (low, middle)
    return low


KEPT: list = []


def keeps_the_error(step, rows):
    try:
        step(rows)
    except torch.OutOfMemoryError as error:
        KEPT.append(error)
        return False
    return True


def catches_runtime_errors(step, rows):
    try:
        step(rows)
    except RuntimeError:
        return False
    return True


def believes_what_returns(step, rows):
    return step(rows) is not False


def upwards(step, limit):
    rows = 0
    while rows < limit and fits(step, rows + 1):
        rows += 1
    return rows


def downwards(step, limit):
    while limit and not fits(step, limit):
        limit -= 1
    return limit


def powers_of_two(step, limit):
    rows = 1
    while 2 * rows <= limit and fits(step, 2 * rows):
        rows *= 2
    return rows if fits(step, rows) else 0


def halves_only(step, limit):
    while limit and not fits(step, limit):
        limit //= 2
    return limit


def first_that_fails(step, limit):
    return bisect(step, limit) + 1


def never_the_limit(step, limit):
    return bisect(step, limit - 1)


def never_nothing(step, limit):
    return max(1, bisect(step, limit))


def beyond_the_limit(step, limit):
    high = 1
    while fits(step, high):
        high *= 2
        if high > 2 * limit:
            break
    return min(limit, bisect(step, high))


def tries_nothing_at_first(step, limit):
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if middle == low:
            return high if fits(step, high) else low
        low, high = (middle, high) if fits(step, middle) else (low, middle)
    return low


def starts_at_zero(step, limit):
    return bisect(step, limit, start=-1)


def recursion_in_except(step, limit):
    def between(low, high):
        if high - low <= 1:
            return low
        middle = (low + high) // 2
        try:
            step(middle)
        except torch.OutOfMemoryError:
            return between(low, middle)  # still inside the block: the exception is alive
        return between(middle, high)

    return between(0, limit + 1)


def keeps_what_returns(step, limit):
    low, high, kept = 0, limit + 1, None
    while high - low > 1:
        middle, room = (low + high) // 2, True
        try:
            kept = step(middle)
        except torch.OutOfMemoryError:
            room = False
        low, high = (middle, high) if room else (low, middle)
    return low if kept is not low else 0


def no_catch(step, limit):
    return bisect(step, limit, fits=lambda step, rows: step(rows) is None)


for name, search, criterion, hint in [
    ("do nothing", lambda step, limit: None, "largest that fits", "largest"),
    ("constant", lambda step, limit: 8, "largest that fits", "largest-zero"),
    ("the limit", lambda step, limit: limit, "largest that fits", "largest-zero"),
    ("plain: one after the other, upwards", upwards, "trials", "trials"),
    ("one after the other, downwards", downwards, "trials", "trials"),
    ("doubling only", powers_of_two, "largest that fits", "power"),
    ("halving only", halves_only, "largest that fits", "largest"),
    ("off by one: the first that fails", first_that_fails, "largest that fits", "largest-zero"),
    ("the limit is never tried", never_the_limit, "largest that fits", "largest-zero"),
    ("never less than one", never_nothing, "largest that fits", "largest-zero"),
    ("tries more than the limit", beyond_the_limit, "trials", "range"),
    ("tries no rows at all", starts_at_zero, "trials", "range"),
    ("keeps the exception", lambda step, limit: bisect(step, limit, keeps_the_error), "nothing left behind", "held"),
    ("goes on inside the except block", recursion_in_except, "nothing left behind", "held"),
    ("keeps what a step returned", keeps_what_returns, "nothing left behind", "held-result"),
    ("every RuntimeError means no room", lambda step, limit: bisect(step, limit, catches_runtime_errors), "other errors", "swallowed"),
    ("nothing is caught", no_catch, "runs", "not-caught"),
    ("asks what step returns", lambda step, limit: bisect(step, limit, believes_what_returns), "runs", "not-caught"),
]:
    wrong(name, check=LARGEST, criterion=criterion, hint=hint)((search, pieces))

for name, count, hint in [
    ("rounded down", lambda batch, largest: batch // largest, "pieces"),
    ("a fraction", lambda batch, largest: batch / largest, "pieces-type"),
    ("one more than needed", lambda batch, largest: batch // largest + 1, "pieces"),
    ("only where it divides", lambda n, most: next(k for k in range(1, n + 1) if n % k == 0 and n // k <= most), "pieces"),
]:
    wrong(name, check=LARGEST, criterion="pieces", hint=hint)((bisect, count))


# -- 5.2 --


def windowed(*flaws):
    """A right `accumulate` but for the flaws named."""

    def accumulate(model, micro_batches, optimizer, loss_fn):
        count, total, kept = len(micro_batches), 0.0, []
        rate = optimizer.param_groups[0]["lr"]
        if "zero first" in flaws:
            optimizer.zero_grad()
        for number, micro_batch in enumerate(micro_batches):
            if "zero inside" in flaws:
                optimizer.zero_grad()
            if "restart" in flaws and number == count - 1 and count > 1:
                optimizer.zero_grad()
            loss = loss_fn(model, micro_batch)
            if "extra forward" in flaws:
                loss_fn(model, micro_batch)
            if "extra look" in flaws:
                with torch.no_grad():
                    loss_fn(model, micro_batch)
            shown = loss.detach().item()
            if "keeps losses" in flaws:
                kept.append(loss)
                total += shown / count
                continue
            divided = loss if "sum" in flaws else loss / count
            if "twice" in flaws:
                divided = divided / count
            if "logged only" in flaws:
                divided = loss
                shown = shown / count * count
            divided.backward(retain_graph=bool({"leaks", "double", "retains"} & set(flaws)))
            if "double" in flaws:
                divided.backward()
            if "leaks" in flaws:
                kept.append(divided)
            if "keeps gradients" in flaws:
                kept.append([p.grad.clone() for p in model.parameters()])
            total = total + (loss / count if "graph" in flaws else shown if "sum" in flaws or "sum loss" in flaws else shown / count)
            if "last loss" in flaws:
                total = shown
            if "every" in flaws:
                optimizer.param_groups[0]["lr"] = rate / count
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = rate
            if "off by one" in flaws and number % count == 0:
                optimizer.step()
                optimizer.zero_grad()
        if "keeps losses" in flaws:
            (sum(kept) / count).backward()
        if "scaled rate" in flaws:
            optimizer.param_groups[0]["lr"] = rate * count
        if "every" not in flaws and "off by one" not in flaws:
            if "zero before step" in flaws:
                optimizer.zero_grad()
            if "no step" not in flaws:
                optimizer.step()
            if "two steps" in flaws:
                optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        if "never zero" not in flaws and "zero first" not in flaws:
            optimizer.zero_grad()
        if "no return" not in flaws:
            return [total] * count if "list" in flaws else total

    return accumulate


def joins_them(model, micro_batches, optimizer, loss_fn):
    if isinstance(micro_batches[0][0], torch.Tensor) and micro_batches[0][0].dim() == 2:
        micro_batches = [tuple(torch.cat(parts) for parts in zip(*micro_batches, strict=True))]
    return windowed()(model, micro_batches, optimizer, loss_fn)


def first_loss_only(model, micro_batches, optimizer, loss_fn):
    return windowed()(model, micro_batches[:1], optimizer, loss_fn)


def one_ahead(model, micro_batches, optimizer, loss_fn):
    waiting = [loss_fn(model, micro_batch) / len(micro_batches) for micro_batch in micro_batches[: len(micro_batches) // 2]]
    for micro_batch in micro_batches[len(waiting) :]:
        (loss_fn(model, micro_batch) / len(micro_batches)).backward()
    total = sum(loss.item() for loss in waiting)
    for loss in waiting:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total


def averages_parameters(model, micro_batches, optimizer, loss_fn):
    """One step per micro-batch from the same start, then the mean of the parameters."""
    start = [p.detach().clone() for p in model.parameters()]
    ends, total = [torch.zeros_like(p) for p in start], 0.0
    for micro_batch in micro_batches:
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        loss = loss_fn(model, micro_batch)
        loss.backward()
        total += loss.item() / len(micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        for end, p in zip(ends, model.parameters(), strict=True):
            end += p.detach() / len(micro_batches)
    with torch.no_grad():
        for p, end in zip(model.parameters(), ends, strict=True):
            p.copy_(end)
    return total


def by_hand(model, micro_batches, optimizer, loss_fn):
    """Moves the parameters itself, without the optimizer and its momentum."""
    total = 0.0
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch) / len(micro_batches)
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for p in model.parameters():
            p -= optimizer.param_groups[0]["lr"] * p.grad
            p.grad = None
    return total


for name, flaws, criterion, hint in [
    ("ACC-01 no division", ["sum"], "gradient", "sum"),
    ("ACC-02 divided twice", ["twice"], "gradient", "twice"),
    ("ACC-07 zero_grad inside the loop", ["zero inside"], "gradient", "only-last"),
    ("ACC-08 zero_grad between backward and step", ["zero before step"], "gradient", "empty-step"),
    ("ACC-08 never zero_grad", ["never zero"], "gradient", "stale"),
    ("ACC-11 steps after the first micro-batch", ["off by one"], "gradient", "boundary"),
    ("ACC-16 plain: one backward for all losses", ["keeps losses"], "one graph at a time", "graphs"),
    ("ACC-20 only the returned value is divided", ["logged only"], "gradient", "only-logged"),
    ("ACC-22 a small step for each micro-batch", ["every"], "gradient", "every"),
    ("ACC-23 learning rate times K", ["scaled rate"], "gradient", "rate"),
    ("zero_grad before the last micro-batch", ["restart"], "gradient", "only-last"),
    ("no step", ["no step"], "gradient", "no-step"),
    ("two steps", ["two steps"], "gradient", "many-steps"),
    ("backward twice", ["double"], "gradient", "scale"),
    ("each forward twice, both with a graph", ["extra forward"], "one graph at a time", "graphs"),
    ("each forward twice", ["extra look"], "each piece once", "again"),
    ("graphs kept in a list", ["leaks"], "one graph at a time", "kept"),
    ("retain_graph=True: the last graph stays for the next forward", ["retains"], "one graph at a time", "kept"),
    ("gradients kept in a list", ["keeps gradients"], "one graph at a time", "kept"),
    ("returns nothing", ["no return"], "loss", "loss-returned"),
    ("returns a list", ["list"], "loss", "loss-returned"),
    ("returns a loss with its graph", ["graph"], "loss", "loss-graph"),
    ("returns the last micro-batch's loss", ["last loss"], "loss", "loss-value"),
    ("returns the sum of losses", ["sum loss"], "loss", "loss-value"),
]:
    wrong(name, check=WINDOW, criterion=criterion, hint=hint)(windowed(*flaws))

for name, answer, criterion, hint in [
    ("do nothing", lambda model, micro_batches, optimizer, loss_fn: 0.0, "gradient", "no-step"),
    ("joins the micro-batches again", joins_them, "one graph at a time", "joined"),
    ("first micro-batch only", first_loss_only, "gradient", "boundary"),
    ("half of the graphs wait", one_ahead, "one graph at a time", "graphs"),
    ("averages parameters", averages_parameters, "gradient", "every"),
    ("updates by hand", by_hand, "gradient", "no-step"),
]:
    wrong(name, check=WINDOW, criterion=criterion, hint=hint)(answer)


# -- 5.3 --


def epoch_with(*flaws):
    """The loop of an epoch over micro-batches, with flaws."""

    def train_epoch(model, micro_batches, optimizer, loss_fn, window, scheduler):
        count, losses, total, inside = len(micro_batches), [], 0.0, 0
        if "zero at start" in flaws:
            optimizer.zero_grad()
        for i, micro_batch in enumerate(micro_batches):
            start = i - i % window
            size = min(window, count - start)
            divisor = window if "by window" in flaws else count if "by count" in flaws else 1 if "sum" in flaws else size
            loss = loss_fn(model, micro_batch) / divisor
            loss.backward()
            total, inside = total + loss.item(), inside + 1
            if "schedule inside" in flaws:
                scheduler.step()
            boundary = i % window == 0 if "off by one" in flaws else (i + 1) % window == 0
            last = i + 1 == count and "no flush" not in flaws
            if boundary or last:
                if "schedule first" in flaws:
                    scheduler.step()
                optimizer.step()
                if not ("keeps last" in flaws and last and not boundary):
                    optimizer.zero_grad()
                if not {"schedule inside", "schedule first", "no schedule", "schedule per epoch"} & set(flaws) and (
                    "schedule by floor" not in flaws or not last or boundary
                ):
                    scheduler.step()
                losses.append(total)
                total, inside = 0.0, 0
        if "schedule per epoch" in flaws:
            scheduler.step()
        if "extra step" in flaws:
            optimizer.step()
        if "drops losses" in flaws:
            return losses[:1]
        return sum(losses) if "one number" in flaws else [loss * 3 for loss in losses] if "wrong losses" in flaws else losses

    return train_epoch


def fills_with_the_first(model, micro_batches, optimizer, loss_fn, window, scheduler):
    filled = (micro_batches * (window + 1))[: math.ceil(len(micro_batches) / window) * window]
    return epoch_with()(model, filled, optimizer, loss_fn, window, scheduler)


def rest_joins_the_last_window(model, micro_batches, optimizer, loss_fn, window, scheduler):
    starts = list(range(0, len(micro_batches) - window + 1, window)) or [0]
    edges = [*starts, len(micro_batches)]
    losses = []
    for start, end in zip(edges, edges[1:], strict=False):
        losses.append(windowed()(model, micro_batches[start:end], optimizer, loss_fn))
        scheduler.step()
    return losses


def one_backward_per_window(model, micro_batches, optimizer, loss_fn, window, scheduler):
    losses = []
    for start in range(0, len(micro_batches), window):
        losses.append(windowed("keeps losses")(model, micro_batches[start : start + window], optimizer, loss_fn))
        scheduler.step()
    return losses


def equal_windows(model, micro_batches, optimizer, loss_fn, window, scheduler):
    """As many windows as needed, all of nearly equal length."""
    count = math.ceil(len(micro_batches) / window)
    losses = []
    for part in torch.arange(len(micro_batches)).tensor_split(count):
        losses.append(windowed()(model, [micro_batches[i] for i in part.tolist()], optimizer, loss_fn))
        scheduler.step()
    return losses


def window_is_a_count(model, micro_batches, optimizer, loss_fn, window, scheduler):
    """Takes `window` for the number of windows."""
    losses = []
    for part in torch.arange(len(micro_batches)).tensor_split(window):
        if len(part):
            losses.append(windowed()(model, [micro_batches[i] for i in part.tolist()], optimizer, loss_fn))
            scheduler.step()
    return losses


for name, flaws, criterion, hint in [
    ("the lecture's loop", ["by window", "no flush"], "last window", "flush"),
    ("ACC-01 no division", ["sum"], "full windows", "sum"),
    ("ACC-04 last window divided by K", ["by window"], "last window", "short"),
    ("ACC-05 last window never stepped, lost", ["no flush", "zero at start"], "last window", "flush"),
    ("ACC-10 scheduler per micro-batch", ["schedule inside"], "schedule", "schedule-often"),
    ("ACC-10 scheduler by floor", ["schedule by floor"], "schedule", "schedule-often"),
    ("ACC-11 boundary off by one", ["off by one"], "full windows", "boundary"),
    ("scheduler per epoch", ["schedule per epoch"], "schedule", "schedule-often"),
    ("scheduler never", ["no schedule"], "schedule", "schedule-never"),
    ("scheduler before the optimizer", ["schedule first"], "schedule", "schedule-early"),
    ("divided by the whole epoch", ["by count"], "full windows", "scale"),
    ("last window not cleared", ["keeps last"], "every epoch", "stale"),
    ("one more step at the end", ["extra step"], "every epoch", "many-steps"),
    ("losses of the first window only", ["drops losses"], "losses", "losses-count"),
    ("one number for the epoch", ["one number"], "losses", "loss-returned"),
    ("losses scaled", ["wrong losses"], "losses", "loss-value"),
]:
    wrong(name, check=EPOCH, criterion=criterion, hint=hint)(epoch_with(*flaws))

for name, answer, criterion, hint in [
    ("do nothing", lambda *_: [], "full windows", "no-step"),
    ("rest filled up with the first ones", fills_with_the_first, "last window", "again"),
    ("rest joins the last full window", rest_joins_the_last_window, "full windows", "boundary"),
    ("plain: one backward per window", one_backward_per_window, "one graph at a time", "graphs"),
    ("windows of equal length", equal_windows, "full windows", "boundary"),
    ("window taken for the number of windows", window_is_a_count, "full windows", "boundary"),
]:
    wrong(name, check=EPOCH, criterion=criterion, hint=hint)(answer)


# -- 5.4 --


def by_weights(weigh, skip=True, logged=None, tail=(), count=lambda targets: int((targets != -100).sum())):
    """Micro-batch i's loss times weigh(counts, sizes, i)."""

    def accumulate_tokens(model, micro_batches, optimizer, loss_fn):
        counts = [count(targets) for _, targets in micro_batches]
        sizes = [targets.numel() for _, targets in micro_batches]
        total = 0.0
        for i, micro_batch in enumerate(micro_batches):
            if skip and not counts[i]:
                continue
            if "zero inside" in tail:
                optimizer.zero_grad()
            loss = loss_fn(model, micro_batch)
            weight = weigh(counts, sizes, i)
            (loss * weight).backward()
            total += loss.item() * (weight if logged is None else logged(counts, sizes, i))
        if "no step" not in tail:
            optimizer.step()
        if "never zero" not in tail:
            optimizer.zero_grad()
        return None if "no return" in tail else total

    return accumulate_tokens


def share(counts, sizes, i):
    return counts[i] / sum(counts)


def one_backward(model, micro_batches, optimizer, loss_fn):
    counts = [int((targets != -100).sum()) for _, targets in micro_batches]
    losses = [loss_fn(model, m) * n for m, n in zip(micro_batches, counts, strict=True) if n]
    loss = sum(losses) / sum(counts)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def nan_to_num(model, micro_batches, optimizer, loss_fn):
    counts, total = [int((targets != -100).sum()) for _, targets in micro_batches], 0.0
    for micro_batch, count in zip(micro_batches, counts, strict=True):
        loss = loss_fn(model, micro_batch).nan_to_num() * (count / sum(counts))
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


for name, answer, criterion, hint in [
    ("do nothing", lambda *_: 0.0, "equal counts", "no-step"),
    ("plain: mean of means", by_weights(lambda c, s, i: 1 / len(c)), "unequal counts", "means"),
    ("mean of means of those with targets", by_weights(lambda c, s, i: 1 / sum(map(bool, c))), "unequal counts", "means"),
    ("ACC-01 no division", by_weights(lambda c, s, i: 1.0), "equal counts", "sum"),
    ("sum over targets, not divided", by_weights(lambda c, s, i: c[i]), "equal counts", "sum"),
    ("ACC-02 divided twice", by_weights(lambda c, s, i: c[i] / sum(c) / len(c)), "equal counts", "twice"),
    ("counts the ignored ones", by_weights(lambda c, s, i: s[i] / sum(s)), "unequal counts", "means"),
    ("divides by all targets, ignored ones too", by_weights(lambda c, s, i: c[i] / sum(s)), "equal counts", "ignored"),
    ("token 0 not counted", by_weights(lambda c, s, i: c[i] / sum(c), count=lambda t: int((t > 0).sum())), "equal counts", "unequal"),
    ("weights upside down", by_weights(lambda c, s, i: (1 / c[i]) / sum(1 / n for n in c if n)), "unequal counts", "unequal"),
    ("running count for the total", by_weights(lambda c, s, i: c[i] / sum(c[: i + 1])), "equal counts", "unequal"),
    ("ACC-20 only the returned value is weighed", by_weights(lambda c, s, i: 1.0, logged=share), "equal counts", "only-logged"),
    ("ACC-07 zero_grad inside the loop", by_weights(share, tail=["zero inside"]), "equal counts", "only-last"),
    ("ACC-08 never zero_grad", by_weights(share, tail=["never zero"]), "equal counts", "stale"),
    ("no step", by_weights(share, tail=["no step"]), "equal counts", "no-step"),
    ("no targets: zero times nan", by_weights(share, skip=False), "no targets", "no-targets"),
    ("no targets: nan made a number", nan_to_num, "no targets", "no-targets"),
    ("ACC-16 one backward for all losses", one_backward, "one graph at a time", "graphs"),
    ("returns nothing", by_weights(share, tail=["no return"]), "loss", "loss-returned"),
    ("returns the mean of means", by_weights(share, logged=lambda c, s, i: 1 / len(c)), "loss", "loss-value"),
]:
    wrong(name, check=TOKENS, criterion=criterion, hint=hint)(answer)


# -- 5.5 --


def amp_epoch(*flaws):
    """The combined loop, with flaws."""

    def clip(model, max_norm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def train_epoch_amp(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
        losses = []
        for start in range(0, len(micro_batches), window):
            part = micro_batches[start : start + window]
            if len(part) < window and "no flush" in flaws:
                break
            divisor = window if "by window" in flaws else 1 if "sum" in flaws else len(part)
            total, valid = 0.0, 0
            for micro_batch in part:
                with torch.autocast(device, torch.bfloat16 if "bfloat16" in flaws else torch.float16, enabled="no autocast" not in flaws):
                    loss = loss_fn(model, micro_batch)
                if "drops inf" in flaws and not torch.isfinite(loss):
                    continue
                scaled = loss / divisor
                scaled = scaled if "no scale" in flaws else scaler.scale(scaled)
                scaled.backward()
                total += (scaled if "scaled loss" in flaws else loss / (len(part) if "logged right" in flaws else divisor)).item()
                valid += 1
                if "scale inside" in flaws:
                    scaler.update(scaler.get_scale() * 2)
                if "unscale inside" in flaws:
                    scaler.unscale_(optimizer)
                if "update inside" in flaws:
                    scaler.unscale_(optimizer)
                    scaler.update()
                if "clip inside" in flaws:
                    scale = scaler.get_scale()
                    clip(model, max_norm * scale)
                if "clip scaled inside" in flaws:
                    clip(model, max_norm)
            if "clip scaled" in flaws:
                clip(model, max_norm)
            if "nan to zero" in flaws:
                for parameter in model.parameters():
                    parameter.grad.nan_to_num_(0, 0, 0)
            if not {"unscale inside", "update inside", "no unscale", "no scale"} & set(flaws):
                scaler.unscale_(optimizer)
            if "unscale again" in flaws:
                for parameter in model.parameters():
                    parameter.grad /= scaler.get_scale()
            if not {"clip scaled", "clip inside", "no clip", "clip late", "clip scaled inside"} & set(flaws):
                if "clip value" in flaws:
                    torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
                elif "normalise" in flaws:
                    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
                    for parameter in model.parameters():
                        parameter.grad *= max_norm / norm
                else:
                    clip(model, max_norm)
            before = scaler.get_scale()
            if "update first" in flaws:
                scaler.update()
            if "zero before step" in flaws:
                optimizer.zero_grad()
            if "own step" in flaws:
                optimizer.step()
            elif "no scale" in flaws:
                optimizer.step()
            else:
                scaler.step(optimizer)
            if "clip late" in flaws:
                clip(model, max_norm)
            if not {"update inside", "no update", "no scale", "update first"} & set(flaws):
                scaler.update()
            if "update twice" in flaws:
                scaler.update(scaler.get_scale() / 2)
            grew, fell = scaler.get_scale() > before, scaler.get_scale() < before
            if "same scale" in flaws:
                fell = fell or grew
            if "finite loss" in flaws:
                fell = not math.isfinite(total)
            if "always schedule" in flaws or (grew if "schedule on growth" in flaws else not fell):
                if "no schedule" not in flaws:
                    scheduler.step()
            if "keeps inf" not in flaws or scaler.get_scale() >= before:
                if "never zero" not in flaws:
                    optimizer.zero_grad()
            losses.append(total)
        return losses

    return train_epoch_amp


def lecture_amp(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    """The lecture's combined loop as it stands."""
    losses = []
    for i, micro_batch in enumerate(micro_batches):
        with torch.autocast(device_type=device, dtype=torch.float16):
            loss = loss_fn(model, micro_batch) / window
        scaler.scale(loss).backward()
        losses.append(loss.item() * window)
        if (i + 1) % window == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses


def no_mixed_precision(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    return epoch_with()(model, micro_batches, optimizer, loss_fn, window, scheduler)


for name, flaws, criterion, hint in [
    ("ACC-01 no division", ["sum"], "weights", "sum"),
    ("ACC-20 only the returned value is divided", ["sum", "logged right"], "weights", "only-logged"),
    ("ACC-04 last window divided by K", ["by window"], "weights", "short"),
    ("ACC-05 last window never stepped", ["no flush"], "weights", "flush"),
    ("ACC-08 never zero_grad", ["never zero"], "weights", "stale"),
    ("AMP-01 clips scaled gradients", ["clip scaled"], "clipping", "clip-units"),
    ("AMP-01 no unscaling before the clip", ["no unscale"], "clipping", "clip-units"),
    ("clips each scaled sum", ["clip scaled inside"], "clipping", "clip-units"),
    ("clips after the step", ["clip late"], "clipping", "not-clipped"),
    ("no clipping", ["no clip"], "clipping", "not-clipped"),
    ("clips by value", ["clip value"], "clipping", "not-clipped"),
    ("always scales to the limit", ["normalise"], "weights", "grown"),
    ("clips after each micro-batch", ["clip inside"], "clipping", "clip-pieces"),
    ("AMP-02 unscales per micro-batch", ["unscale inside"], "runs", "unscale-once"),
    ("AMP-02 unscales again by hand", ["unscale again"], "weights", "unscale-once"),
    ("ACC-17 update between micro-batches", ["update inside"], "runs", "unscale-once"),
    ("ACC-17 another scale for each micro-batch", ["scale inside"], "weights", "scale-window"),
    ("AMP-04 never updates", ["no update"], "runs", "unscale-once"),
    ("AMP-05 updates before the step", ["update first"], "runs", "unscale-once"),
    ("zero_grad before the step", ["zero before step"], "weights", "empty-step"),
    ("updates twice", ["update twice"], "scale", "scale-trace"),
    ("AMP-13 scaled loss returned", ["scaled loss"], "losses", "loss-scaled"),
    ("AMP-19 scheduler moves on skipped steps", ["always schedule"], "schedule", "schedule-skipped"),
    ("scheduler moves when the scale grows", ["schedule on growth"], "schedule", "schedule-often"),
    ("scheduler stands still when the scale grows", ["same scale"], "schedule", "schedule-often"),
    ("scheduler moves where the loss was finite", ["finite loss"], "schedule", "schedule-skipped"),
    ("scheduler never", ["no schedule"], "schedule", "schedule-never"),
    ("AMP-22 infinite gradients stay after a skip", ["keeps inf"], "infinite window", "inf-left"),
    ("ACC-19 the infinite micro-batch is dropped", ["drops inf"], "infinite window", "inf-dropped"),
    ("infinite gradients made zero before the step", ["nan to zero"], "infinite window", "inf-dropped"),
    ("no autocast", ["no autocast"], "autocast", "autocast"),
    ("bfloat16", ["bfloat16"], "autocast", "autocast"),
    ("the optimizer steps whatever happened", ["own step"], "infinite window", "inf-stepped"),
    ("no scaler", ["no scale"], "infinite window", "inf-stepped"),
]:
    wrong(name, check=AMP, criterion=criterion, hint=hint)(amp_epoch(*flaws))

for name, answer, criterion, hint in [
    ("do nothing", lambda *_: [], "weights", "no-step"),
    ("the lecture's combined loop", lecture_amp, "weights", "flush"),
    ("plain: no mixed precision at all", no_mixed_precision, "infinite window", "inf-stepped"),
]:
    wrong(name, check=AMP, criterion=criterion, hint=hint)(answer)
