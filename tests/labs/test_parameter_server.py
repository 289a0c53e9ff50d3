"""Lab 08: its checks judge what they should, its reference gets everything, and real workers die a hundred times without a loss."""

import random
import sys
import time
import types

import cloudpickle
import jupytext
import pytest
import torch
from torch import nn

from labkit import ranks
from labkit.checks import _parameter_server_layers as layers
from labkit.checks import _parameter_server_script as scripts
from labkit.checks import _parameter_server_store as stores
from labkit.checks import get_check
from labkit.figures.parameter_server import gaps_of, spans_of
from labkit.ranks import Endpoint, faults, run_ranks
from tests.labs import corpus
from tests.labs.solutions import SOURCES, solution

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or every new life imports all this again


def plain(store, workers, bound):
    """Right numbers while nothing goes wrong: applies what comes, answers who asks."""

    class Plain:
        clocks, staleness = [0] * workers, ()

        def clock(self, worker):
            return self.clocks[worker]

        def pull(self, worker):
            return [worker]

        def push(self, worker, clock, gradient):
            store.apply([gradient])
            self.clocks[worker] += 1

        def death(self, worker):
            return None

    return Plain()


def test_plain_earns_little() -> None:
    """Never waiting is right where there is no bound, and nothing more."""
    verdict = corpus.examine(plain, "parameter_server.bounded", strict=False)
    assert {one.name for one in verdict.criteria if one.passed} == {"each push, at once", "asynchronous"}, verdict.as_text()


def cases_of(name: str) -> dict[str, list[dict]]:
    cases = get_check(name).cases(torch.Generator().manual_seed(3), True)
    return {case.name: case.values["runs"] for case in cases}


@pytest.mark.parametrize("check", ["parameter_server.synchronous", "parameter_server.bounded"])
def test_scripts_hold_what_they_are_about(check: str) -> None:
    for name, runs in cases_of(check).items():
        assert all(len(run["script"]) > 5 for run in runs)
        if name == "bound":
            slow = [run for run in runs if run["bound"] in (0, 1, 3)]
            assert all(scripts.expected(run)[1].gap == run["bound"] for run in slow)
        if name == "asynchronous":
            assert all(scripts.expected(run)[1].gap > 3 for run in runs)
        if name == "duplicates":
            assert all(len(run["script"]) > len({tuple(one) for one in run["script"] if one[0] == "push"}) for run in runs)
        if name == "backup workers":
            assert sum(len(scripts.expected(run)[1].dropped) for run in runs) > 3
        if name == "deaths and returns":
            rows = [(message, row) for run in runs for message, row in zip(run["script"], scripts.expected(run)[0], strict=True)]
            assert sum(message[0] == "death" for message, _ in rows) > 3 and any(row["back"] for _, row in rows)
            assert any(message[0] == "death" and row["answered"] for message, row in rows)


def test_gaps_never_pass_the_bound_in_what_is_expected() -> None:
    for runs in cases_of("parameter_server.bounded").values():
        for run in runs:
            assert scripts.expected(run)[1].gap <= scripts.bound_of(run)


def test_layers_of_two_lives_meet_in_the_scripts() -> None:
    case = layers._cases(torch.Generator().manual_seed(1), True)[-1]
    late = [one for run in case.values["runs"] for at, one in enumerate(run) if any(e[0] == one[0] and e[1] > one[1] for e in run[:at])]
    assert len(late) > 3


def test_the_store_s_oracle_is_torch_s_sgd() -> None:
    values = {"counts": [1, 3, 2], "seed": 5}
    start, steps = stores.tensors_of(values)
    optimizer = stores.make_optimizer(list(start.values()))
    for gradients, state in zip(steps, stores.replay(values)[1:], strict=True):
        for name, p in start.items():
            p.grad = torch.stack([one[name] for one in gradients]).mean(0)
        optimizer.step()
        assert all(torch.allclose(p.double(), state[name], atol=1e-5) for name, p in start.items())


def test_the_picture_reads_the_log() -> None:
    log = [(0.0, "asks", 0, 0), (0.0, "answer", 0, 0), (0.1, "asks", 1, 0), (0.1, "answer", 1, 0), (0.3, "push", 0, 0), (0.3, "asks", 0, 1),
           (0.5, "death", 1, 0), (0.5, "answer", 0, 1), (0.8, "push", 0, 1), (0.9, "return", 1, 0), (0.9, "asks", 1, 1),
           (0.9, "answer", 1, 1), (1.0, "stop", 0, 2)]  # fmt: skip
    works, waits = spans_of(log)
    assert works == {0: [(0.0, 0.3, 0), (0.5, 0.8, 1)], 1: []}
    assert [round(b - a, 6) for a, b in waits[0]] == [0.0, 0.2] and len(waits[1]) == 2
    assert gaps_of(log) == ([row[0] for row in log], [0] * len(log))
    log = [(0, "answer", 0, 0), (0, "asks", 1, 0), (1, "push", 0, 0), (1, "asks", 0, 1), (1, "answer", 0, 1), (2, "answer", 1, 0),
           (3, "push", 0, 1), (3, "answer", 0, 2), (4, "push", 1, 0), (5, "return", 0, 2), (5, "stop", 1, 1)]  # fmt: skip
    assert gaps_of(log)[1] == [0, 0, 0, 0, 1, 1, 1, 2, 1, 0, 0]


# -- a hundred deaths --


def lab_08(**names) -> types.SimpleNamespace:
    """What the lab's program needs of its answers, and the given server loop, with other names of layers."""
    module = types.ModuleType("lab_08_with_deaths")
    module.__dict__.update({name: value for name, value in vars(solution("08")).items() if not name.startswith("__")} | names)
    cell = next(cell for cell in jupytext.read(SOURCES / "08_parameter_server.py").cells if "def serve(" in cell.source)
    exec(compile(cell.source, "08_parameter_server.py", "exec"), module.__dict__)
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    return types.SimpleNamespace(**{name: getattr(module, name) for name in ("Store", "SyncServer", "BoundedServer", "serve", "work")})


class Tally(nn.Module):
    """Its loss on batch `clock` of a worker has gradient 1 at [worker, clock] of both parameters: what was applied can be counted."""

    def __init__(self, workers: int, steps: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(workers, steps)) for _ in range(2))


def program(lab, rule: str, workers: int, steps: int, number: int, pause_s: float = 0.0):
    model, me = Tally(workers, steps), ranks.rank() - 1
    if me < 0:
        store = lab.Store(dict(model.named_parameters()), lambda tensors: torch.optim.SGD(tensors, lr=1.0))
        return lab.serve(getattr(lab, rule)(store, workers, number), steps, set(range(workers)))

    def loss_of(model, clock):
        assert torch.equal(model.a, model.b), "a torn pull"
        time.sleep(pause_s)
        return model.a[me, clock] + model.b[me, clock]

    lab.work(Endpoint(), model, loss_of)
    ranks.event("the end")


def is_whole(told: dict, steps: int, share: float, updates: int) -> None:
    """By the server's store: each of the 3 x `steps` gradients was applied once, with its share."""
    for name, value in told["parameters"].items():
        lost, twice = (value > -0.99 * share).sum().item(), (value < -1.01 * share).sum().item()
        assert torch.allclose(value, torch.full((3, steps), -share), rtol=1e-5), f"{name}: {lost} lost, {twice} doubled"
    assert told["version"] == updates


def test_deaths_at_every_kind_of_message_lose_and_double_nothing() -> None:
    """Workers die just before a send (also between two layers of one push) or a look into the mailbox, and come back."""
    rng, plan, most = random.Random(0), [], [0, 0, 0]
    for number in range(36):
        worker, life = number % 3, number // 3
        at = rng.choice(["send", "send", "recv"])
        nth = rng.randrange(1, 9) if at == "send" else rng.randrange(1, 4)
        plan.append(faults.restart(worker + 1, at=at, nth=nth, life=life))
        most[worker] += (nth - 1) // 3 if at == "send" else nth - 1  # a push takes a pull, two layers and a look
    steps = max(most) + 3  # so that every death comes before the end
    result = run_ranks(program, 4, lab_08(NAMES=["a", "b"]), "BoundedServer", 3, steps, 4, group=False, faults=plan, timeout=120)
    told = result.values[0]
    assert sum(result.lives) == 4 + 36
    is_whole(told, steps, 1.0, 3 * steps)
    assert len(told["staleness"]) == told["version"]
    assert 3 <= max(gaps_of(told["log"])[1]) <= 4


def test_a_hundred_kills_at_any_moment_lose_and_double_nothing() -> None:
    """`kill -9` when nobody expects it, also while a worker starts or ends: each life of each has 0 to 60 ms from its function's begin."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng, kills, most, lab = random.Random(seed), 0, 40, lab_08(NAMES=["a", "b"])
    for _ in range(10):  # a worker that has ended is not killed any more: mostly one run has them all
        plan = [faults.restart(worker, at=rng.uniform(0.0, 0.06), life=life) for worker in (1, 2, 3) for life in range(most)]
        result = run_ranks(program, 4, lab, "BoundedServer", 3, 150, 2, 0.008, group=False, faults=plan, timeout=60)
        is_whole(result.values[0], 150, 1.0, 450)
        assert max(gaps_of(result.values[0]["log"])[1]) <= 2
        kills += sum(result.lives) - 4
        print(f"{kills} kills, {result.values[0]['version']} updates")
        if kills >= 100:
            return
    raise AssertionError(f"only {kills} kills")


def test_rounds_survive_kills_at_any_moment() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    plan = [faults.restart(worker, at=rng.uniform(0.0, 0.06), life=life) for worker in (1, 2, 3) for life in range(6)]
    result = run_ranks(program, 4, lab_08(NAMES=["a", "b"]), "SyncServer", 3, 60, 3, 0.004, group=False, faults=plan, timeout=60)
    is_whole(result.values[0], 60, 1 / 3, 60)
    assert result.values[0]["dropped"] == [] and sum(result.lives) > 4 + 6


def test_a_worker_that_dies_after_its_last_word_ends() -> None:
    """The last it hears is "stop"; killed then, its next life asks a server that may have gone."""
    plan = [faults.restart(worker, at="the end", after_s=0.3) for worker in (1, 2, 3)]
    result = run_ranks(program, 4, lab_08(NAMES=["a", "b"]), "BoundedServer", 3, 3, 1, group=False, faults=plan, timeout=20)
    is_whole(result.values[0], 3, 1.0, 9)
    assert result.lives == [1, 2, 2, 2]
