"""Wrong LoRA, as people really write it (LORA-..: public reports) and as an unkind reviewer would."""

import copy
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from tests.labs.corpus import wrong

LINEAR, INJECT, MERGE, ADAPTER = "lora.linear", "lora.inject", "lora.merge", "lora.adapter"


class Layer(nn.Module):
    """A right layer but for the flaws named."""

    flaws: frozenset = frozenset()

    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        flaws, self.rank, self.alpha, self.p, self.merged = self.flaws, rank, alpha, dropout, False
        self.base = copy.deepcopy(base) if "copies" in flaws else base
        if "reset" in flaws:
            self.base.reset_parameters()
        if "base trains" not in flaws:
            self.base.requires_grad_(False)
        if "bias trains" in flaws and self.base.bias is not None:
            self.base.bias.requires_grad_(True)
        like = {"dtype": base.weight.dtype}
        a = torch.randn(rank, base.in_features, **like) / math.sqrt(base.in_features)
        if "alike" in flaws:
            a = torch.ones(rank, base.in_features, **like)
        b = torch.zeros(base.out_features, rank, **like)
        if "both zero" in flaws:
            a = torch.zeros_like(a)
        if "both random" in flaws:
            b = torch.randn_like(b)
        if "hair" in flaws:
            b = 1e-7 * torch.randn_like(b)
        if {"float32", "float32 and casts"} & flaws:
            a, b = a.float(), b.float()
        if "buffers" in flaws:
            self.register_buffer("A", a)
            self.register_buffer("B", b)
        elif "unregistered" in flaws:
            self.hidden = [a.requires_grad_(), b.requires_grad_()]
        else:
            self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        if "third factor" in flaws:
            self.C = nn.Parameter(torch.eye(rank, **like))
        if "writes base" in flaws:
            self.B.register_hook(self.write)

    def write(self, grad):
        self.base.weight.data.mul_(1 + 1e-6)

    def factors(self):
        return self.hidden if "unregistered" in self.flaws else (self.A, self.B)

    def scale(self):
        for flaw, value in {
            "unscaled": 1.0, "no rank": self.alpha, "no alpha": 1 / self.rank, "root": self.alpha / math.sqrt(self.rank),
            "doubled": 2 * self.alpha / self.rank, "whole": self.alpha // self.rank,
        }.items():  # fmt: skip
            if flaw in self.flaws:
                return value
        return self.alpha / self.rank

    def forward(self, x):
        flaws = self.flaws
        if "drops all" in flaws:
            x = F.dropout(x, self.p, self.training)
        out = self.base(x)
        if self.merged and "still adds" not in flaws:
            return out
        a, b = self.factors()
        if "detached" in flaws:
            a, b = a.detach(), b.detach()
        x = x.detach() if "input detached" in flaws else x
        y = x
        if "float32 and casts" in flaws:
            return out + F.linear(F.linear(F.dropout(x, self.p, self.training).float(), a), b).to(out) * self.scale()
        if "always drops" in flaws:
            y = F.dropout(x, self.p, True)
        elif "not scaled up" in flaws and self.training and self.p:
            y = x * (torch.rand_like(x) >= self.p)
        elif "keeps p" in flaws:
            y = F.dropout(x, 1 - self.p if self.p else 0.0, self.training)
        elif not {"no dropout", "drops output", "drops hidden", "drops all"} & flaws:
            y = F.dropout(x, self.p, self.training)
        hidden = F.linear(y, a)
        if "drops hidden" in flaws:
            hidden = F.dropout(hidden, self.p, self.training)
        if "nonlinear" in flaws:
            hidden = torch.relu(hidden)
        update = F.linear(hidden, b)
        if "drops output" in flaws:
            update = F.dropout(update, self.p, self.training)
        if "instead" in flaws:
            return update * self.scale() + 0 * out
        return out + update * self.scale()


def flawed(*flaws):
    return type("LoRALinear", (Layer,), {"flaws": frozenset(flaws)})


for name, flaws, criterion, hint in [
    ("LORA-01 both factors zero", ["both zero"], "first steps", "both-zero"),
    ("LORA-02 both factors random", ["both random"], "output at the start", "start"),
    ("LORA-04 base still trains", ["base trains"], "trainable numbers", "base-trains"),
    ("LORA-04 the bias still trains", ["bias trains"], "trainable numbers", "base-trains"),
    ("LORA-05 factors are buffers", ["buffers"], "trainable numbers", "nothing-trains"),
    ("LORA-23 factors the module does not know", ["unregistered"], "trainable numbers", "nothing-trains"),
    ("LORA-26 base initialised again", ["reset"], "output at the start", "base-weights"),
    ("base copied", ["copies"], "one copy of the weight", "copy"),
    ("LORA-22 alpha not used", ["unscaled"], "the update", "unscaled"),
    ("not divided by the rank", ["no rank"], "the update", "no-rank"),
    ("divided by the rank, without alpha", ["no alpha"], "the update", "no-alpha"),
    ("divided by the root of the rank", ["root"], "the update", "root"),
    ("update doubled", ["doubled"], "the update", "twice"),
    ("alpha // rank", ["whole"], "the update", "scale"),
    ("factors detached in forward", ["detached"], "first steps", "no-update"),
    ("input detached", ["input detached"], "the update", "input-grad"),
    ("B random and tiny", ["hair"], "output at the start", "start"),
    ("factors in fp32, cast in forward", ["float32 and casts"], "other layers", "dtype"),
    ("all rows of A alike", ["alike"], "first steps", "alike"),
    ("ReLU between the factors", ["nonlinear"], "the update", "update"),
    ("a third factor", ["third factor"], "trainable numbers", "trainable"),
    ("dropout between the factors", ["drops hidden"], "dropout", "dropout-place"),
    ("factors in fp32 whatever the base", ["float32"], "runs", None),
    ("dropout on the base too", ["drops all"], "dropout", "dropout-base"),
    ("dropout in eval too", ["always drops"], "dropout", "dropout-mode"),
    ("dropout forgotten", ["no dropout"], "dropout", "dropout-none"),
    ("dropout without scaling up", ["not scaled up"], "dropout", "dropout-scale"),
    ("share to keep for share to drop", ["keeps p"], "dropout", "dropout-share"),
    ("dropout on the output", ["drops output"], "dropout", "dropout-place"),
    ("the update instead of the layer", ["instead"], "output at the start", "base-weights"),
    ("backward writes to the base", ["writes base"], "base untouched", "base-moves"),
]:
    wrong(name, check=LINEAR, criterion=criterion, hint=hint)(flawed(*flaws))


@wrong("seeds torch: the same numbers in every layer", check=LINEAR, criterion="first steps", hint="same-numbers")
class Seeded(Layer):
    def __init__(self, base, rank, alpha, dropout=0.0):
        torch.manual_seed(0)
        super().__init__(base, rank, alpha, dropout)


@wrong("the base in a list, where no module sees it", check=LINEAR, criterion="base untouched", hint="base-hidden")
class Hidden(Layer):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__(base, rank, alpha, dropout)
        del self.base
        self.kept = [base]

    def forward(self, x):
        y = F.dropout(x, self.p, self.training)
        return self.kept[0](x) + F.linear(F.linear(y, self.A), self.B) * self.scale()


@wrong("do nothing: the base as it is", check=LINEAR, criterion="trainable numbers", hint="base-trains")
def the_base(base, rank, alpha, dropout=0.0):
    return base


@wrong("do nothing: the base frozen", check=LINEAR, criterion="trainable numbers", hint="nothing-trains")
def the_frozen_base(base, rank, alpha, dropout=0.0):
    return base.requires_grad_(False)


@wrong("plain: a second full matrix", check=LINEAR, criterion="trainable numbers", hint="trainable")
class FullUpdate(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        self.base, self.delta = base.requires_grad_(False), nn.Parameter(torch.zeros_like(base.weight))

    def forward(self, x):
        return self.base(x) + F.linear(x, self.delta)


@wrong("returns a function", check=LINEAR, criterion="output at the start", hint="module")
def no_module(base, rank, alpha, dropout=0.0):
    return lambda x: base(x)


@wrong("forged: factors that do nothing", check=LINEAR, criterion="the update", hint="no-update")
class Decoration(Layer):
    def forward(self, x):
        return self.base(x) + 0 * (self.A.sum() + self.B.sum())


@wrong("the output loses the bias", check=LINEAR, criterion="output at the start", hint="base-weights")
class NoBias(Layer):
    def forward(self, x):
        return F.linear(x, self.base.weight) + F.linear(F.linear(F.dropout(x, self.p, self.training), self.A), self.B) * self.scale()


@wrong("two dimensions only", check=LINEAR, criterion="runs", hint="sizes")
class TwoDimensions(Layer):
    def forward(self, x):
        y = F.dropout(x, self.p, self.training)
        return (
            self.base(x) + (self.B @ (self.A @ y.t())).t() * self.scale()
            if x.dim() == 2
            else self.base(x) + y @ (self.B @ self.A @ self.A).t()
        )


# -- inject --


def put(model, path, module):
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def named(model, targets):
    return [(path, m) for path, m in model.named_modules() if path.rpartition(".")[2] in targets and isinstance(m, nn.Linear)]


def injector(find=named, *, layer=Layer, freeze="before", give="trainable", check_found=True, guard=True):
    def inject(model, rank, alpha, targets=("query", "value"), dropout=0.0):
        if guard and any(isinstance(module, Layer) for module in model.modules()):
            raise ValueError("there already")
        found = find(model, targets)
        if check_found and not found:
            raise ValueError("no such layer")
        if freeze == "before":
            model.requires_grad_(False)
        for path, linear in found:
            put(model, path, layer(linear, rank, alpha, dropout))
        if freeze == "after":
            model.requires_grad_(False)
        if freeze == "weights":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith((".A", ".B", "bias")))
        trainable = [p for p in model.parameters() if p.requires_grad]
        return {"trainable": trainable, "all": list(model.parameters()), "none": None, "A": trainable[::2]}[give]

    return inject


def by_substring(model, targets):
    return [(path, m) for path, m in model.named_modules() if any(t in path for t in targets) and isinstance(m, nn.Linear)]


def by_ending(model, targets):
    return [(path, m) for path, m in model.named_modules() if path.endswith(tuple(f".{t}" for t in targets)) and isinstance(m, nn.Linear)]


def query_only(model, targets):
    return named(model, targets[:1])


for name, inject, criterion, hint in [
    ("LORA-04 nothing frozen but the targets", injector(freeze="no"), "everything else", "frozen"),
    ("LORA-04 biases still train", injector(freeze="weights"), "everything else", "frozen"),
    ("LORA-05 adapters frozen too", injector(freeze="after"), "adapters", "all-frozen"),
    ("LORA-20 all parameters for the optimizer", injector(give="all"), "for the optimizer", "optimizer"),
    ("returns nothing", injector(give="none"), "for the optimizer", "optimizer"),
    ("returns A's only", injector(give="A"), "training", "training"),
    ("names a part of a target", injector(by_substring), "adapters", "extra"),
    ("misses the layer at the top", injector(by_ending), "adapters", "missing"),
    ("first target only", injector(query_only), "adapters", "missing"),
    ("quiet where nothing matches", injector(check_found=False), "edge cases", "no-match"),
    ("second call freezes the adapters", injector(guard=False, check_found=False), "edge cases", "again"),
    ("LORA-02 changes the model", injector(layer=flawed("both random")), "output at the start", "start"),
    ("rank doubled", injector(layer=lambda base, rank, alpha, p: Layer(base, 2 * rank, alpha, p)), "adapters", "count"),
    ("LORA-23 factors the model does not know", injector(layer=flawed("unregistered")), "output at the start", "all-frozen"),
    ("LORA-22 alpha lost on the way", injector(layer=lambda base, rank, alpha, p: Layer(base, rank, 1, p)), "training", "training"),
    ("square sizes: in for out", injector(layer=lambda base, rank, alpha, p: SquareOnly(base, rank, alpha, p)), "runs", "sizes"),
]:
    wrong(name, check=INJECT, criterion=criterion, hint=hint)(inject)


class SquareOnly(Layer):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__(base, rank, alpha, dropout)
        self.B = nn.Parameter(torch.zeros(base.in_features, rank))


@wrong("do nothing", check=INJECT, criterion="output at the start", hint="none")
def inject_nothing(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    return list(model.parameters())


@wrong("freezes, adds nothing", check=INJECT, criterion="output at the start", hint="all-frozen")
def inject_freezes(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    model.requires_grad_(False)
    return []


@wrong("freezes, returns parameters of no layer", check=INJECT, criterion="output at the start", hint="all-frozen")
def inject_elsewhere(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    model.requires_grad_(False)
    return [nn.Parameter(torch.zeros(rank, linear.in_features)) for _, linear in named(model, targets)]


@wrong("freezes before it refuses a second call", check=INJECT, criterion="edge cases", hint="again")
def inject_freezing_first(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    model.requires_grad_(False)
    return injector()(model, rank, alpha, targets, dropout)


@wrong("another kind of error where nothing matches", check=INJECT, criterion="edge cases", hint="other-error")
def inject_asserting(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    assert named(model, targets), "no such layer"
    return injector()(model, rank, alpha, targets, dropout)


@wrong("dropout not handed on", check=INJECT, criterion="edge cases", hint="dropout")
def inject_undropped(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    return injector()(model, rank, alpha, targets)


@wrong("LORA-10 adapters on a copy", check=INJECT, criterion="output at the start", hint="none")
def inject_on_a_copy(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    return injector()(copy.deepcopy(model), rank, alpha, targets, dropout)


@wrong("adapters registered beside, never run", check=INJECT, criterion="training", hint="training")
def inject_beside(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    found = named(model, targets)
    if not found:
        raise ValueError("no such layer")
    model.requires_grad_(False)
    for _, linear in found:
        if not hasattr(linear, "A"):
            linear.A = nn.Parameter(torch.randn(rank, linear.in_features))
            linear.B = nn.Parameter(torch.zeros(linear.out_features, rank))
    return [p for _, m in found for p in (m.A, m.B)]


@wrong("LORA-08 adapter on adapter in the second call", check=INJECT, criterion="edge cases", hint="again")
def inject_nested(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    found = [(p, m) for p, m in model.named_modules() if p.rpartition(".")[2] in targets and isinstance(m, nn.Linear | Layer)]
    if not found:
        raise ValueError("no such layer")
    model.requires_grad_(False)
    for path, module in found:
        if isinstance(module, Layer):
            module.in_features, module.out_features, module.weight = module.base.in_features, module.base.out_features, module.base.weight
            put(model, path, Nested(module, rank, alpha, dropout))
        else:
            put(model, path, Layer(module, rank, alpha, dropout))
    return [p for p in model.parameters() if p.requires_grad]


class Nested(Layer):
    flaws = frozenset(["bias trains none"])


@wrong("replaces the head by a new Linear", check=INJECT, criterion="output at the start", hint="start")
def inject_new_linear(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    def fresh(linear, *rest):
        return Layer(nn.Linear(linear.in_features, linear.out_features, linear.bias is not None), *rest)

    return injector(layer=fresh)(model, rank, alpha, targets, dropout)


@wrong("LORA-23 state dict without the adapters", check=INJECT, criterion="state dict", hint="state-dict")
def inject_hidden_state(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    return injector(layer=Forgetful)(model, rank, alpha, targets, dropout)


class Forgetful(Layer):
    def __init__(self, *args):
        super().__init__(*args)
        self._register_state_dict_hook(lambda module, state, prefix, _: [state.pop(f"{prefix}{n}", None) for n in "AB"] and None)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, *rest):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *rest)
        missing[:] = [key for key in missing if not key.endswith((".A", ".B"))]


# -- merge --


def layers(model):
    return [module for module in model.modules() if isinstance(module, Layer)]


def delta(layer, dtype=torch.float32):
    return (layer.B.to(dtype) @ layer.A.to(dtype) * (layer.alpha / layer.rank)).detach()


def add(layer, update):
    with torch.no_grad():
        layer.base.weight.copy_(layer.base.weight.float() + update)


def merge(model):
    for layer in layers(model):
        if not layer.merged:
            add(layer, delta(layer))
            layer.merged = True


def unmerge(model):
    for layer in layers(model):
        if layer.merged:
            add(layer, -delta(layer))
            layer.merged = False


def nothing(model):
    return None


wrong("do nothing", check=MERGE, criterion="work when merged", hint="no-effect")((injector(), nothing, nothing))
wrong("LORA-25 unmerge does nothing", check=MERGE, criterion="unmerged", hint="restore")((injector(), merge, nothing))


def merge_without_flag(model):
    for layer in layers(model):
        add(layer, delta(layer))
        layer.merged = True


def unmerge_without_flag(model):
    for layer in layers(model):
        add(layer, -delta(layer))
        layer.merged = False


wrong("LORA-08 merged twice adds twice", check=MERGE, criterion="merged twice", hint="merged-twice")(
    (injector(), merge_without_flag, unmerge)
)
wrong("LORA-08 unmerged twice takes twice", check=MERGE, criterion="unmerged", hint="unmerged-twice")(
    (injector(), merge, unmerge_without_flag)
)
wrong("forward adds the update still", check=MERGE, criterion="output when merged", hint="still-adds")(
    (injector(layer=flawed("still adds")), merge, unmerge)
)


def merge_zeroing(model):
    for layer in layers(model):
        if not layer.merged:
            add(layer, delta(layer))
            layer.merged = True
            layer.B.data.zero_()


wrong("factors lost in merging", check=MERGE, criterion="unmerged", hint="restore")((injector(), merge_zeroing, unmerge))


def merge_kept_running(model):
    for layer in layers(model):
        if not hasattr(layer, "kept"):
            add(layer, delta(layer))
            layer.kept = layer.B.detach().clone()
            layer.B.data.zero_()


def unmerge_kept_running(model):
    for layer in layers(model):
        if hasattr(layer, "kept"):
            layer.B.data.copy_(layer.kept)
            del layer.kept
            add(layer, -delta(layer))


wrong("zero factors multiplied still", check=MERGE, criterion="work when merged", hint="still-adds")(
    (injector(), merge_kept_running, unmerge_kept_running)
)


def changed(function):
    """merge and unmerge that add `function(layer)` instead."""

    def merge_other(model):
        for layer in layers(model):
            if not layer.merged:
                add(layer, function(layer))
                layer.merged = True

    def unmerge_other(model):
        for layer in layers(model):
            if layer.merged:
                add(layer, -function(layer))
                layer.merged = False

    return merge_other, unmerge_other


def transposed_where_square(layer):
    update = delta(layer)
    return update.T if update.shape[0] == update.shape[1] else update


wrong("LORA-11 transposed where square", check=MERGE, criterion="output when merged", hint="transposed")(
    (injector(), *changed(transposed_where_square))
)
wrong("LORA-22 merged without the scale", check=MERGE, criterion="output when merged", hint="scaled")(
    (injector(), *changed(lambda layer: (layer.B @ layer.A).detach()))
)
wrong("adds another matrix", check=MERGE, criterion="output when merged", hint="output")(
    (injector(), *changed(lambda layer: delta(layer) + 0.1 * layer.base.weight.float().abs().mean()))
)


def merge_on_a_copy(model):
    for layer in layers(model):
        add(copy.deepcopy(layer), delta(layer))


wrong("LORA-10 merged into a copy", check=MERGE, criterion="work when merged", hint="no-effect")((injector(), merge_on_a_copy, nothing))


class MergesInEval(Layer):
    def eval(self):
        if not self.merged:
            add(self, delta(self))
            self.merged = True
        return super().eval()


wrong("LORA-07 merged in an overridden eval()", check=MERGE, criterion="work when merged", hint="no-effect")(
    (injector(layer=MergesInEval), lambda model: model.eval(), lambda model: model.train())
)


def merge_first(model):
    for layer in layers(model)[:1]:
        if not layer.merged:
            add(layer, delta(layer))
            layer.merged = True


wrong("first layer only", check=MERGE, criterion="work when merged", hint="still-adds")((injector(), merge_first, unmerge))


def sixteen(model, sign, state):
    for layer in layers(model):
        if layer.merged == state:
            continue
        with torch.no_grad():
            layer.base.weight.add_(layer.B @ layer.A * (layer.alpha / layer.rank), alpha=sign)
        layer.merged = state


wrong("LORA-14 added in 16 bit", check=MERGE, criterion="16-bit weights", hint="rounding")(
    (injector(), lambda model: sixteen(model, 1, True), lambda model: sixteen(model, -1, False))
)


def merge_in_bfloat16(model):
    for layer in layers(model):
        if not layer.merged:
            add(layer, delta(layer, torch.bfloat16).float())
            layer.merged = True


wrong("LORA-14 update in 16 bit, whatever the weight", check=MERGE, criterion="output when merged", hint="output")(
    (injector(), merge_in_bfloat16, unmerge)
)


def unmerge_drops(model):
    for path, layer in [(p, m) for p, m in model.named_modules() if isinstance(m, Layer)]:
        add(layer, -delta(layer))
        put(model, path, layer.base)


wrong("adapters gone after unmerging", check=MERGE, criterion="unmerged", hint="frees")((injector(), merge, unmerge_drops))


def unmerge_frozen(model):
    unmerge(model)
    model.requires_grad_(False)


wrong("factors frozen after unmerging", check=MERGE, criterion="unmerged", hint="frees")((injector(), merge, unmerge_frozen))


def unmerge_rounded(model):
    for layer in layers(model):
        if layer.merged:
            add(layer, -delta(layer, torch.bfloat16).float())
            layer.merged = False


wrong("LORA-13 takes away another rounding", check=MERGE, criterion="unmerged", hint="restore")((injector(), merge, unmerge_rounded))


def unmerge_zeroing(model):
    unmerge(model)
    for layer in layers(model):
        nn.init.zeros_(layer.B)


wrong("factors emptied after unmerging", check=MERGE, criterion="unmerged", hint="frees")((injector(), merge, unmerge_zeroing))


# -- adapter files --

PREFIX = "base_model.model."


def at(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, Layer)}


def saver(*flaws):
    """save_adapter with the flaws named."""

    def save_adapter(model, folder):
        folder = Path(folder)
        if "unmerges" in flaws:
            unmerge(model)
        folder.mkdir(parents=True, exist_ok="new folders only" not in flaws)
        tensors, found = {}, at(model)
        prefix = "" if "no prefix" in flaws else "model." if "half prefix" in flaws else PREFIX
        for path, layer in found.items():
            a, b = layer.A.detach().clone(), layer.B.detach().clone()
            if "scale in B" in flaws:
                b = b * (layer.alpha / layer.rank)
            if "from weights" in flaws and layer.merged:
                b = torch.zeros_like(b)
            if "transposed" in flaws:
                a, b = a.T.contiguous(), b.T.contiguous()
            if "swapped" in flaws:
                a, b = b, a
            tensors[f"{prefix}{path}.lora_A.weight"] = a
            tensors[f"{prefix}{path}.lora_B.weight"] = b
        if "whole" in flaws:
            tensors |= {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if "one layer" in flaws:
            tensors = dict(list(tensors.items())[:2])
        if "half" in flaws:
            tensors = {name: tensor.half() for name, tensor in tensors.items()}
        name = "adapter.safetensors" if "file name" in flaws else "adapter_model.safetensors"
        save_file(tensors, folder / name)
        one = next(iter(found.values()))
        config = {
            "peft_type": "LORA",
            "r": one.rank,
            "lora_alpha": one.alpha,
            "target_modules": sorted({p.rpartition(".")[2] for p in found}),
        }
        for flaw, change in {
            "no alpha": {"lora_alpha": None}, "alpha is the scale": {"lora_alpha": one.alpha / one.rank},
            "other key": {"alpha": config.pop("lora_alpha")} if "other key" in flaws else {}, "no type": {"peft_type": None},
            "fixed targets": {"target_modules": ["query", "key"]}, "no r": {"r": None},
        }.items():  # fmt: skip
            if flaw in flaws:
                config |= change
        if "whole alpha" in flaws:
            config["lora_alpha"] = int(one.alpha)
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return save_adapter


def loader(*flaws):
    """load_adapter with the flaws named."""

    def load_adapter(model, folder):
        folder = Path(folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        rank, alpha, targets = config["r"], config["lora_alpha"], config["target_modules"]
        if "alpha is r" in flaws:
            alpha = rank
        if "targets of the tensors" in flaws:
            targets = {name.split(".")[-3] for name in tensors}
        if "own targets" in flaws:
            targets = ("query", "value")
        if "nothing" in flaws:
            return
        injector()(model, rank, alpha, targets)
        used = set()
        for path, layer in at(model).items():
            for letter, factor in (("A", layer.A), ("B", layer.B)):
                key = f"{PREFIX}{path}.lora_{letter}.weight"
                if "swapped" in flaws:
                    key = f"{PREFIX}{path}.lora_{'B' if letter == 'A' else 'A'}.weight"
                if "lenient" in flaws and key not in tensors:
                    continue
                given = tensors[key]
                if "any shape" not in flaws and given.shape != factor.shape:
                    raise ValueError("shape")
                factor.data.copy_(given)
                used.add(key)
        if not {"extra is fine", "lenient"} & set(flaws) and set(tensors) - used:
            raise ValueError("left over")

    return load_adapter


for name, save_flaws, load_flaws, criterion, hint in [
    ("LORA-16 the whole model saved", ["whole"], ["extra is fine"], "only the adapter", "whole"),
    ("LORA-16 one layer saved", ["one layer"], ["lenient"], "loaded onto a fresh base", "loaded"),
    ("LORA-17 names without their prefix, nothing loaded", ["no prefix"], ["lenient"], "loaded onto a fresh base", "same-as-base"),
    ("LORA-17 loader skips what it does not know", [], ["lenient"], "what does not fit", "misfit"),
    ("loads nothing", [], ["nothing"], "loaded onto a fresh base", "same-as-base"),
    ("LORA-22 alpha of the file not read", [], ["alpha is r"], "loaded onto a fresh base", "loaded"),
    ("alpha is the scale in the file", ["alpha is the scale"], [], "loaded onto a fresh base", "loaded"),
    ("scale folded into B, and alpha too", ["scale in B"], [], "loaded onto a fresh base", "loaded"),
    ("no peft_type", ["no type"], [], "configuration", "config"),
    ("targets that are not the model's", ["fixed targets"], ["own targets"], "configuration", "config"),
    ("targets by habit", [], ["own targets", "lenient"], "others' files", "same-as-base"),
    ("saved in 16 bit", ["half"], [], "loaded onto a fresh base", "rounded"),
    ("another file name", ["file name"], [], "loaded onto a fresh base", "files"),
    ("leftovers are fine", [], ["extra is fine"], "what does not fit", "misfit"),
    ("any shape that broadcasts", [], ["any shape"], "what does not fit", "misfit"),
    ("layers by the tensors' names, not by the configuration", [], ["targets of the tensors"], "what does not fit", "misfit"),
    ("int(alpha)", ["whole alpha"], [], "loaded onto a fresh base", "loaded"),
    ("LORA-25 saving leaves the model unmerged", ["unmerges"], [], "saved while merged", "changed"),
    ("fails where the folder exists", ["new folders only"], [], "saved while merged", "existing"),
    ("LORA-25 zeros saved while merged", ["from weights"], [], "saved while merged", "merged"),
]:
    wrong(name, check=ADAPTER, criterion=criterion, hint=hint)((injector(), merge, saver(*save_flaws), loader(*load_flaws)))


def own_names(save):
    """Both sides agree on names and shapes of their own: it works, and nobody else can read it."""

    def rename(name):
        return name.removeprefix(PREFIX).replace(".lora_", ".").replace(".weight", "")

    def save_adapter(model, folder):
        saver()(model, folder)
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        if save == "names":
            tensors = {rename(name): t for name, t in tensors.items()}
        else:
            tensors = {name: t.T.contiguous() for name, t in tensors.items()}
        save_file(tensors, Path(folder) / "adapter_model.safetensors")

    def load_adapter(model, folder):
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        injector()(model, config["r"], config["lora_alpha"], config["target_modules"])
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        for path, layer in at(model).items():
            for letter, factor in (("A", layer.A), ("B", layer.B)):
                key = f"{PREFIX}{path}.lora_{letter}.weight"
                given = tensors.pop(rename(key) if save == "names" else key)
                if save == "shapes":
                    given = given.T
                if given.shape != factor.shape:
                    raise ValueError("shape")
                factor.data.copy_(given)
        if tensors:
            raise ValueError("left over")

    return save_adapter, load_adapter


wrong("names of one's own on both sides", check=ADAPTER, criterion="PEFT's names and shapes", hint="names")(
    (injector(), merge, *own_names("names"))
)
wrong("transposed on both sides", check=ADAPTER, criterion="PEFT's names and shapes", hint="shapes")(
    (injector(), merge, *own_names("shapes"))
)


def save_and_unmerge(model, folder):
    unmerge(model)
    for layer in layers(model):
        layer.merged = True
    saver()(model, folder)


wrong("LORA-25 saving changes the merged model", check=ADAPTER, criterion="saved while merged", hint="changed")(
    (injector(), merge, save_and_unmerge, loader())
)


def nothing_at_all(model, folder):
    return None


wrong("do nothing", check=ADAPTER, criterion="loaded onto a fresh base", hint="files")((injector(), merge, nothing_at_all, nothing_at_all))


CACHE: dict = {}


def save_in_memory(model, folder):
    saver()(model, folder)
    CACHE["last"] = {
        path: (layer.A.detach().clone(), layer.B.detach().clone(), layer.rank, layer.alpha) for path, layer in at(model).items()
    }


def load_from_memory(model, folder):
    one = next(iter(CACHE["last"].values()))
    injector()(model, one[2], one[3], ("query", "value"))
    for path, layer in at(model).items():
        layer.A.data.copy_(CACHE["last"][path][0])
        layer.B.data.copy_(CACHE["last"][path][1])


wrong("forged: kept in memory, the file not read", check=ADAPTER, criterion="runs", hint=None)(
    (injector(), merge, save_in_memory, load_from_memory)
)
