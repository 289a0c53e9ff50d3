"""Every way in which a learner's code can end has its own clear verdict, and points follow the rule."""

import ctypes
import inspect
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint as imported_early

from labkit.checks import MIME, Check, Criterion, Report, Verdict, run_check
from labkit.ranks import travel
from tests.labkit import toy_checks
from tests.labkit.toy_checks import RANKS, TOY

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def judge(candidate: Any, check: Check = TOY, **options: Any) -> Verdict:
    return run_check(check, travel.dumps(candidate), **options)


def test_right_answer_gets_full_points_and_one_quiet_line() -> None:
    verdict = judge(lambda x: x + x, strict=True)
    assert (verdict.status, verdict.points, repr(verdict), float(verdict)) == ("pass", 4, "4", 4.0)
    assert verdict.as_text().startswith("toy.double ") and verdict.as_text().endswith(" 4 of 4 points · 1 tensor made")
    assert len(verdict.as_text().splitlines()) == 1


def test_plain_version_earns_a_quarter() -> None:
    verdict = judge(lambda x: x.clone() + x.clone())
    assert (verdict.status, verdict.points, verdict.failed, verdict.hint_id) == (
        "partial",
        1,
        "allocations",
        "allocations",
    )
    assert verdict.hint == "Which line makes a tensor?" and "clone clone" in verdict.detail


def test_mechanism_without_right_numbers_earns_nothing() -> None:
    verdict = judge(lambda x: x + x + 0 if False else x * 1 + 0 * x if False else x.neg())
    assert (verdict.status, verdict.points, verdict.failed, verdict.hint_id) == ("fail", 0, "values", "scale")


def test_doing_nothing_earns_nothing() -> None:
    assert judge(lambda x: x).points == 0


def test_cost_counts_only_with_the_technique() -> None:
    def fails_on_empty(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            raise IndexError("nothing here")
        return x + x

    verdict = judge(fails_on_empty)
    assert (verdict.status, verdict.points, verdict.failed) == ("partial", 3, "runs")
    assert [outcome.earned for outcome in verdict.criteria] == [1, 2, 0]
    assert "IndexError: nothing here" in verdict.detail and "With no numbers" in verdict.detail


def test_unfinished_is_told_by_exercise() -> None:
    def stub(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("Exercise 1.1: double")

    verdict = judge(stub)
    assert (verdict.status, verdict.points) == ("unfinished", 0)
    assert "Exercise 1.1: double is not written yet" in verdict.as_text()


def test_a_kernel_that_torch_lacks_is_an_error_not_unfinished() -> None:
    def lacking(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("\"frobnicate\" not implemented for 'Half'")

    assert judge(lacking).status == "error"


def test_exception_shows_message_and_own_line_and_routes_a_hint() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        helper = {}
        return torch.add(x.requires_grad_(), x, out=helper.get("buffer", torch.empty_like(x)))

    verdict = judge(broken)
    assert (verdict.status, verdict.points, verdict.failed, verdict.hint_id) == ("error", 0, "runs", "grad")
    assert "of broken" in verdict.detail and "site-packages" not in verdict.detail


def test_wrong_type_is_told() -> None:
    verdict = judge(lambda x: [2 * value for value in x.tolist()])
    assert (verdict.status, verdict.points, verdict.hint_id) == ("fail", 0, "type")
    assert "returned a list, expected a tensor of 256 numbers" in verdict.as_text()


@pytest.mark.parametrize(
    "leave",
    [
        lambda x: sys.exit(0),
        lambda x: os._exit(0),
        lambda x: ctypes.string_at(0),
        lambda x: os.kill(os.getpid(), 9),
        lambda x: exec("raise KeyboardInterrupt"),
    ],
    ids=["sys.exit", "os._exit", "segfault", "killed", "interrupt"],
)
def test_leaving_is_an_error(leave: Any) -> None:
    verdict = judge(leave)
    assert verdict.status in ("error", "memory") and verdict.points == 0 and verdict.detail


def test_hang_is_a_timeout_with_its_line() -> None:
    def spins(x: torch.Tensor) -> torch.Tensor:
        while True:
            time.sleep(0.01)

    verdict = judge(spins)
    assert (verdict.status, verdict.points, verdict.failed) == ("timeout", 0, "runs")
    assert "spins" in verdict.detail and verdict.hint


def test_out_of_memory_has_its_own_status() -> None:
    def huge(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("alive: everything")

    assert judge(huge).status == "memory"


def test_forbidden_answers_are_flagged_even_when_caught_or_imported_early() -> None:
    def uses(x: torch.Tensor) -> torch.Tensor:
        return imported_early(lambda y: y + y, x, use_reentrant=False)

    def hides(x: torch.Tensor) -> torch.Tensor:
        try:
            torch.utils.checkpoint.checkpoint(lambda y: y, x, use_reentrant=False)
        except BaseException:
            pass
        return x + x

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2)

    for candidate in (uses, hides, function):
        verdict = judge(candidate)
        assert (verdict.status, verdict.points) == ("flagged", 0), candidate
        assert "was called" in verdict.detail
    assert judge(uses, forbid=False).status == "pass"


def test_a_patched_labkit_stays_behind() -> None:
    def patches(x: torch.Tensor) -> torch.Tensor:
        import labkit.checks._runner as runner

        runner.run_check = None
        toy_checks.judge = None
        return x

    assert judge(patches).points == 0
    assert judge(lambda x: x + x).points == 4


def test_a_subclass_that_says_yes_to_everything_convinces_nobody() -> None:
    class Yes(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return True

    assert judge(lambda x: torch.Tensor._make_subclass(Yes, x.neg())).points == 0


class _Forged:
    """A process that sends what it likes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def send(self, payload: bytes, world_size: int, timeout: float) -> list[Report]:
        return [Report("ok", self.data)]


@pytest.mark.parametrize("data", [b"", b"garbage", toy_checks.Observation and b"LKW1" + bytes(24)])
def test_answers_that_do_not_parse_are_protocol(data: bytes) -> None:
    verdict = run_check(TOY, b"", transport=_Forged(data))
    assert (verdict.status, verdict.points) == ("protocol", 0)


def test_an_old_answer_is_not_an_answer() -> None:
    from labkit.checks import _wire

    message, tensors = toy_checks.Observation(tensors={"y": torch.ones(3)}).to_message()
    data = _wire.pack({"nonce": "0" * 32, "error": None, "forbidden": [], "observation": message}, tensors)
    assert run_check(TOY, b"", transport=_Forged(data)).status == "protocol"


def test_ranks_all_observed_in_order() -> None:
    assert judge(dist.all_reduce, RANKS).status == "pass"
    assert judge(lambda x: None, RANKS).hint == "Who adds?"


def test_deadlock_is_seen() -> None:
    def waits(x: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            dist.recv(x, 0)

    verdict = judge(waits, RANKS)
    assert (verdict.status, verdict.points) == ("deadlock", 0)
    assert "recv" in verdict.detail and "in waits" in verdict.detail and "labkit/checks" not in verdict.detail


def test_a_deadlock_shows_every_rank_s_stack() -> None:
    def all_wait(x: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            dist.recv(x, dist.get_world_size() - 1)
        else:
            dist.recv(x, dist.get_rank() - 1)

    detail = judge(all_wait, RANKS).detail
    for rank in (0, 1):
        assert f"rank {rank} waits in recv" in detail
    assert detail.count("most recent call first") == 2 and detail.count(" in all_wait") == 2  # two different lines


def test_a_rank_that_raises_is_told_before_those_that_wait_for_it() -> None:
    def raises(x: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            raise IndexError("chunk 4 of 3")
        dist.recv(x, 1)

    verdict = judge(raises, RANKS)
    assert (verdict.status, verdict.points) == ("error", 0)
    assert "IndexError: chunk 4 of 3" in verdict.detail


def test_same_answer_twice() -> None:
    first, second = (judge(lambda x: x.clone() + x).to_dict() for _ in range(2))
    first.pop("seconds"), second.pop("seconds")
    assert first == second


def test_notebook_forms() -> None:
    verdict = judge(lambda x: x.clone() + x.clone())
    bundle = verdict._repr_mimebundle_()
    assert bundle["text/plain"] == "1" and bundle[MIME]["status"] == "partial"
    page = bundle["text/html"]
    assert "FAIL" in page and 'scope="row"' in page and 'alt="one line"' in page and "Which line makes a tensor?" in page


def test_text_is_escaped_in_html() -> None:
    verdict = judge(lambda x: exec("raise ValueError('<script>alert(1)</script>')"))
    assert "<script>" not in verdict._repr_html_() and "&lt;script&gt;" in verdict._repr_html_()


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_terminal_text_keeps_to_its_width(width: int) -> None:
    for candidate in (lambda x: x.clone() + x.clone(), lambda x: x + x, lambda x: [1]):
        lines = judge(candidate).as_text(width).splitlines()
        assert max(map(len, lines)) <= width


def test_declarations_that_break_the_rule_of_points_are_refused() -> None:
    common = {"cases": toy_checks.cases, "probe": toy_checks.probe, "judge": toy_checks.judge, "hints": {}}
    with pytest.raises(ValueError, match="quarter"):
        Check("bad", (Criterion("a", "numbers", 2), Criterion("b", "technique", 3)), **common)
    with pytest.raises(ValueError, match="repeats"):
        Check("bad", (Criterion("a", "numbers", 1), Criterion("a", "technique", 3)), **common)
    with pytest.raises(ValueError, match="role"):
        Criterion("a", "style", 1)


def test_a_pass_that_does_not_count_yet_is_marked() -> None:
    def fails_both(x: torch.Tensor) -> torch.Tensor:
        return x.clone() + x.clone()

    verdict = judge(fails_both)
    assert [verdict.mark(outcome) for outcome in verdict.criteria] == ["pass", "FAIL", "pass*"]
    assert verdict.gate == "* counts once “allocations” passes"
    assert verdict.gate in verdict.as_text() and "pass*" in verdict._repr_html_()
    assert judge(lambda x: x + x).gate == ""


def test_what_the_probe_cannot_use_is_told_as_coming_after_the_learners_code() -> None:
    class Half(torch.Tensor):
        """A tensor to isinstance, and of no use to anybody."""

        def __new__(cls) -> "Half":
            return torch.Tensor._make_subclass(cls, torch.ones(2))

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise TypeError("not today")

    verdict = judge(lambda x: Half() if x.numel() else x)
    assert verdict.points == 0 and verdict.status in ("error", "fail")


def test_a_fault_of_the_judge_is_never_a_learners_zero() -> None:
    def broken(case: Any, seen: Any) -> Any:
        return seen.tensors["not there"]

    verdict = judge(lambda x: x + x, replace(TOY, judge=broken))
    assert (verdict.status, verdict.failed, verdict.hint_id) == ("infrastructure", "runs", "infrastructure")
    assert "KeyError" in verdict.detail and "not yours" in verdict.as_text(200)


def test_a_picture_that_cannot_be_drawn_loses_no_verdict() -> None:
    def broken(case: Any, seen: Any) -> Any:
        raise ZeroDivisionError

    assert "4 of 4" in judge(lambda x: x + x, replace(TOY, picture=broken))._repr_html_()


@pytest.mark.parametrize(
    "leave",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
        lambda: torch.inference_mode().__enter__(),
    ],
    ids=["grad off", "float64", "meta", "autocast", "inference mode"],
)
def test_what_the_notebook_left_set_does_not_reach_the_check(leave: Any) -> None:
    """In a process of its own, since the state is the whole process's."""
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import torch
from tests.labs.corpus import examine
from tests.labs.solutions import solution
answer = solution("02").checkpoint_sequential
{textwrap.dedent(inspect.getsource(leave)).strip().rstrip(",").partition("lambda: ")[2]}
verdict = examine(answer, "checkpointing.sequential", strict=False)
assert verdict.status == "pass", verdict.as_text()
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-3000:]
