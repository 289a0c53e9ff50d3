"""``run_ranks``: values, output, recordings, the rank's own exception, and what may not come along."""

import functools
import sys
import threading
import types

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist

from labkit.ranks import CargoError, NestedRanksError, RankError, RankTimeout, run_ranks
from labkit.ranks import cargo as cargo_module
from labkit.ranks.sources import with_source

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")


@pytest.fixture
def notebook():
    """A module that nothing can import, as the ``__main__`` of a notebook: its functions travel by value."""
    module = types.ModuleType("__main__")
    module.__dict__.update(torch=torch, dist=dist, run_ranks=run_ranks, threading=threading, np=numpy, functools=functools)

    def cell(source: str):
        exec(compile(source, "<cell>", "exec"), module.__dict__)
        return module

    return cell


def double(value, *, plus=0):
    return value * 2 + dist.get_rank() + plus


def test_values_seconds_and_arguments_in_order_of_ranks():
    result = run_ranks(double, 3, 10, plus=100)
    assert result.values == [120, 121, 122]
    assert len(result.seconds) == 3 and result.recordings == [] and result.outputs == ["", "", ""]


def test_tensors_lambdas_partials_methods_and_callables_travel(notebook):
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


def test_plain_pickle_finds_the_notebooks_classes(notebook):
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
def test_leaving_without_an_exception_is_a_rank_error(notebook, how, words):
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
        run_ranks(waits_for_ever, 2, None, timeout=0.8)
    text = str(caught.value)
    assert text.startswith("ranks 0 and 1 are not done after 0.8 s")
    assert text.count("in waits_for_ever") == 2 and "rank 1 printed:\nwaiting" in text


def test_a_return_value_that_cannot_travel_is_named(notebook):
    book = notebook("""
class Box:
    def __init__(self): self.inner = {"lock": threading.Lock()}
def boxed(): return [1, Box()]
""")
    with pytest.raises(RankError, match=r"what rank \d returned holds, as `value\[1\].inner\['lock'\]`, a _thread.lock"):
        run_ranks(book.boxed, 2)


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


HEAVY = """
dataset = torch.empty(20 << 20)
view = torch.empty(20 << 20)[:3]
array = np.empty(20 << 20, dtype=np.float32)
small = torch.zeros(100)
class Config: pass
config = Config(); config.nested = {"weights": [torch.empty(20 << 20)]}
class Table:
    rows = bytes(80 << 20)
    def total(self): return len(self.rows)
model = torch.nn.Linear(5000, 5000, bias=False)
parts = [torch.empty(4 << 20) for _ in range(5)]
def uses_dataset(): return dataset.sum()
def uses_view(): return view
def uses_array(): return array
def uses_config(): return config
def uses_table(): return Table().total()
def uses_model(): return model
def uses_parts(): return parts
def helper(): return dataset
def indirectly(): return helper()
def nested_code(): return [(lambda: dataset)() for _ in range(2)]
def default(data=dataset): return data
def make():
    held = torch.empty(20 << 20)
    return lambda: held
class Trainer:
    def __init__(self): self.data = dataset
    def train(self): return self.data
trainer = Trainer()
def attribute_only(x=None): return getattr(x, "dataset", None) or (x and x.dataset)
def uses_small(): return float(small.sum())
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("uses_dataset", "`uses_dataset` uses the global `dataset` (80 MiB)"),
        ("uses_view", "`uses_view` uses the global `view` (80 MiB)"),
        ("uses_array", "`uses_array` uses the global `array` (80 MiB)"),
        ("uses_config", "`uses_config` uses the global `config` (80 MiB)"),
        ("uses_table", "`Table` uses the attribute `Table.rows` (80 MiB)"),
        ("uses_model", "`uses_model` uses the global `model` (95 MiB)"),
        ("uses_parts", "`uses_parts` uses the global `parts` (80 MiB)"),
        ("indirectly", "`helper` uses the global `dataset` (80 MiB)"),
        ("nested_code", "`nested_code` uses the global `dataset` (80 MiB)"),
        ("default", "`default` uses the default argument `data` (80 MiB)"),
        ("make()", "`<lambda>` uses the closure variable `held` (80 MiB)"),
        ("trainer.train", "`train` is bound to the object `Trainer` (80 MiB)"),
        ("functools.partial(uses_small, dataset)", "`uses_small` uses the argument (functools.partial) `0` (80 MiB)"),
    ],
)
def test_a_large_thing_that_comes_along_is_told_by_name(notebook, name, words):
    book = notebook(HEAVY)
    with pytest.raises(CargoError) as caught:
        run_ranks(eval(name, book.__dict__), 2)
    assert words in str(caught.value) and "Pass what a rank needs as an argument" in str(caught.value)


def test_small_things_arguments_and_mere_attribute_names_pass(notebook):
    book = notebook(HEAVY)
    assert run_ranks(book.uses_small, 1).values == [0.0]
    assert run_ranks(book.attribute_only, 1).values == [None]
    assert run_ranks(torch.numel, 1, book.dataset).values == [20 << 20]


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("thing = threading.Lock()", "uses the global `thing`, which is a _thread.lock, which"),
        ("thing = {'a': [1, (i for i in [])]}", "uses the global `thing`, whose `thing['a'][1]` is a generator"),
        ("thing = type('Holder', (), {})(); thing.lock = threading.RLock()", "whose `thing.lock` is a _thread.RLock"),
    ],
)
def test_what_cannot_be_copied_is_told_by_name(notebook, setup, words):
    book = notebook(f"{setup}\ndef uses(): return thing")
    with pytest.raises(CargoError) as caught:
        run_ranks(book.uses, 2)
    assert words in str(caught.value) and "cannot travel to another process" in str(caught.value)


def test_an_open_file_stays_and_a_logger_travels(notebook):
    book = notebook("""
import logging, sys
file = open('/dev/null')
logger = logging.getLogger("x"); logger.addHandler(logging.StreamHandler(file))
class Hidden:
    def __reduce__(self): return bytes, (b"x" * (80 << 20),)
hidden = Hidden()
def uses_file(): return file
def uses_logger(): return logger.name
def uses_hidden(): return len(hidden)
""")
    with pytest.raises(CargoError, match=r"`uses_file` uses the global `file` \(an open file\), which stays in this notebook"):
        run_ranks(book.uses_file, 2)
    with pytest.raises(CargoError, match=r"`uses_hidden` uses the global `hidden` \(80 MiB\)"):
        run_ranks(book.uses_hidden, 2)
    assert run_ranks(book.uses_logger, 1).values == ["x"]


def test_an_argument_that_cannot_be_copied_is_told_by_name():
    with pytest.raises(CargoError, match="argument `plus`"):
        run_ranks(double, 2, 1, plus=threading.Lock())


def test_a_cuda_tensor_is_told_by_name(notebook, monkeypatch):
    class OnCard(torch.Tensor):
        is_cuda = True

    book = notebook("def uses(): return weights")
    book.weights = torch.ones(3).as_subclass(OnCard)
    with pytest.raises(CargoError, match="`uses` uses the global `weights`, which holds a CUDA tensor of this notebook"):
        run_ranks(book.uses, 2)


def test_finding_cargo_is_quick_and_shares_are_counted_once(notebook):
    book = notebook("data = torch.zeros(10 << 20)\na = [data, data[1:]]\nb = {'x': data}\ndef uses(): return a, b")
    items = list(cargo_module.items_of(book.uses))
    assert {item.name for item in items} == {"a", "b"}
    seen: set[int] = set()
    assert sum(cargo_module.weigh(item.value, seen).total_bytes for item in items) // 2**20 == 40


def test_code_keeps_its_file_and_line(notebook):
    book = notebook("\n\ndef fails():\n    raise ValueError('here')")
    with pytest.raises(ValueError) as caught:
        run_ranks(book.fails, 1)
    assert 'File "<cell>", line 4, in fails' in caught.value.__notes__[0]
    assert cloudpickle.loads(cargo_module.travel.dumps(book.fails)).__code__.co_filename == "<cell>"


def test_source_lines_are_added_where_they_are_missing():
    text = f'  File "{__file__}", line 1, in a\n  File "{__file__}", line 3, in b\n    import functools\n  File "gone", line 2, in c\n'
    first = '"""``run_ranks``: values, output, recordings, the rank\'s own exception, and what may not come along."""'
    assert with_source(text) == text.replace("in a\n", f"in a\n    {first}\n")
