"""How long a learner waits for an answer: every visible check on its reference, warm. Goals: 2 s in the median, 10 s at most."""

import statistics

from tests.labs.corpus import examine
from tests.labs.references import reference, references


def rows() -> list[dict]:
    """The median and the slowest over all labs' visible checks, three answers each."""
    judged = [(reference(lab, names), check) for lab, check, names in references()]
    seconds = [examine(answer, check, strict=False).seconds for answer, check in judged for _ in range(3)]
    median, slowest = statistics.median(seconds), max(seconds)
    told = (("the median check's answer", median, 2.0), ("the slowest check's answer", slowest, 10.0))
    return [
        {"name": name, "ours": ours, "peer": "-", "ratio": ours / goal, "goal": f"{goal:g} s", "met": ours <= goal, "unit": "s"}
        for name, ours, goal in told
    ]
