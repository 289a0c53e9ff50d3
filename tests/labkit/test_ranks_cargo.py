"""What a function would take along to the ranks: found and told by name before anything starts."""

import sys
import threading

import pytest
import torch

from labkit.ranks import CargoError, cargo, run_ranks, travel
from tests.labkit.ranks_notebook import notebook
from tests.labkit.test_ranks_run import double

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")


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
def test_a_large_thing_that_comes_along_is_told_by_name(name, words):
    book = notebook(HEAVY)
    with pytest.raises(CargoError) as caught:
        run_ranks(eval(name, book.__dict__), 2)
    assert words in str(caught.value) and "Take what is needed as an argument" in str(caught.value)


def test_small_things_arguments_and_mere_attribute_names_pass():
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
def test_what_cannot_be_copied_is_told_by_name(setup, words):
    book = notebook(f"{setup}\ndef uses(): return thing")
    with pytest.raises(CargoError) as caught:
        run_ranks(book.uses, 2)
    assert words in str(caught.value) and "cannot travel to another process" in str(caught.value)


def test_an_open_file_stays_and_a_logger_travels():
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


def test_a_cuda_tensor_is_told_by_name():
    class OnCard(torch.Tensor):
        is_cuda = True

    book = notebook("def uses(): return weights")
    book.weights = torch.ones(3).as_subclass(OnCard)
    with pytest.raises(CargoError, match="`uses` uses the global `weights`, which holds a CUDA tensor of this notebook"):
        run_ranks(book.uses, 2)


def test_finding_cargo_is_quick_and_shares_are_counted_once():
    book = notebook("data = torch.zeros(10 << 20)\na = [data, data[1:]]\nb = {'x': data}\ndef uses(): return a, b")
    items = list(cargo.items_of(book.uses))
    assert {item.name for item in items} == {"a", "b"}
    seen: set[int] = set()
    assert sum(cargo.weigh(item.value, seen).total_bytes for item in items) // 2**20 == 40


def test_a_compiled_class_that_claims_to_be_a_builtin_travels_by_name() -> None:
    from safetensors import safe_open

    assert travel.loads(travel.dumps(safe_open)) is safe_open
