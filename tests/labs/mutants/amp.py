"""Wrong mixed precision, as people really write it (AMP-..: public reports) and as an unkind reviewer would."""

import torch
import torch.distributed as dist
from torch import nn

from tests.labs.corpus import wrong

MASTERS, SCALER, STEP, RANKS = "amp.masters", "amp.scaler", "amp.step", "amp.ranks"


def nothing(*args, **kwargs):
    return None


# -- 4.1: MasterWeights --


class FlawedMasters:
    """Right masters but for the flaws named."""

    flaws: frozenset = frozenset()

    def __init__(self, model, make_optimizer):
        self.model = model
        if "all half" in self.flaws:
            for p in model.parameters():
                p.data = p.data.to(model.up.weight.dtype)
        self.params = [p for p in model.parameters() if p.requires_grad]
        if {"frozen too", "frozen written back"} & self.flaws:
            self.params = list(model.parameters())
        wide = model.up.weight.dtype if "16-bit masters" in self.flaws else torch.float32
        self.masters = [p.detach().clone().to(wide) for p in self.params]
        if "buffers" in self.flaws:
            model.seen.add_(1)
        self.optimizer = make_optimizer(self.params if "no masters" in self.flaws else self.masters)

    def step(self, scale=1.0):
        flaws = self.flaws
        if "no masters" in flaws:
            for p in self.params:
                if p.grad is not None:
                    p.grad = (p.grad.float() / scale).to(p.dtype)
            return self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            if "follows the model" in flaws:
                master.copy_(p.detach())
            if "zeros are none" in flaws and p.grad is not None and not p.grad.any():
                master.grad = None
                continue
            if p.grad is None:
                if "keeps the last" not in flaws:
                    master.grad = None
                if "frozen too" in flaws:
                    master.grad = torch.ones_like(master)
                continue
            if "divides in 16 bits" in flaws:
                grad = (p.grad / scale).to(master.dtype)
            elif "multiplies" in flaws:
                grad = p.grad.to(master.dtype) * scale
            elif "no scale" in flaws:
                grad = p.grad.to(master.dtype)
            else:
                grad = (p.grad.float() / scale).to(master.dtype)
            master.grad = grad if master.grad is None or "adds up" not in flaws else master.grad + grad
        if "state in 16 bits" in flaws:
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        state[key] = state[key].to(self.model.up.weight.dtype).float()
        self.optimizer.step()
        if "not copied back" in flaws:
            return None
        for p, master in zip(self.params, self.masters, strict=True):
            if "dtype lost" in flaws:
                p.data = master.clone()
            elif "at least one" in flaws:
                old = p.data.float()
                beyond = old + (master - old).sign() * torch.finfo(p.dtype).eps * old.abs()
                p.data.copy_(torch.where(master.to(p.dtype) == p.data, beyond, master))
            elif "first only" in flaws and p is not self.model.up.weight:
                continue
            else:
                p.data.copy_(master)
        if "new objects" in flaws:
            self.model.up.weight = nn.Parameter(self.model.up.weight.detach().clone())
            self.params = [p for p in self.model.parameters() if p.requires_grad]
        return None

    def reload(self):
        if "stale" in self.flaws:
            return
        for p, master in zip(self.params, self.masters, strict=True):
            if "wrong way" in self.flaws:
                p.data.copy_(master)
            elif "follows the model" not in self.flaws and "no masters" not in self.flaws:
                master.copy_(p.detach())


for name, flaws, criterion, hint in [
    ("AMP-10 the optimizer steps 16-bit weights", ["no masters"], "small updates", "stalls"),
    ("AMP-10 masters in 16 bits", ["16-bit masters"], "small updates", "stalls"),
    ("AMP-10 masters made of the model at each step", ["follows the model"], "small updates", "stalls"),
    ("AMP-11 model not refreshed", ["not copied back"], "steps", "no-step"),
    ("AMP-11 stale masters overwrite loaded weights", ["stale"], "after loading", "stale"),
    ("AMP-11 reload copies the wrong way", ["wrong way"], "after loading", "stale"),
    ("AMP-17 Adam's moments in 16 bits", ["state in 16 bits"], "Adam", "adam"),
    ("AMP-25 norms converted to 16 bits", ["all half"], "left alone", "left-alone"),
    ("fp32 gradients add up", ["adds up"], "steps", "old-gradients"),
    ("divides in 16 bits", ["divides in 16 bits"], "scaled gradients", "quotient"),
    ("ignores the scale", ["no scale"], "scaled gradients", "too-large"),
    ("multiplies by the scale", ["multiplies"], "scaled gradients", "too-large"),
    ("the model becomes fp32", ["dtype lost"], "left alone", "left-alone"),
    ("parameters replaced", ["new objects"], "left alone", "left-alone"),
    ("frozen parameters trained", ["frozen too"], "left alone", "left-alone"),
    ("frozen parameters written back", ["frozen written back"], "left alone", "left-alone"),
    ("the last gradient of who has none", ["keeps the last"], "left alone", "idle"),
    ("zeros taken for no gradient", ["zeros are none"], "left alone", "idle"),
    ("buffers changed", ["buffers"], "left alone", "left-alone"),
    ("every update moves to the next number at least", ["follows the model", "at least one"], "small updates", "drifts"),
    ("one tensor is refreshed", ["first only"], "steps", "steps"),
]:
    wrong(name, check=MASTERS, criterion=criterion, hint=hint)(
        type("Flawed", (FlawedMasters,), {"flaws": frozenset(flaws), "__module__": __name__})
    )


@wrong("does nothing", check=MASTERS, criterion="steps", hint="no-step")
class NoMasters:
    def __init__(self, model, make_optimizer):
        pass

    def step(self, scale=1.0):
        pass

    def reload(self):
        pass


# -- 4.2: DynamicLossScaler --


class FlawedScaler:
    """A right scaler but for the flaws named."""

    flaws: frozenset = frozenset()

    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, max_scale=2.0**24):
        self.grow, self.back, self.interval, self.low, self.high = growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        self.value, self.good, self.found, self.shown = float(init_scale), 0, None, float(init_scale)
        self.count = torch.zeros(())

    def get_scale(self):
        return self.shown if "old get_scale" in self.flaws else self.value

    def scale(self, loss):
        if "16-bit product" in self.flaws:
            return loss * self.value
        if "no graph" in self.flaws:
            return torch.tensor(float(loss) * self.value, requires_grad=True)
        if "cuts the graph" in self.flaws:
            return loss.detach().float() * self.value
        if "scales twice" in self.flaws:
            return loss.float() * self.value * self.value
        return loss.float() * self.value

    def grads(self, optimizer):
        groups = optimizer.param_groups[:1] if "first group" in self.flaws else optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def bad(self, grads):
        if "tests one group" in self.flaws:
            grads = grads[:2]
        if "isinf" in self.flaws:
            return any(bool(g.isinf().any()) for g in grads)
        if "isnan" in self.flaws:
            return any(bool(g.isnan().any()) for g in grads)
        if "norm" in self.flaws:
            return not all(bool(g.norm().isfinite()) for g in grads)
        if "sum is inf" in self.flaws:
            return bool(sum(g.sum() for g in grads).isinf())
        return any(not bool(g.isfinite().all()) for g in grads)

    def unscale_(self, optimizer):
        flaws = self.flaws
        if self.found is not None and "no guard" not in flaws:
            return
        grads = self.grads(optimizer)
        by = self.value
        if "next scale" in flaws and self.good + 1 == self.interval:
            by *= self.grow
        if "last scale" in flaws:
            by = self.shown
        if "not divided" not in flaws:
            for grad in grads:
                grad.div_(by * by if "divides twice" in flaws else by * 1.3 if "a third more" in flaws else by)
        found = self.bad(grads)
        self.found = found if self.found is None or "sticky" not in flaws else self.found or found
        if "cleans" in flaws:
            for grad in grads:
                torch.nan_to_num_(grad, nan=0.0, posinf=0.0, neginf=0.0)

    def step(self, optimizer):
        flaws = self.flaws
        if "no guard" in flaws or self.found is None:
            self.unscale_(optimizer)
        if "late test" in flaws:
            self.found = self.bad(self.grads(optimizer))
        if self.found and "cleans" not in flaws and "always steps" not in flaws:
            if "decays" in flaws:
                for group in optimizer.param_groups:
                    for state in (optimizer.state[p] for p in group["params"]):
                        if "momentum_buffer" in state:
                            state["momentum_buffer"].mul_(0.9)
            return None if "no return" in flaws else "says stepped" in flaws
        optimizer.step()
        return None if "no return" in flaws else True

    def update(self):
        flaws, self.shown = self.flaws, self.value
        if self.found:
            if "no back-off" not in flaws:
                self.value *= self.back
            if "count goes on" not in flaws:
                self.good = 0
            elif "count counts skips" in flaws:
                self.good += 1
        elif "never grows" not in flaws:
            self.good += 1
            if self.good >= self.interval + ("one late" in flaws) - ("one early" in flaws):
                self.value *= self.grow
                if "count stays" not in flaws:
                    self.good = 0
        if "stays below" in flaws and self.value > self.high:
            self.value /= self.grow
        if "no cap" not in flaws:
            self.value = min(self.value, self.high)
        if "no floor" not in flaws:
            self.value = max(self.value, self.low)
        if "never forgets" not in flaws or not self.found:
            self.found = None
        self.count += 1

    def state_dict(self):
        flaws = self.flaws
        if "empty state" in flaws:
            return {}
        if "scale only" in flaws:
            return {"value": self.value}
        if "count only" in flaws:
            return {"good": self.good}
        return vars(self) if "live state" in flaws else {"value": self.value, "good": self.good}

    def load_state_dict(self, state):
        if "load ignores" not in self.flaws:
            vars(self).update(state)


for name, flaws, criterion, hint in [
    ("AMP-02 unscale_ and step both divide", ["no guard", "sticky"], "unscaled once", "twice"),
    ("AMP-04 no back-off", ["no back-off"], "scale trace", "no-backoff"),
    ("AMP-04 count of good steps goes on", ["count goes on"], "scale trace", "tracker"),
    ("AMP-05 divides by the scale to come", ["next scale"], "gradients", "which-scale"),
    ("AMP-05 divides by the scale before", ["last scale"], "gradients", "which-scale"),
    ("AMP-08 tests after clipping", ["late test"], "test for inf", "late-test"),
    ("AMP-20 empty state", ["empty state"], "saved and restored", "forgets"),
    ("AMP-20 the scale alone", ["scale only"], "saved and restored", "forgets"),
    ("AMP-20 the count alone", ["count only"], "saved and restored", "forgets"),
    ("AMP-20 load_state_dict does nothing", ["load ignores"], "saved and restored", "forgets"),
    ("AMP-23 no cap", ["no cap"], "limits", "no-cap"),
    ("a growth beyond the cap is left out", ["stays below"], "limits", "short-of-limit"),
    ("AMP-23 no floor", ["no floor"], "limits", "no-floor"),
    ("the state is alive", ["live state"], "saved and restored", "alive-state"),
    ("never divides", ["not divided"], "gradients", "not-divided"),
    ("divides twice", ["divides twice"], "gradients", "twice"),
    ("divides by a third more", ["a third more"], "gradients", "gradients"),
    ("scales twice", ["scales twice"], "gradients", "not-divided"),
    ("first group only", ["first group"], "gradients", "alike"),
    ("tests the first group only", ["tests one group"], "skipped steps", "not-skipped"),
    ("nan is not noticed", ["isinf"], "skipped steps", "not-skipped"),
    ("inf is not noticed", ["isnan"], "skipped steps", "not-skipped"),
    ("tests the sum for inf", ["sum is inf"], "skipped steps", "not-skipped"),
    ("always steps", ["always steps"], "skipped steps", "not-skipped"),
    ("tests the norm", ["norm"], "test for inf", "sums"),
    ("replaces inf by 0 and steps", ["cleans"], "skipped steps", "cleaned"),
    ("momentum decays in a skipped step", ["decays"], "skipped steps", "skip-changed"),
    ("an overflow is never forgotten", ["never forgets"], "skipped steps", "skips-good"),
    ("returns nothing", ["no return"], "skipped steps", "returned"),
    ("says that it stepped", ["says stepped"], "skipped steps", "returned"),
    ("grows one step late", ["one late"], "scale trace", "growth"),
    ("grows one step early", ["one early"], "scale trace", "growth"),
    ("count not reset by a growth", ["count stays"], "scale trace", "growth"),
    ("never grows", ["never grows"], "scale trace", "growth"),
    ("get_scale is one step old", ["old get_scale"], "scale trace", "reported"),
    ("product in 16 bits", ["16-bit product"], "16-bit loss", "half-loss"),
    ("loss without its graph", ["cuts the graph"], "runs", "no-graph"),
    ("a new leaf for a loss", ["no graph"], "gradients", "no-graph"),
]:
    wrong(name, check=SCALER, criterion=criterion, hint=hint)(
        type("Flawed", (FlawedScaler,), {"flaws": frozenset(flaws), "__module__": __name__})
    )


@wrong("a fixed scale, every step taken", check=SCALER, criterion="skipped steps", hint="not-skipped")
class Fixed(FlawedScaler):
    flaws = frozenset({"always steps"})

    def update(self):
        self.found = None


@wrong("does nothing", check=SCALER, criterion="gradients", hint="no-graph")
class NoScaler:
    def __init__(self, *args, **kwargs):
        pass

    scale = unscale_ = step = update = get_scale = state_dict = load_state_dict = nothing


@wrong("never scales", check=SCALER, criterion="scale trace", hint="trace")
class Unscaled(FlawedScaler):
    def get_scale(self):
        return 1.0

    def scale(self, loss):
        return loss.float()

    def unscale_(self, optimizer):
        self.found = self.bad(self.grads(optimizer))


@wrong("PyTorch's own", check=SCALER, criterion="runs", hint=None)
class Ready(torch.amp.GradScaler):
    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, max_scale=2.0**24):
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval)


@wrong("unscale_ divides once more after step", check=SCALER, criterion="unscaled once", hint="twice")
class OpenAfterStep(FlawedScaler):
    def unscale_(self, optimizer):
        if self.found is None or self.count == self.stepped_in:
            self.found = None
            super().unscale_(optimizer)

    stepped_in = -1

    def step(self, optimizer):
        taken = super().step(optimizer)
        self.stepped_in = int(self.count)
        return taken


@wrong("the loaded state goes on living", check=SCALER, criterion="saved and restored", hint="alive-state")
class LoadsTheDict(FlawedScaler):
    loaded = None

    def update(self):
        super().update()
        if self.loaded is not None:
            self.loaded.update(value=self.value, good=self.good)

    def load_state_dict(self, state):
        self.loaded, self.value, self.good = state, state["value"], state["good"]


@wrong("a trace learnt by heart", check=SCALER, criterion="scale trace", hint="growth")
class ByHeart(FlawedScaler):
    TRACE = (1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 1024.0, 512.0)

    def update(self):
        self.good += 1
        self.value, self.found = self.TRACE[self.good % len(self.TRACE)], None


# -- 4.3: amp_step --


def flawed_step(*flaws):
    def amp_step(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
        def clip():
            if max_norm is None:
                return
            if "per tensor" in flaws:
                for p in model.parameters():
                    nn.utils.clip_grad_norm_([p], max_norm)
            elif "values" in flaws:
                nn.utils.clip_grad_value_(model.parameters(), max_norm)
            elif "normalises" in flaws:
                norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
                for p in model.parameters():
                    p.grad.mul_(max_norm / norm)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)

        if "only fp16" in flaws:
            dtype = torch.float16
        if "only cpu" in flaws:
            device_type = "cpu"
        if "default dtype" in flaws:
            dtype = None
        use = scaler is not None or "needs a scaler" in flaws
        context = torch.autocast(device_type, dtype, enabled="no autocast" not in flaws)
        with context:
            with torch.set_grad_enabled("casts without gradients" not in flaws):
                outputs = model(inputs)
            if "casts without gradients" in flaws:
                outputs.requires_grad_()
            loss = outputs if "loss outside" in flaws else loss_fn(outputs, targets)
            if "backward inside" in flaws:
                (scaler.scale(loss) if use else loss).backward()
        if "loss outside" in flaws:
            loss = loss_fn(loss, targets)
        scaled = scaler.scale(loss) if use and "no scale" not in flaws else loss
        if "scales by hand" in flaws and not use:
            scaled = loss * 1000
        if "backward inside" not in flaws:
            scaled.backward()
        if "clips first" in flaws:
            clip()
        if use and "update first" in flaws:
            scaler.update()
        if use and "no unscale" not in flaws:
            scaler.unscale_(optimizer)
        if use and "divides again" in flaws:
            for p in model.parameters():
                p.grad /= scaler.get_scale()
        if use and "unscales again" in flaws:
            scaler.unscale_(optimizer)
        if "clips first" not in flaws and "never clips" not in flaws and (use or "clips with a scaler" not in flaws):
            clip()
        stepped, before = True, scaler.get_scale() if use else 0.0
        if "step inside" in flaws:
            with context:
                stepped = scaler.step(optimizer) if use else optimizer.step()
        elif use and "steps itself" not in flaws:
            stepped = scaler.step(optimizer)
        else:
            if "cleans" in flaws:
                for p in model.parameters():
                    p.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
        if use and "never updates" not in flaws and not ("updates if stepped" in flaws and not stepped):
            for _ in range(0 if "update first" in flaws else 2 if "updates twice" in flaws else 1):
                scaler.update()
        if use and "scale tells" in flaws:
            stepped = scaler.get_scale() >= before
        if scheduler is not None and (stepped or not use or "always schedules" in flaws) and "never schedules" not in flaws:
            scheduler.step()
        keeps = "never clears" in flaws or ("clears with a scaler" in flaws and not use)
        if not keeps and (stepped or not use or "clears if stepped" not in flaws):
            optimizer.zero_grad()
        if "returns nothing" in flaws:
            return None
        if "halved" in flaws:
            return loss.item() / 2
        return scaled.item() if "scaled loss" in flaws else loss.item()

    return amp_step


for name, flaws, criterion, hint in [
    ("AMP-01 clips scaled gradients", ["clips first"], "clipping", "norm"),
    ("AMP-01 clips scaled gradients, unscaled in step", ["clips first", "no unscale"], "clipping", "norm"),
    ("AMP-01 never unscales before clipping", ["no unscale"], "clipping", "norm"),
    ("AMP-02 divides again", ["divides again"], "loss and update", "update"),
    ("AMP-02 unscales again", ["unscales again"], "runs", "twice"),
    ("AMP-05 update before unscaling", ["update first"], "loss and update", "update"),
    ("AMP-08 an inf cleaned away", ["steps itself", "cleans"], "overflow", "moved"),
    ("AMP-13 returns the scaled loss", ["scaled loss"], "loss and update", "loss-scaled"),
    ("AMP-14 backward under autocast", ["backward inside"], "under autocast", "all-inside"),
    ("AMP-14 the step under autocast", ["step inside"], "under autocast", "all-inside"),
    ("AMP-14 loss outside", ["loss outside"], "under autocast", "loss-outside"),
    ("AMP-16 weights cast while gradients were off", ["casts without gradients"], "loss and update", "no-gradients"),
    ("AMP-19 schedules skipped steps", ["always schedules"], "schedule", "schedule"),
    ("AMP-19 reads from the scale whether it stepped", ["scale tells"], "schedule", "schedule"),
    ("AMP-19 never schedules", ["never schedules"], "without a scaler", "schedule"),
    ("AMP-22 clears only if stepped", ["clears if stepped"], "overflow", "inf-left"),
    ("never clears", ["never clears"], "overflow", "inf-left"),
    ("no autocast", ["no autocast"], "under autocast", "fp32-forward"),
    ("ignores the scale, unscales", ["no scale"], "loss and update", "update"),
    ("the optimizer steps whatever the scaler found", ["steps itself"], "overflow", "moved"),
    ("never updates the scaler", ["never updates"], "runs", "twice"),
    ("updates the scaler only if stepped", ["updates if stepped"], "runs", "twice"),
    ("updates the scaler twice", ["updates twice"], "overflow", "no-update"),
    ("clears only with a scaler", ["clears with a scaler"], "without a scaler", "summed"),
    ("never clips", ["never clips"], "clipping", "norm"),
    ("clips only with a scaler", ["clips with a scaler"], "without a scaler", "norm"),
    ("clips each tensor", ["per tensor"], "clipping", "per-tensor"),
    ("clips values", ["values"], "clipping", "per-tensor"),
    ("normalises short gradients too", ["normalises"], "clipping", "clips-small"),
    ("device in so many words", ["only cpu"], "device and dtype", "device"),
    ("dtype in so many words", ["only fp16"], "device and dtype", "device"),
    ("autocast's default dtype", ["default dtype"], "under autocast", "fp32-forward"),
    ("cannot do without a scaler", ["needs a scaler"], "runs", "scaled-anyway"),
    ("a scale of its own without a scaler", ["scales by hand"], "without a scaler", "scaled-anyway"),
    ("returns nothing", ["returns nothing"], "loss and update", "loss"),
    ("returns half the loss", ["halved"], "loss and update", "loss"),
]:
    wrong(name, check=STEP, criterion=criterion, hint=hint)(flawed_step(*flaws))

wrong("does nothing", check=STEP, criterion="loss and update", hint="loss")(nothing)


@wrong("losses only", check=STEP, criterion="loss and update", hint="update")
def losses_only(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
    with torch.autocast(device_type, dtype):
        return loss_fn(model(inputs), targets).item()


@wrong("plain fp32", check=STEP, criterion="under autocast", hint="fp32-forward")
def plain(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


# -- 4.4: RankedLossScaler --


class Ranked(FlawedScaler):
    flaws: frozenset = frozenset()

    def agree(self, op):
        flag = torch.tensor(float(self.found))
        dist.all_reduce(flag, op=op)
        self.found = bool(flag)

    def unscale_(self, optimizer):
        if self.found is not None:
            return
        flaws = self.flaws
        if "gathers gradients" in flaws and dist.is_initialized():
            flat = torch.cat([g.flatten() for g in self.grads(optimizer)] * 40)
            every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(every, flat)
        super().unscale_(optimizer)
        if not dist.is_initialized() and "no group" not in flaws:
            return
        if "only who found" in flaws:
            if self.found:
                self.agree(dist.ReduceOp.MAX)
        elif "min" in flaws:
            self.agree(dist.ReduceOp.MIN)
        elif "rank 0 tells" in flaws:
            flag = torch.tensor(float(self.found))
            dist.broadcast(flag, 0)
            self.found = bool(flag)
        elif "tells rank 0" in flaws:
            flag = torch.tensor(float(self.found))
            dist.reduce(flag, 0, op=dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                self.found = bool(flag)
        elif "exactly one" in flaws:
            flag = torch.tensor(float(self.found))
            dist.all_reduce(flag)
            self.found = bool(flag == 1)
        elif "sums gradients" in flaws:
            for grad in self.grads(optimizer):
                dist.all_reduce(grad)
            self.found = self.bad(self.grads(optimizer))
        elif "gathers gradients" in flaws:
            self.found = not all(bool(one.isfinite().all()) for one in every)
        elif "alone" not in flaws and "late" not in flaws and "scale only" not in flaws:
            self.agree(dist.ReduceOp.MAX)

    def update(self):
        if "late" in self.flaws and dist.is_initialized():
            self.agree(dist.ReduceOp.MAX)
        super().update()
        if "scale only" in self.flaws and dist.is_initialized():
            value = torch.tensor(self.value)
            dist.all_reduce(value, op=dist.ReduceOp.MIN)
            self.value = float(value)


for name, flaws, criterion, hint in [
    ("AMP-07 each rank decides alone", ["alone"], "ranks agree", "apart"),
    ("AMP-07 only the rank that found one speaks", ["only who found"], "runs", "deadlock"),
    ("AMP-07 the least flag", ["min"], "ranks agree", "not-all"),
    ("AMP-07 rank 0 tells the others", ["rank 0 tells"], "ranks agree", "not-all"),
    ("AMP-07 the others tell rank 0", ["tells rank 0"], "ranks agree", "apart"),
    ("AMP-07 agreed after the step", ["late"], "ranks agree", "apart"),
    ("AMP-07 the scales agree, the steps do not", ["scale only"], "ranks agree", "apart"),
    ("ZERO-26 a sum that must be one", ["exactly one"], "like one rank", "not-skipped"),
    ("all gradients are summed", ["sums gradients"], "like one rank", "heavy"),
    ("all gradients are gathered", ["gathers gradients"], "message", "heavy"),
    ("needs a process group", ["no group"], "runs", "no-group"),
]:
    wrong(name, check=RANKS, criterion=criterion, hint=hint)(type("Flawed", (Ranked,), {"flaws": frozenset(flaws), "__module__": __name__}))
wrong("does nothing", check=RANKS, criterion="like one rank", hint="no-graph")(NoScaler)
