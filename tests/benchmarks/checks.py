"""How long a learner waits for an answer: every visible check on its reference, warm. Goals: 2 s in the median, 10 s at most."""

import statistics

from labkit.manifests import load_manifests
from tests.labs.corpus import examine
from tests.labs.solutions import solution


def rows() -> list[dict]:
    """The median and the slowest over all labs' visible checks, three answers each."""
    seconds = []
    for manifest in load_manifests().values():
        module = solution(manifest.lab)
        for cell in manifest.cells:
            if cell.kind != "check":
                continue
            name, *given = [part.strip(" '\"") for part in cell.source.strip().removeprefix("check(").removesuffix(")").split(",")]
            candidate = [getattr(module, part) for part in given]
            answer = candidate[0] if len(candidate) == 1 else tuple(candidate)
            seconds += [examine(answer, name, strict=False).seconds for _ in range(3)]
    median, slowest = statistics.median(seconds), max(seconds)
    told = (("the median check's answer", median, 2.0), ("the slowest check's answer", slowest, 10.0))
    return [
        {"name": name, "ours": ours, "peer": "-", "ratio": ours / goal, "goal": f"{goal:g} s", "met": ours <= goal, "unit": "s"}
        for name, ours, goal in told
    ]
