"""Right LoRA in other forms: every one must get full points."""

import json
import math
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tests.labs.corpus import right

LINEAR, INJECT, MERGE, ADAPTER = "lora.linear", "lora.inject", "lora.merge", "lora.adapter"


@right("subclass of Linear that takes the base's tensors", check=LINEAR)
class Subclass(nn.Linear):
    def __init__(self, base, rank, alpha, dropout=0.0):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(base.in_features, rank, dtype=base.weight.dtype) / math.sqrt(rank))
        self.lora_B = nn.Parameter(torch.zeros(rank, base.out_features, dtype=base.weight.dtype))
        self.rank, self.alpha, self.drop, self.merged = rank, alpha, nn.Dropout(dropout), False

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + self.drop(x) @ self.lora_A @ self.lora_B * (self.alpha / self.rank)

    def update(self):
        return (self.lora_A @ self.lora_B).T * (self.alpha / self.rank)

    def ab(self):
        return self.lora_A.T, self.lora_B.T


@right("two Linears without bias", check=LINEAR)
class TwoLinears(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        self.linear = base
        for parameter in base.parameters():
            parameter.requires_grad = False
        like = {"bias": False, "dtype": base.weight.dtype}
        self.down, self.up = nn.Linear(base.in_features, rank, **like), nn.Linear(rank, base.out_features, **like)
        nn.init.zeros_(self.up.weight)
        self.drop, self.scale, self.rank, self.alpha, self.merged = nn.Dropout(dropout), alpha / rank, rank, alpha, False

    def forward(self, x):
        out = self.linear(x)
        return out if self.merged else out + self.scale * self.up(self.down(self.drop(x)))

    def update(self):
        return self.scale * self.up.weight @ self.down.weight

    def ab(self):
        return self.down.weight, self.up.weight


@right("A zero, B random", check=LINEAR)
class Mirrored(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        self.base, self.p, self.rank, self.alpha, self.merged = base.requires_grad_(False), dropout, rank, alpha, False
        self.B = nn.Parameter(torch.randn(base.out_features, rank).to(base.weight) / rank)
        self.A = nn.Parameter(torch.zeros(rank, base.in_features).to(base.weight))

    def forward(self, x):
        if self.merged:
            return self.base(x)
        y = F.dropout(x, self.p, training=self.training)
        return self.base(x) + torch.einsum("...i,ri,or->...o", y, self.A, self.B).mul(self.alpha).div(self.rank)

    def update(self):
        return self.alpha * self.B @ self.A / self.rank

    def ab(self):
        return self.A, self.B


class LowRank(nn.Module):
    """W + s B A, with input features of A dropped for a whole call."""

    def __init__(self, weight, rank, alpha, p):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, weight.shape[1]).to(weight) / rank)
        self.B = nn.Parameter(torch.zeros(weight.shape[0], rank).to(weight))
        self.rank, self.alpha, self.p = rank, alpha, p

    def forward(self, weight):
        kept = F.dropout(torch.ones(self.A.shape[1]).to(self.A), self.p, self.training)
        return weight + self.B @ (self.A * kept) * (self.alpha / self.rank)

    def update(self):
        return self.B @ self.A * (self.alpha / self.rank)


@right("a parametrization of the base's weight", check=LINEAR)
def parametrized(base, rank, alpha, dropout=0.0):
    base.requires_grad_(False)
    parametrize.register_parametrization(base, "weight", LowRank(base.weight, rank, alpha, dropout))
    return base


def add_update(module, args, out):
    y = F.dropout(args[0], module.p, module.training)
    return out + (y @ module.A.T) @ module.B.T * (module.alpha / module.rank)


@right("a forward hook on the base", check=LINEAR)
def hooked(base, rank, alpha, dropout=0.0):
    base.requires_grad_(False)
    base.rank, base.alpha, base.p = rank, alpha, dropout
    base.A = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype))
    base.B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))
    base.handle = base.register_forward_hook(add_update)
    return base


@right("weight summed up in forward", check=LINEAR)
class SummedWeight(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        self.base, self.p, self.scale = base, dropout, alpha / rank
        base.weight.requires_grad_(False)
        if base.bias is not None:
            base.bias.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features, dtype=base.weight.dtype).normal_(std=0.02))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x):
        if self.training and self.p:
            return self.base(x) + F.linear(F.dropout(x, self.p), self.scale * self.B @ self.A)
        return F.linear(x, self.base.weight + self.scale * self.B @ self.A, self.base.bias)


@right("A scaled beforehand, a mask of one's own for dropout", check=LINEAR)
class OwnMask(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        self.inner, self.keep, self.rank = base.requires_grad_(False), 1 - dropout, rank
        self.register_buffer("scaling", torch.tensor(alpha / rank, dtype=base.weight.dtype))
        self.pair = nn.ParameterList(
            [torch.zeros(base.out_features, rank).to(base.weight), torch.rand(rank, base.in_features).to(base.weight)]
        )

    def forward(self, x):
        y = x
        if self.training and self.keep < 1:
            y = x * (torch.rand_like(x) < self.keep) / self.keep
        b, a = self.pair
        return torch.matmul(torch.matmul(y, (a * self.scaling).transpose(0, 1)), b.transpose(0, 1)).add(self.inner(x))


@right("the base read by functional_call", check=LINEAR)
class Functional(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        base.requires_grad_(False)
        self.add_module("wrapped", base)
        self.r, self.lora_alpha, self.dropout = int(rank), float(alpha), nn.Dropout(dropout) if dropout else nn.Identity()
        with torch.no_grad():
            self.lora = nn.ParameterDict({"A": nn.init.orthogonal_(torch.empty(rank, base.in_features)).to(base.weight),
                                          "B": torch.zeros_like(base.weight[:, :1]).repeat(1, rank)})  # fmt: skip

    def forward(self, x):
        return self.wrapped.forward(x) + (self.lora_alpha / self.r) * F.linear(F.linear(self.dropout(x), self.lora["A"]), self.lora["B"])


@right("A in columns, in a Linear of its own class, the base's tensors as attributes", check=LINEAR)
class Attributes(nn.Module):
    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False).to(base.weight)
        self.b = nn.Parameter(base.weight.new_zeros(rank, base.out_features))
        self.p, self.scale = dropout, alpha / rank

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return torch.add(y, self.a(F.dropout(x, self.p, self.training)) @ self.b, alpha=self.scale)


# -- inject --


def put(model, path, module):
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def injector(layer):
    def inject(model, rank, alpha, targets=("query", "value"), dropout=0.0):
        if any(isinstance(module, layer) for module in model.modules()):
            raise ValueError("adapters are there")
        found = [path for path, m in model.named_modules() if path.split(".")[-1] in targets and type(m) is nn.Linear]
        if not found:
            raise ValueError("no such layer")
        for parameter in model.parameters():
            parameter.requires_grad = False
        for path in found:
            put(model, path, layer(model.get_submodule(path), rank, alpha, dropout))
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    return inject


right("subclass of Linear", check=INJECT)(injector(Subclass))
right("two Linears", check=INJECT)(injector(TwoLinears))
right("A zero, B random", check=INJECT)(injector(Mirrored))


def in_place(layer, has):
    """For layers that stay the Linear they are."""

    def inject(model, rank, alpha, targets=("query", "value"), dropout=0.0):
        linears = [m for path, m in model.named_modules() if path.rpartition(".")[2] in targets and isinstance(m, nn.Linear)]
        if not linears:
            raise ValueError("no such layer")
        if not any(has(m) for m in linears):
            model.requires_grad_(False)
            for linear in linears:
                layer(linear, rank, alpha, dropout)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    return inject


right("parametrizations", check=INJECT)(in_place(parametrized, parametrize.is_parametrized))
right("forward hooks", check=INJECT)(in_place(hooked, lambda m: hasattr(m, "handle")))


@right("recursion over children, freezing afterwards, a tuple", check=INJECT)
def by_recursion(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    made = []

    def visit(module):
        for name, child in list(module.named_children()):
            if isinstance(child, TwoLinears):
                made.append(child)
            elif name in targets and isinstance(child, nn.Linear):
                made.append(TwoLinears(child, rank, alpha, dropout))
                setattr(module, name, made[-1])
            else:
                visit(child)

    visit(model)
    if not made:
        raise ValueError(f"none of {targets} found")
    mine = [p for layer in made for p in (layer.down.weight, layer.up.weight)]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is p for p in mine))
    return tuple(mine)


# -- merge --


def of(layer):
    def layers(model):
        return [m for m in model.modules() if isinstance(m, layer)]

    return layers


def base_of(layer):
    return layer.linear if isinstance(layer, TwoLinears) else layer.base if isinstance(layer, Mirrored) else layer


def by_backup(kind):
    """merge that keeps the plain weight, unmerge that puts it back."""

    @torch.no_grad()
    def merge(model):
        for layer in of(kind)(model):
            if layer.merged:
                continue
            weight = base_of(layer).weight
            layer.kept = weight.clone()
            wide = [factor.double() for factor in layer.ab()]
            weight.copy_(weight.double() + layer.alpha / layer.rank * wide[1] @ wide[0])
            layer.merged = True

    @torch.no_grad()
    def unmerge(model):
        for layer in of(kind)(model):
            if layer.merged:
                base_of(layer).weight.copy_(layer.kept)
                del layer.kept
                layer.merged = False

    return merge, unmerge


right("a backup of the weight, fp64 sums", check=MERGE)((injector(TwoLinears), *by_backup(TwoLinears)))
right("a backup, A zero and B random", check=MERGE)((injector(Mirrored), *by_backup(Mirrored)))


def merge_by_data(model):
    for layer in of(Subclass)(model):
        if not layer.merged:
            a, b = (factor.detach().float() for factor in layer.ab())
            layer.weight.data = (layer.weight.data.float() + layer.alpha / layer.rank * (b @ a)).to(layer.weight.dtype)
        layer.merged = True


def unmerge_by_data(model):
    for layer in of(Subclass)(model):
        if layer.merged:
            a, b = (factor.detach().float() for factor in layer.ab())
            layer.weight.data = (layer.weight.data.float() - layer.alpha / layer.rank * (b @ a)).to(layer.weight.dtype)
        layer.merged = False


right("the weight's data replaced", check=MERGE)((injector(Subclass), merge_by_data, unmerge_by_data))


class Plain(nn.Linear):
    """A merged layer that remembers what it was."""


def merge_into_new(model):
    for path, layer in [(p, m) for p, m in model.named_modules() if isinstance(m, TwoLinears)]:
        old = layer.linear
        new = Plain(old.in_features, old.out_features, old.bias is not None, dtype=old.weight.dtype)
        a, b = (factor.detach().float() for factor in layer.ab())
        new.weight.data.copy_(old.weight.detach().float() + layer.scale * b @ a)
        if old.bias is not None:
            new.bias = old.bias
        new.requires_grad_(False)
        object.__setattr__(new, "was", layer)
        put(model, path, new)


def unmerge_from_new(model):
    for path, layer in [(p, m) for p, m in model.named_modules() if isinstance(m, Plain)]:
        put(model, path, layer.was)


right("a new Linear, the old layer put back", check=MERGE)((injector(TwoLinears), merge_into_new, unmerge_from_new))


def hooked_layers(model):
    return [m for m in model.modules() if hasattr(m, "handle")]


@torch.no_grad()
def merge_hooked(model):
    for m in hooked_layers(model):
        if m.handle is not None:
            m.weight.copy_(m.weight.float() + m.alpha / m.rank * m.B.float() @ m.A.float())
            m.handle.remove()
            m.handle = None


@torch.no_grad()
def unmerge_hooked(model):
    for m in hooked_layers(model):
        if m.handle is None:
            m.weight.copy_(m.weight.float() - m.alpha / m.rank * m.B.float() @ m.A.float())
            m.handle = m.register_forward_hook(add_update)


right("the hook removed and registered again", check=MERGE)(
    (in_place(hooked, lambda m: hasattr(m, "handle")), merge_hooked, unmerge_hooked)
)


# -- adapter files --


def named(kind, model):
    return {path: module for path, module in model.named_modules() if isinstance(module, kind)}


def files(kind, inject):
    def save_adapter(model, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors, layers = {}, named(kind, model)
        for path, layer in layers.items():
            for letter, factor in zip("AB", layer.ab(), strict=True):
                tensors[f"base_model.model.{path}.lora_{letter}.weight"] = factor.detach().clone().contiguous()
        save_file(tensors, str(Path(folder, "adapter_model.safetensors")), metadata={"format": "pt"})
        one = list(layers.values())[0]
        with open(Path(folder, "adapter_config.json"), "w") as file:
            json.dump({"r": one.rank, "lora_alpha": float(one.alpha), "lora_dropout": 0.0, "bias": "none", "peft_type": "LORA",
                       "target_modules": [path for path in layers], "inference_mode": True}, file)  # fmt: skip

    def load_adapter(model, folder):
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        names = {name.split(".")[-1] for name in config["target_modules"]}
        inject(model, config["r"], config["lora_alpha"], tuple(names))
        wanted = {}
        for path, layer in named(kind, model).items():
            for letter, factor in zip("AB", layer.ab(), strict=True):
                wanted[f"base_model.model.{path}.lora_{letter}.weight"] = factor
        with safe_open(str(Path(folder, "adapter_model.safetensors")), "pt") as file:
            assert set(file.keys()) == set(wanted), "other names"
            for name, factor in wanted.items():
                tensor = file.get_tensor(name)
                assert tensor.shape == factor.shape, "other shape"
                with torch.no_grad():
                    factor.copy_(tensor)
        return model

    return save_adapter, load_adapter


for kind in (Subclass, TwoLinears, Mirrored):
    merge = merge_by_data if kind is Subclass else by_backup(kind)[0]
    right(f"{kind.__name__}: full paths as targets, safe_open", check=ADAPTER)((injector(kind), merge, *files(kind, injector(kind))))


def save_by_state_dict(model, folder):
    """From the names of trainable parameters, with the scale folded into B: alpha = r in the file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, layer in named(TwoLinears, model).items():
        a, b = layer.ab()
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.detach().clone()
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.detach() * layer.scale
    data = safetensors.torch.save(tensors)
    (folder / "adapter_model.safetensors").write_bytes(data)
    layers = named(TwoLinears, model)
    rank = next(iter(layers.values())).rank
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list({path.split(".")[-1] for path in layers})}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_by_check_first(model, folder):
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    paths = {path for path, m in model.named_modules() if isinstance(m, nn.Linear) and path.rpartition(".")[2] in config["target_modules"]}
    if set(tensors) != {f"base_model.model.{path}.lora_{letter}.weight" for path in paths for letter in "AB"}:
        raise RuntimeError("the names do not fit")
    injector(TwoLinears)(model, config["r"], config["lora_alpha"], config["target_modules"])
    for path, layer in named(TwoLinears, model).items():
        layer.load_state_dict(
            {
                "down.weight": tensors[f"base_model.model.{path}.lora_A.weight"],
                "up.weight": tensors[f"base_model.model.{path}.lora_B.weight"],
            }
            | {f"linear.{name}": value for name, value in layer.linear.state_dict().items()}
        )


right("scale folded into B, names checked first", check=ADAPTER)(
    (injector(TwoLinears), by_backup(TwoLinears)[0], save_by_state_dict, load_by_check_first)
)


def read_either_names(model, folder):
    """Takes the names with PEFT's prefix and without it, and knows of every tensor whether it was used."""
    config = json.loads((folder / "adapter_config.json").read_text())
    injector(TwoLinears)(model, config["r"], config["lora_alpha"], {path.rpartition(".")[2] for path in config["target_modules"]})
    renamed = {
        key.removeprefix("base_model.model.").replace(".lora_A.", ".down.").replace(".lora_B.", ".up."): tensor
        for key, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    if unexpected or any(".down." in key or ".up." in key for key in missing):
        raise RuntimeError("the file does not fit")


right("load_state_dict, its two lists looked at", check=ADAPTER)(
    (injector(TwoLinears), by_backup(TwoLinears)[0], files(TwoLinears, injector(TwoLinears))[0], read_either_names)
)
