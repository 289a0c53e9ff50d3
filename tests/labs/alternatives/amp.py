"""Right mixed precision, each built differently: none of these may lose a point."""

import copy
import math

import torch
import torch.distributed as dist
from torch import nn

from tests.labs.corpus import right

MASTERS, SCALER, STEP, RANKS = "amp.masters", "amp.scaler", "amp.step", "amp.ranks"


# -- 4.1: MasterWeights --


@right("a list of fp32 copies", check=MASTERS)
class Listed:
    def __init__(self, model, make_optimizer):
        self.model = model
        self.masters = [nn.Parameter(p.detach().clone().float()) for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.masters)

    def trained(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def step(self, scale=1.0):
        for p, master in zip(self.trained(), self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.detach().to(torch.float32).div_(scale)
        self.optimizer.step()
        for p, master in zip(self.trained(), self.masters, strict=True):
            p.data.copy_(master.data)

    def reload(self):
        for p, master in zip(self.trained(), self.masters, strict=True):
            master.data.copy_(p.data)


@right("one flat fp32 buffer", check=MASTERS)
class Flat:
    def __init__(self, model, make_optimizer):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = torch.cat([p.detach().float().flatten() for p in self.params]).requires_grad_()
        self.optimizer = make_optimizer([self.flat])

    def parts(self):
        return self.flat.detach().split([p.numel() for p in self.params])

    def step(self, scale=1.0):
        grads = [torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten() for p in self.params]
        self.flat.grad = torch.cat(grads) * (1.0 / scale)
        self.optimizer.step()
        for p, part in zip(self.params, self.parts(), strict=True):
            p.data = part.view_as(p).to(p.dtype)

    def reload(self):
        for p, part in zip(self.params, self.parts(), strict=True):
            part.copy_(p.detach().flatten())


@right("a whole fp32 model beside it", check=MASTERS)
class Twin:
    def __init__(self, model, make_optimizer):
        self.model, self.twin = model, copy.deepcopy(model).float()
        self.optimizer = make_optimizer(list(self.twin.parameters()))

    @torch.no_grad()
    def step(self, scale=1.0):
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.double().div(scale).float()
        with torch.enable_grad():
            self.optimizer.step()
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            if p.requires_grad:
                p.copy_(q)

    def reload(self):
        self.twin.load_state_dict(self.model.state_dict())


@right("masters for 16-bit parameters only, multi-tensor copies", check=MASTERS)
class Foreach:
    def __init__(self, model, make_optimizer):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.wide = [p for p in trained if p.dtype == torch.float32]
        self.small = [p for p in trained if p.dtype != torch.float32]
        self.masters = [p.detach().float().requires_grad_() for p in self.small]
        self.optimizer = make_optimizer(self.wide + self.masters)

    def step(self, scale=1.0):
        for p, master in zip(self.small, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        grads = [p.grad for p in self.wide + self.masters if p.grad is not None]
        torch._foreach_div_(grads, scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(self.small, self.masters)

    def reload(self):
        with torch.no_grad():
            torch._foreach_copy_(self.masters, self.small)


class FromModel:
    """fp32 weights made of the model's for each step; what rounding loses is treated by `put`."""

    def __init__(self, model, make_optimizer):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.wide = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.left = [torch.zeros_like(p) for p in self.params]
        self.optimizer = make_optimizer(self.wide)

    @torch.no_grad()
    def step(self, scale=1.0):
        for p, wide in zip(self.params, self.wide, strict=True):
            wide.copy_(p)
            wide.grad = None if p.grad is None else p.grad.float() / scale
        self.optimizer.step()
        for number, (p, wide) in enumerate(zip(self.params, self.wide, strict=True)):
            self.put(number, p, wide)

    def reload(self):
        for left in self.left:
            left.zero_()


@right("Kahan summation in 16 bits", check=MASTERS)
class Kahan(FromModel):
    def put(self, number, p, wide):
        update = (wide - p.float()) + self.left[number].float()
        new = (p.float() + update).to(p.dtype)
        self.left[number] = (update - (new.float() - p.float())).to(p.dtype)
        p.copy_(new)


@right("stochastic rounding", check=MASTERS)
class Stochastic(FromModel):
    def put(self, number, p, wide):
        near = wide.to(p.dtype)
        rest = wide - near.float()
        up = torch.where(rest > 0, math.inf, -math.inf).to(p.dtype)
        other = torch.nextafter(near, up) if p.dtype != torch.bfloat16 else self.neighbour(near, rest)
        gap = (other.float() - near.float()).abs()
        chance = torch.where(gap > 0, rest.abs() / gap, 0.0)
        p.copy_(torch.where(torch.rand(p.shape) < chance, other, near))

    @staticmethod
    def neighbour(near, rest):
        away = torch.where(rest * near.float() > 0, 1, -1).to(torch.int16)
        moved = (near.view(torch.int16) + away).view(torch.bfloat16)
        return torch.where(rest == 0, near, moved)


# -- 4.2: DynamicLossScaler --


@right("torch.amp.GradScaler with limits", check=SCALER, forbid=False)
class Torchs:
    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, max_scale=2.0**24):
        self.inner = torch.amp.GradScaler("cpu", init_scale, growth_factor, backoff_factor, growth_interval)
        self.limits, self.done = (min_scale, max_scale), False

    def scale(self, loss):
        return self.inner.scale(loss)

    def unscale_(self, optimizer):
        self.inner.unscale_(optimizer)

    def step(self, optimizer):
        stepped = []
        original = optimizer.step
        optimizer.step = lambda *args, **kwargs: (stepped.append(True), original(*args, **kwargs))
        self.inner.step(optimizer)
        optimizer.step = original
        return bool(stepped)

    def update(self):
        self.inner.update()
        self.inner._scale.clamp_(*self.limits)

    def get_scale(self):
        return self.inner.get_scale()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        self.inner._lazy_init_scale_growth_tracker(torch.device("cpu"))


@right("tensors for scale, count and flag; raises at a second unscale_", check=SCALER)
class Tensors:
    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, max_scale=2.0**24):
        self.factors, self.interval, self.limits = (growth_factor, backoff_factor), growth_interval, (min_scale, max_scale)
        self._scale, self._good = torch.tensor(float(init_scale)), torch.tensor(0)
        self._found, self._unscaled = torch.tensor(0.0), False

    def get_scale(self):
        return self._scale.item()

    def scale(self, loss):
        return loss.to(torch.float32) * self._scale

    def unscale_(self, optimizer):
        if self._unscaled:
            raise RuntimeError("unscale_() has already been called")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / self._scale
                    self._found = torch.maximum(self._found, (~torch.isfinite(parameter.grad)).any().float())
        self._unscaled = True

    def step(self, optimizer):
        if not self._unscaled:
            self.unscale_(optimizer)
        if self._found:
            return torch.tensor(False)
        optimizer.step()
        return torch.tensor(True)

    def update(self):
        if self._found:
            self._scale, self._good = self._scale * self.factors[1], torch.tensor(0)
        else:
            self._good = self._good + 1
            if self._good >= self.interval:
                self._scale, self._good = self._scale * self.factors[0], torch.tensor(0)
        self._scale = self._scale.clamp(*self.limits)
        self._found, self._unscaled = torch.tensor(0.0), False

    def state_dict(self):
        return {"scale": self._scale.clone(), "good": self._good.clone(), "factors": self.factors, "interval": self.interval}

    def load_state_dict(self, state):
        self._scale, self._good = state["scale"].clone(), state["good"].clone()
        self.factors, self.interval = state["factors"], state["interval"]


@right("counts down, keeps the scale of backward, copies __dict__", check=SCALER)
class CountsDown:
    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, max_scale=2.0**24):
        self.grow, self.back, self.interval, self.low, self.high = growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        self.value, self.left, self.used, self.bad = init_scale, growth_interval, None, None

    def get_scale(self):
        return self.value

    def scale(self, loss):
        self.used = self.value
        return torch.mul(loss.float(), torch.tensor(self.value, dtype=torch.float64)).float()

    def unscale_(self, optimizer):
        if self.bad is None:
            self.bad = 0
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.bad += int((p.grad.isinf() | p.grad.isnan()).sum())
                        p.grad.copy_(p.grad.double() / self.used)

    def step(self, optimizer):
        self.unscale_(optimizer)
        if self.bad:
            return False
        optimizer.step()
        return True

    def update(self):
        bad, self.bad = self.bad, None
        self.left = self.interval if bad else self.left - 1
        factor = self.back if bad else self.grow if not self.left else 1.0
        self.left = self.left or self.interval
        self.value = max(self.low, min(self.high, self.value * factor))

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)


@right("a flag and a list of the last steps", check=SCALER)
class History:
    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, max_scale=2.0**24):
        self.settings = growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        self.now, self.streak, self.unscaled, self.overflow = float(init_scale), [], False, False

    def get_scale(self):
        return torch.tensor(self.now)

    def scale(self, loss):
        return self.now * loss.double().float()

    def grads(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def unscale_(self, optimizer):
        if self.unscaled:
            return
        self.unscaled = True
        for grad in self.grads(optimizer):
            if not torch.isfinite(grad).all():
                self.overflow = True
            grad.mul_(1 / self.now)

    def step(self, optimizer):
        self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()
        return 0 if self.overflow else 1

    def update(self):
        grow, back, interval, low, high = self.settings
        if self.overflow:
            self.now, self.streak = self.now * back, []
        else:
            self.streak.append(True)
            if len(self.streak) == interval:
                self.now, self.streak = self.now * grow, []
        self.now = sorted((low, self.now, high))[1]
        self.unscaled = self.overflow = False

    def state_dict(self):
        return copy.deepcopy({"now": self.now, "streak": self.streak, "settings": self.settings})

    def load_state_dict(self, state):
        for key, value in state.items():
            setattr(self, key, copy.deepcopy(value))


# -- 4.3: amp_step --


@right("zero_grad first, own clipping by norm", check=STEP)
def by_hand(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
    optimizer.zero_grad(set_to_none=False)
    with torch.amp.autocast(device_type=device_type, dtype=dtype):
        outputs = model(inputs)
        loss = loss_fn(outputs, targets)
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    if max_norm is not None:
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
        if norm > max_norm:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= max_norm / norm
    skipped = False
    if scaler:
        skipped = not scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if scheduler and not skipped:
        scheduler.step()
    return loss.detach()


@right("torch.autograd.grad, autocast without a cache, zero_grad on the model", check=STEP)
def by_grad(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
    with torch.autocast(device_type, dtype, cache_enabled=False):
        loss = loss_fn(model(inputs), targets)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    start = loss if scaler is None else scaler.scale(loss)
    for p, grad in zip(params, torch.autograd.grad(start, params), strict=True):
        p.grad = grad
    if scaler is not None and max_norm is not None:
        scaler.unscale_(optimizer)  # only needed for clipping
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    stepped = True
    if scaler is not None:
        stepped = scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if stepped and scheduler is not None:
        scheduler.step()
    model.zero_grad()
    return float(loss)


@right("forward in a function decorated with autocast; a null scaler", check=STEP)
def decorated(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
    class Null:
        def scale(self, loss):
            return loss

        def unscale_(self, optimizer):
            pass

        def step(self, optimizer):
            optimizer.step()
            return True

        def update(self):
            pass

    scaler = scaler if scaler is not None else Null()

    @torch.autocast(device_type, dtype)
    def forward():
        return loss_fn(model(inputs), targets)

    loss = forward()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if max_norm is None else max_norm, foreach=False)
    if scaler.step(optimizer) and scheduler is not None:
        scheduler.step()
    scaler.update()
    return loss.item()


@right("tests the gradients itself before it clips", check=STEP)
def own_test(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype, scaler=None, max_norm=None, scheduler=None):
    with torch.autocast(device_type, dtype):
        loss = loss_fn(model(inputs), targets)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    grads = [p.grad for p in model.parameters()]
    good = scaler is None or all(grad.isfinite().all() for grad in grads)
    if good:
        if max_norm is not None:
            total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            torch._foreach_mul_(grads, factor)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach().float().item()


# -- 4.4: RankedLossScaler --


class Base(History):
    pass


@right("all_reduce MAX of a float after unscaling", check=RANKS)
class ByMax(Base):
    def unscale_(self, optimizer):
        if self.unscaled:
            return
        super().unscale_(optimizer)
        if dist.is_available() and dist.is_initialized():
            flag = torch.tensor([float(self.overflow)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.overflow = flag.item() > 0


@right("sum of whole numbers, in step", check=RANKS)
class BySum(Base):
    def step(self, optimizer):
        self.unscale_(optimizer)
        if dist.is_initialized() and dist.get_world_size() > 1:
            count = torch.tensor(int(self.overflow))
            dist.all_reduce(count)
            self.overflow = bool(count > 0)
        return super().step(optimizer)


@right("all_gather of flags", check=RANKS)
class ByGather(Base):
    def unscale_(self, optimizer):
        fresh = not self.unscaled
        super().unscale_(optimizer)
        if fresh and dist.is_initialized():
            flags = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(flags, torch.tensor([float(self.overflow)]))
            self.overflow = any(bool(flag) for flag in flags)


@right("all_gather_object", check=RANKS)
class ByObjects(Base):
    def step(self, optimizer):
        self.unscale_(optimizer)
        if dist.is_initialized():
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, self.overflow)
            self.overflow = any(told)
        return super().step(optimizer)


@right("an agreement at both calls", check=RANKS)
class Twice(Base):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if dist.is_initialized():
            flag = torch.tensor(self.overflow, dtype=torch.uint8)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.overflow = bool(flag)
