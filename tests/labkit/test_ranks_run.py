"""``run_ranks``: values, output, recordings, and the rank's own exception."""

import functools
import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labkit.ranks import NestedRanksError, RankError, RankTimeout, run_ranks, travel
from labkit.ranks.sources import with_source
from tests.labkit.ranks_notebook import notebook

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")


def double(value, *, plus=0):
    return value * 2 + dist.get_rank() + plus


def test_values_seconds_and_arguments_in_order_of_ranks():
    result = run_ranks(double, 3, 10, plus=100)
    assert result.values == [120, 121, 122]
    assert len(result.seconds) == 3 and result.recordings == [] and result.outputs == ["", "", ""]


def test_tensors_lambdas_partials_methods_and_callables_travel():
    book = notebook("""
class Model:
    def __init__(self): self.weight = torch.arange(3.0)
    def scaled(self, by): return self.weight * by + dist.get_rank()
    def __call__(self, by): return self.scaled(by)
model = Model()
def outer():
    offset = torch.ones(3)
    return lambda by: offset * by
""")
    for fn in (book.model.scaled, book.model, functools.partial(book.model.scaled), torch.nn.Flatten(0)):
        assert run_ranks(fn, 1, torch.tensor([2.0])).values[0].shape[0] in (1, 3)
    assert run_ranks(book.outer(), 2, 5).values[1].tolist() == [5, 5, 5]


def test_plain_pickle_finds_the_notebooks_classes():
    book = notebook("""
class Pair:
    def __init__(self, value): self.value = value
def gather():
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, Pair(dist.get_rank()))
    return sum(pair.value for pair in got)
""")
    assert run_ranks(book.gather, 3).values == [3, 3, 3]


def test_record_brings_one_recording_per_rank():
    pytest.importorskip("labkit.recorder")
    result = run_ranks(reduces, 2, record=True)
    assert result.values == [1.0, 1.0]
    assert [recording.peak_bytes >= 4 << 20 for recording in result.recordings] == [True, True]


def reduces():
    big = torch.ones(1 << 20)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item() * big[0].item()


def rank_one(what):
    if dist.get_rank() == 1:
        print("about to fail")
        what()
    dist.barrier()


class Awkward(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.second = second


class Stuck(Exception):
    """Cannot travel: it holds a lock."""

    def __init__(self):
        super().__init__("has a lock")
        self.lock = threading.Lock()


def raise_awkward():
    raise Awkward("one", 2)


def raise_stuck():
    raise Stuck


def test_the_ranks_own_exception_with_a_note():
    with pytest.raises(Awkward) as caught:
        run_ranks(rank_one, 3, raise_awkward)
    assert str(caught.value) == "one and 2" and caught.value.second == 2
    notes = "\n".join(caught.value.__notes__)
    assert "On rank 1 of 3:" in notes and 'raise Awkward("one", 2)' in notes and "Rank 1 printed:\nabout to fail" in notes
    assert "labkit/ranks/" not in notes


def test_an_exception_that_cannot_travel_becomes_a_rank_error():
    with pytest.raises(RankError, match="rank 1 raised Stuck: has a lock") as caught:
        run_ranks(rank_one, 2, raise_stuck)
    assert "in raise_stuck" in caught.value.__notes__[0]


def fails_everywhere():
    raise NotImplementedError("Exercise 9.9: all")


def test_the_same_failure_everywhere_is_told_once():
    with pytest.raises(NotImplementedError, match="Exercise 9.9") as caught:
        run_ranks(fails_everywhere, 3)
    assert "The same on ranks" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os._exit(3)", "rank 1: the process left with exit code 3"),
        ("sys.exit('bye')", r"rank 1 called sys.exit\(bye\)"),
        ("os.kill(os.getpid(), 9)", "rank 1: killed by SIGKILL: most often the system ran out of memory"),
        ("raise KeyboardInterrupt", "rank 1 raised KeyboardInterrupt"),
    ],
)
def test_leaving_without_an_exception_is_a_rank_error(how, words):
    book = notebook(f"""
import os, sys
def leave():
    {how}
""")
    with pytest.raises(RankError, match=words):
        run_ranks(rank_one, 2, book.leave)


def waits_for_ever(lock):
    print("waiting")
    threading.Event().wait()


def test_timeout_shows_every_stack():
    with pytest.raises(RankTimeout) as caught:
        run_ranks(waits_for_ever, 2, None, timeout=3)
    text = str(caught.value)
    assert text.startswith("ranks 0 and 1 are not done after 3 s")
    assert text.count("in waits_for_ever") == 2 and "rank 1 printed:\nwaiting" in text


def test_a_return_value_that_cannot_travel_is_named():
    book = notebook("""
class Box:
    def __init__(self): self.inner = {"lock": threading.Lock()}
def boxed(): return [1, Box()]
""")
    with pytest.raises(RankError, match=r"what rank \d returned holds, as `value\[1\].inner\['lock'\]`, a _thread.lock"):
        run_ranks(book.boxed, 2)


def send_onwards():
    dist.isend(torch.ones(2), dist.get_rank() + 1).wait() if dist.get_rank() else dist.recv(torch.ones(2), -1)


def test_a_message_to_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no rank (2|-1): ranks go from 0 to 1"):
        run_ranks(send_onwards, 2, timeout=20)


def test_ranks_do_not_start_ranks():
    with pytest.raises(NestedRanksError, match="a rank cannot start ranks"):
        run_ranks(lambda: run_ranks(double, 2, 1), 2)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True, 10_000])
def test_a_wrong_world_size_is_refused(size):
    with pytest.raises(ValueError, match="world_size is a whole number"):
        run_ranks(double, size, 1)


def test_something_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="takes a function first, not int"):
        run_ranks(3, 2)


def test_code_keeps_its_file_and_line():
    book = notebook("\n\ndef fails():\n    raise ValueError('here')")
    with pytest.raises(ValueError) as caught:
        run_ranks(book.fails, 1)
    assert 'File "<cell>", line 4, in fails' in caught.value.__notes__[0]
    assert cloudpickle.loads(travel.dumps(book.fails)).__code__.co_filename == "<cell>"


def test_source_lines_are_added_where_they_are_missing():
    text = f'  File "{__file__}", line 1, in a\n  File "{__file__}", line 3, in b\n    import functools\n  File "gone", line 2, in c\n'
    first = '"""``run_ranks``: values, output, recordings, and the rank\'s own exception."""'
    assert with_source(text) == text.replace("in a\n", f"in a\n    {first}\n")
