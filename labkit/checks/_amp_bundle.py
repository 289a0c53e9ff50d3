"""Several small cases in one process: each process takes a tenth of a second to start, and a run here takes a hundredth."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from labkit.checks._core import Case, Finding, Observation

T = TypeVar("T")
Cases = Callable[[torch.Generator, bool], list[Case]]


def bundled_cases(cases: Cases) -> Cases:
    """Cases of one process that decide the same criteria become one, which runs them in turn."""

    def bundle(generator: torch.Generator, strict: bool) -> list[Case]:
        groups: dict[Any, list[Case]] = {}
        for case in cases(generator, strict):
            groups.setdefault((case.covers, case.world_size or None, case.name if case.world_size else ""), []).append(case)
        bundles = []
        for group in groups.values():
            name = group[0].name if len(group) == 1 else f"{group[0].name}, and {len(group) - 1} more"
            runs = [{"name": case.name, "values": case.values} for case in group]
            bundles.append(Case(name, {"runs": runs}, world_size=group[0].world_size, covers=group[0].covers))
        return bundles

    return bundle


def _single(case: Case, number: int) -> Case:
    run = case.values["runs"][number]
    return Case(run["name"], run["values"], world_size=case.world_size, covers=case.covers and tuple(case.covers))


def _part(seen: Observation, number: int) -> Observation:
    prefix = f"{number}:"
    tensors = {key.removeprefix(prefix): tensor for key, tensor in seen.tensors.items() if key.startswith(prefix)}
    recordings = {key.removeprefix(prefix): one for key, one in seen.recordings.items() if key.startswith(prefix)}
    part = Observation(seen.values[str(number)], tensors, recordings)
    part.ranks = [part if one is seen else _part(one, number) for one in seen.ranks if one is not seen] or [part]
    return part


def bundled_probe(probe: Callable[[Any, Case], Observation]) -> Callable[[Any, Case], Observation]:
    """Probe every run of a bundle; tensors and recordings of run 0 are named "0:..."."""

    def run_all(candidate: Any, case: Case) -> Observation:
        whole = Observation()
        for number in range(len(case.values["runs"])):
            seen = probe(candidate, _single(case, number))
            whole.values[str(number)] = seen.values
            whole.tensors |= {f"{number}:{key}": tensor for key, tensor in seen.tensors.items()}
            whole.recordings |= {f"{number}:{key}": recording for key, recording in seen.recordings.items()}
        return whole

    return run_all


def bundled_judge(judge: Callable[[Case, Observation], list[Finding]]) -> Callable[[Case, Observation], list[Finding]]:
    """Per criterion, the first run that failed; else the first run."""

    def judge_all(case: Case, seen: Observation) -> list[Finding]:
        chosen: dict[str, Finding] = {}
        runs = len(case.values["runs"])
        for number in range(runs):
            single = _single(case, number)
            for finding in judge(single, _part(seen, number)):
                before = chosen.get(finding.criterion)
                if before is None or (before.passed and not finding.passed):
                    if not finding.passed and runs > 1:
                        told = f"{single.name}: {finding.observed}"
                        finding = Finding(finding.criterion, False, finding.expected, told, finding.hint, finding.detail)
                    chosen[finding.criterion] = finding
        return list(chosen.values())

    return judge_all


def bundled_first(tell: Callable[[Case, Observation], T | None]) -> Callable[[Case, Observation], T | None]:
    """The first run's picture or summary that is one."""

    def first(case: Case, seen: Observation) -> T | None:
        told = (tell(_single(case, number), _part(seen, number)) for number in range(len(case.values["runs"])))
        return next((one for one in told if one is not None), None)

    return first
