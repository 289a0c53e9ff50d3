"""Check "lora.adapter": only the adapter saved, in the layout that PEFT reads, and loaded onto a fresh base."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._lora_hints import ADAPTER_HINTS, on_error
from labkit.checks._lora_inject import refuses
from labkit.checks._lora_nets import close, effective, make_net, net_with, paths_of, randomise, tensor_result, trainable

FILES = ("adapter_config.json", "adapter_model.safetensors")
PREFIX = "base_model.model."
MISFITS = ("a tensor too many", "a tensor missing", "all of one target missing", "names without their prefix", "another rank than it says")


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def case(name: str, targets: list[str], rank: int, alpha: float, covers: tuple[str, ...] | None = None, **more: Any) -> Case:
        seed = int(torch.randint(1, 2**31, (), generator=generator))
        return Case(name, {"targets": targets, "rank": rank, "alpha": alpha, "seed": seed} | more, covers=covers)

    cases = [
        case("query and value, alpha no whole number", ["query", "value"], 3, 7.5),
        case("somebody else's file", ["key", "out"], 2, 5, ("others' files",), scenario="theirs"),
        case("files that do not fit", ["query", "value"], 2, 4, ("what does not fit",), scenario="misfits"),
        case("saved while merged", ["query", "value"], 4, 2, ("saved while merged",), scenario="merged"),
    ]
    if strict:
        cases += [
            case("value alone", ["value"], 2, 1),
            case("somebody else's, again", ["value", "query", "value_scale"], 6, 1.5, ("others' files",), scenario="theirs"),
        ]
    return cases


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration in the folder, or WrongResult where they cannot be read."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not set(FILES) <= set(found):
        raise WrongResult(f"the folder holds {', '.join(found) or 'nothing'}, expected {' and '.join(FILES)}", "files")
    try:
        tensors, config = load_file(folder / FILES[1]), json.loads((folder / FILES[0]).read_text())
    except Exception as error:
        raise WrongResult(f"a file cannot be read: {error}", "files") from None
    if not isinstance(config, dict):
        raise WrongResult(f"adapter_config.json holds a {type(config).__name__}, expected names and values", "config")
    return tensors, config


def write_theirs(folder: Path, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """An adapter as PEFT writes it, with random factors: the same for the same seed. Returns its tensors."""
    net, _, _ = make_net(values["seed"])
    generator = torch.Generator().manual_seed(values["seed"])
    tensors = {}
    for path in paths_of(values["targets"]):
        linear = net.get_submodule(path)
        tensors[f"{PREFIX}{path}.lora_A.weight"] = 0.4 * torch.randn(values["rank"], linear.in_features, generator=generator)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = 0.4 * torch.randn(linear.out_features, values["rank"], generator=generator)
    config = {
        "base_model_name_or_path": None, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "lora_alpha": values["alpha"],
        "lora_dropout": 0.1, "modules_to_save": None, "peft_type": "LORA", "r": values["rank"], "target_modules": values["targets"],
        "task_type": None, "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    save_file(tensors, folder / FILES[1], metadata={"format": "pt"})
    (folder / FILES[0]).write_text(json.dumps(config))
    return tensors


def _probe(candidate: Any, case: Case) -> Observation:
    torch.manual_seed(case.values["seed"] + 1)
    scenarios = {"theirs": _theirs, "misfits": _misfits, "merged": _merged}
    with tempfile.TemporaryDirectory() as place:
        return scenarios.get(case.values.get("scenario", ""), _main)(candidate, case.values, Path(place))


def _tuned(inject: Any, values: dict[str, Any]) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    net, x, _ = make_net(values["seed"])
    plain = net(x).detach()
    inject(net, values["rank"], values["alpha"], tuple(values["targets"]))
    randomise(net, values["seed"])
    return net.eval(), x, plain


def _main(candidate: Any, values: dict[str, Any], place: Path) -> Observation:
    inject, _, save_adapter, load_adapter = candidate
    net, x, plain = _tuned(inject, values)
    tensors = {"plain": plain, "tuned": tensor_result(net(x), plain, "the model")}
    fresh, _, _ = make_net(values["seed"])
    for path in paths_of(values["targets"]):
        linear = fresh.get_submodule(path)
        tensors[f"update/{path}"] = effective(net.get_submodule(path), linear.in_features) - linear.weight.detach()
    folder = place / "adapter"
    save_adapter(net, folder)
    saved, config = _read(folder)
    tensors |= {f"file/{name}": tensor for name, tensor in saved.items()}
    tensors["after saving"] = net(x).detach().clone()
    load_adapter(fresh, folder)
    fresh.eval()
    tensors["loaded"] = tensor_result(fresh(x), plain, "the model")
    told = {"config": config, "trainable": sum(p.numel() for _, p in trainable(fresh)), "tuned": sum(p.numel() for _, p in trainable(net))}
    return Observation(told, tensors)


def _theirs(candidate: Any, values: dict[str, Any], place: Path) -> Observation:
    write_theirs(place, values)
    net, x, _ = make_net(values["seed"])
    plain = net(x).detach()
    candidate[3](net, place)
    return Observation({}, {"loaded": tensor_result(net.eval()(x), plain, "the model")})


def _misfits(candidate: Any, values: dict[str, Any], place: Path) -> Observation:
    raised = {}
    for kind in MISFITS:
        tensors = write_theirs(place, values)
        last = list(tensors)[-1]
        if kind == MISFITS[0]:
            tensors[last.replace("value", "values")] = tensors[last].clone()
        elif kind == MISFITS[1]:
            del tensors[last]
        elif kind == MISFITS[2]:
            tensors = {name: tensor for name, tensor in tensors.items() if ".query." not in name}
        elif kind == MISFITS[3]:
            tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        else:
            tensors = {name: (t[:1] if "lora_A" in name else t[:, :1]).contiguous() for name, t in tensors.items()}
        save_file(tensors, place / FILES[1])
        net, x, _ = make_net(values["seed"])
        if error := refuses(candidate[3], net, place):
            raised[kind] = error
        elif kind == MISFITS[3] and close(net.eval()(x), _whole(values), 1e-5):
            raised[kind] = "understood"  # a reader that takes both forms of the names, and loads every tensor
    return Observation({"raised": raised})


def _whole(values: dict[str, Any]) -> torch.Tensor:
    """What the net computes with the adapter of `write_theirs` on it."""
    net, x, _ = make_net(values["seed"])
    with tempfile.TemporaryDirectory() as place:
        tensors = write_theirs(Path(place), values)
    paths, scale = paths_of(values["targets"]), values["alpha"] / values["rank"]
    return net_with(net, paths, [scale * tensors[f"{PREFIX}{p}.lora_B.weight"] @ tensors[f"{PREFIX}{p}.lora_A.weight"] for p in paths], x)


def _merged(candidate: Any, values: dict[str, Any], place: Path) -> Observation:
    inject, merge, save_adapter, load_adapter = candidate
    net, x, plain = _tuned(inject, values)
    tensors = {"tuned": tensor_result(net(x), plain, "the model")}
    merge(net)
    (place / "adapter").mkdir()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    existing = refuses(save_adapter, net, place / "adapter", errors=(FileExistsError,))
    if existing:
        return Observation({"existing": existing})
    after = dict(net.named_parameters())
    kept = before.keys() == after.keys() and all(close(after[name], before[name], 1e-5) for name in before)
    tensors["after saving"] = net.eval()(x).detach().clone()
    fresh, _, _ = make_net(values["seed"])
    load_adapter(fresh, place / "adapter")
    tensors["loaded"] = tensor_result(fresh.eval()(x), plain, "the model")
    return Observation({"kept": kept}, tensors)


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values, tensors = case.values, seen.tensors
    scenario = values.get("scenario")
    if scenario == "theirs":
        return [_judge_theirs(values, tensors["loaded"])]
    if scenario == "misfits":
        quiet = [kind for kind in MISFITS if kind not in seen.values["raised"]]
        observed = f"loaded without a word: {quiet[0]}" if quiet else "an error for each"
        return [Finding("what does not fit", not quiet, "an error", observed, "misfit")]
    if scenario == "merged":
        wanted = "the adapter as before merging, the model left merged"
        if "existing" in seen.values:
            return [Finding("saved while merged", False, wanted, f"{seen.values['existing']}: the folder was there already", "existing")]
        if not seen.values["kept"]:
            return [Finding("saved while merged", False, wanted, "saving left other weights in the model", "changed")]
        if not close(tensors["after saving"], tensors["tuned"], 1e-5):
            return [Finding("saved while merged", False, wanted, "saving changed what the model computes", "changed")]
        same = close(tensors["loaded"], tensors["tuned"], 1e-5)
        return [Finding("saved while merged", same, wanted, "as before" if same else "loaded, it computes something else", "merged")]
    return _judge_main(values, seen)


def _judge_theirs(values: dict[str, Any], loaded: torch.Tensor) -> Finding:
    net, x, _ = make_net(values["seed"])
    name, wanted = "others' files", f"{' and '.join(values['targets'])}, rank {values['rank']}, alpha {values['alpha']:g}, as the file says"
    expected = _whole(values)
    if close(loaded, expected, 1e-5):
        return Finding(name, True, wanted, "as computed")
    hint = "same-as-base" if close(loaded, net(x), 1e-6) else "other-file"
    return Finding(name, False, wanted, "computes what the base does" if hint == "same-as-base" else "computes something else", hint)


def _judge_main(values: dict[str, Any], seen: Observation) -> list[Finding]:
    tensors, told, rank = seen.tensors, seen.values, values["rank"]
    net, x, _ = make_net(values["seed"])
    paths = paths_of(values["targets"])
    same = close(tensors["loaded"], tensors["tuned"], 1e-5)
    observed = "equal" if same else "differs"
    hint = "loaded"
    if not same and close(tensors["loaded"], tensors["plain"], 1e-6):
        observed, hint = "computes what the base does", "same-as-base"
    elif not same and close(tensors["loaded"], tensors["tuned"], 2e-2):
        observed, hint = "nearly the same", "rounded"
    numbers = Finding("loaded onto a fresh base", same, "computes what the tuned model does", observed, hint)
    saved = {name.removeprefix("file/"): tensor for name, tensor in tensors.items() if name.startswith("file/")}
    sizes = {path: (net.get_submodule(path).in_features, net.get_submodule(path).out_features) for path in paths}
    wanted = 4 * rank * sum(map(sum, sizes.values()))
    count = sum(tensor.nbytes for tensor in saved.values())
    expected, observed = f"{wanted} bytes, r (in + out) numbers", f"{count} bytes in {len(saved)} tensors"
    only = Finding("only the adapter", count == wanted, expected, observed, "whole")
    layout = _judge_layout(saved, sizes, rank)
    return [numbers, only, layout, _judge_config(values, told["config"], saved, tensors, paths, layout.passed)]


def _judge_layout(saved: dict[str, torch.Tensor], sizes: dict[str, tuple[int, int]], rank: int) -> Finding:
    name, expected = "PEFT's names and shapes", "lora_A.weight (r, in) and lora_B.weight (out, r), by path"
    shapes = {}
    for path, (inputs, outputs) in sizes.items():
        shapes[f"{PREFIX}{path}.lora_A.weight"] = (rank, inputs)
        shapes[f"{PREFIX}{path}.lora_B.weight"] = (outputs, rank)
    missing, strange = sorted(set(shapes) - set(saved)), sorted(set(saved) - set(shapes))
    if missing or strange:
        return Finding(name, False, expected, f"{(strange or missing)[0]}" + (" is none of them" if strange else " is missing"), "names")
    for key, shape in shapes.items():
        if tuple(saved[key].shape) != shape:
            return Finding(name, False, expected, f"{key} is {tuple(saved[key].shape)}", "shapes")
    return Finding(name, True, expected, f"{len(shapes)} tensors")


def _judge_config(
    values: dict[str, Any],
    config: dict[str, Any],
    saved: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    paths: list[str],
    readable: bool,
) -> Finding:
    name, expected = "configuration", "peft_type LORA, r, lora_alpha and target_modules, and from them the update"
    targets = config.get("target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    wrong = [
        key
        for key, right in {
            "peft_type": config.get("peft_type") == "LORA",
            "r": config.get("r") == values["rank"],
            "lora_alpha": isinstance(config.get("lora_alpha"), int | float),
            "target_modules": isinstance(targets, list) and (set(targets) == set(values["targets"]) or set(targets) == set(paths)),
        }.items()
        if not right
    ]
    if wrong:
        told = ", ".join(f"{key} is {config.get(key)!r}" for key in wrong)
        return Finding(name, False, expected, told, "config")
    if not readable:
        return Finding(name, False, expected, "the tensors have other names or shapes", "names")
    for path in paths:
        update = config["lora_alpha"] / config["r"] * saved[f"{PREFIX}{path}.lora_B.weight"] @ saved[f"{PREFIX}{path}.lora_A.weight"]
        if not close(update, tensors[f"update/{path}"]):
            return Finding(name, False, expected, f"the update of {path} computed from the folder is another", "product")
    return Finding(name, True, expected, f"r {config['r']}, lora_alpha {config['lora_alpha']:g}, {' and '.join(targets)}")


def _summary(case: Case, seen: Observation) -> str | None:
    count = sum(tensor.nbytes for name, tensor in seen.tensors.items() if name.startswith("file/"))
    base = sum(p.nbytes for p in make_net(0)[0].parameters())
    return f"{count} bytes saved (the base has {base})" if count else None


register(Check(
    "lora.adapter",
    criteria=(
        Criterion("loaded onto a fresh base", "numbers", 1, "recomputed"),
        Criterion("only the adapter", "technique", 0.75, "recomputed"),
        Criterion("PEFT's names and shapes", "technique", 0.75, "recomputed"),
        Criterion("configuration", "technique", 0.5, "recomputed"),
        Criterion("others' files", "cost", 0.5, "recomputed"),
        Criterion("what does not fit", "cost", 0.25, "none"),
        Criterion("saved while merged", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=ADAPTER_HINTS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip
