"""python -m tests.labs --mutants [TOPIC ...]         judge every wrong and right implementation once
python -m tests.labs --repeat N [TOPIC ...]         the same verdict N times on each reference, N / 10 times on each implementation
"""

import argparse
import sys
from collections import defaultdict

from tests.labs import corpus, repeat


def _told(verdict: object) -> str:
    return f"{verdict.status} {verdict.points:g}/{verdict.max_points:g} failed={verdict.failed} hint={verdict.hint_id}"


def judge(topics: list[str]) -> int:
    wrongs, rights = corpus.load()
    wrongs = [item for item in wrongs if not topics or item.topic in topics]
    rights = [item for item in rights if not topics or item.topic in topics]
    tally: dict[str, list[int]] = defaultdict(lambda: [0] * 6)
    line = "killed {}/{} hinted {}/{} accepted {}/{}"
    items = sorted([*wrongs, *rights], key=lambda item: item.topic)
    for done, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True), 1):
        if sys.stderr.isatty():
            print(
                f"\r{done}/{len(wrongs) + len(rights)} {item.topic} {item.name:<50.50}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        row = tally[item.topic]
        verdict = corpus.examine(item.candidate, item.check, forbid=getattr(item, "forbid", True))
        if isinstance(item, corpus.Wrong):
            good = [corpus.killed(item, verdict), corpus.told_right(item, verdict)]
            for index, ok in zip((0, 2), good, strict=True):
                row[index] += ok
                row[index + 1] += 1
            wanted = f"failed={item.criterion} hint={item.hint}"
        else:
            good = [corpus.accepted(item, verdict)]
            row[4] += good[0]
            row[5] += 1
            wanted = "full points"
        if not all(good):
            print(f"\n  {item.topic} {item.check} {item.name}: wanted {wanted}; got {_told(verdict)}\n    {verdict.detail[:400]}")
        if following is None or following.topic != item.topic:
            clear = "\r\033[K" if sys.stderr.isatty() else ""
            print(f"{clear}{item.topic:<20}", line.format(*row), flush=True)
    total = [sum(row[index] for row in tally.values()) for index in range(6)]
    print(line.format(*total))
    return 0 if total[1] and total[0] == total[1] and total[2] == total[3] and total[4] == total[5] else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.labs", description=__doc__)
    parser.add_argument("--mutants", action="store_true", help="judge every implementation once")
    parser.add_argument("--repeat", type=int, metavar="N", help="judge each reference N times: the same verdict every time")
    parser.add_argument("--mutants-repeat", type=int, metavar="M", help="with --repeat: judge each implementation M times (N / 10)")
    parser.add_argument("--fresh", action="store_true", help="with --repeat: fresh processes for every verdict, however long it takes")
    parser.add_argument("topics", nargs="*", help="only these topics, such as pingpong")
    options = parser.parse_args()
    if options.repeat:
        return repeat.run(options.topics, options.repeat, options.mutants_repeat, options.fresh)
    return judge(options.topics)


if __name__ == "__main__":
    sys.exit(main())
