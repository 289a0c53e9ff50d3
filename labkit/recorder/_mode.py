"""The dispatch mode: sees every operator below autograd, and notes what it allocated."""

import sys
from collections.abc import Iterator
from math import prod
from time import perf_counter

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import categories as cat
from ._code import FIRST_SEEN, IN_BACKWARD, OP, RECOMPUTE
from ._comm import note_collective
from ._log import Live, Log

_pack_op = OP.pack
_graph_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_node = torch._C._current_autograd_node
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter


class RecordingMode(TorchDispatchMode):
    """Writes to one `Log`. Each thread enters a mode of its own; backward threads of PyTorch share their caller's."""

    supports_higher_order_operators = True

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.module = 0  # the running module's bits of a code
        self.backwards: list[bool] = []  # create_graph of every backward pass that runs, innermost last

    def dispatch(self, func, types, args=(), kwargs=None):
        """Run one operator and note it."""
        log = self.log
        if types and _unwraps_itself(types):
            return NotImplemented  # DTensor and its like go first; their inner operators come back here
        facts = log.table[func]
        if facts.special_before:
            if facts.composite:  # under inference_mode these arrive whole; autograd would have split them before
                with self:
                    return facts.split(func, args, kwargs or {})
            if facts.grows and log.budget is not None:
                _check_growth(log, *args)
        if not log.active or facts.metadata:
            return func(*args, **kwargs) if kwargs else func(*args)
        code = facts.index | log.context | self.module
        if _graph_task() != -1:
            code |= IN_BACKWARD
            if (_grad_enabled() or self.module) and not facts.detaches:  # autograd detaches what it keeps
                code |= self._recompute()
        start = perf_counter()
        out = func(*args, **kwargs) if kwargs else func(*args)
        end = perf_counter()
        origin = log.start
        flops = facts.count_flops(args, kwargs or {}, out) if facts.flop_formula else 0
        log.ops += _pack_op(code, start - origin, end - start, flops)
        log.last_op = facts.index

        # Inputs: note what is seen for the first time, and learn what an output is computed from.
        known = log.live
        allocates = facts.allocates
        inputs, needs_grad = 0, False
        for arg in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(arg, _Tensor):
                try:
                    live = known.get(id(arg.untyped_storage()))
                except (RuntimeError, NotImplementedError):
                    self._see_parts(arg, code)
                    continue
                if live is None or type(arg) is _Parameter:
                    if facts.lifts:
                        continue
                    live = self._see(arg, code, facts.sets)
                if allocates:
                    inputs |= 1 << live.category
                    needs_grad = needs_grad or arg.requires_grad
            elif type(arg) is list or type(arg) is tuple:
                for item in arg:
                    if isinstance(item, _Tensor):
                        inputs |= self._see_item(item, code)
                        needs_grad = needs_grad or item.requires_grad

        if allocates:
            for tensor in (out,) if isinstance(out, _Tensor) else _tensors(out):
                try:
                    storage = tensor.untyped_storage()
                except (RuntimeError, NotImplementedError):
                    for part in parts(tensor):
                        if id(part.untyped_storage()) not in known:
                            self._new(part.untyped_storage(), code, inputs, needs_grad, end - origin)
                    continue
                if id(storage) not in known:
                    self._new(storage, code, inputs, needs_grad, end - origin)
        if facts.special_after:
            if facts.detaches and code & IN_BACKWARD:
                self._maybe_gradient(out)
            if facts.resizes:
                for value in (*args, *(kwargs or {}).values()):
                    for tensor in _tensors(value):
                        log.check_size(tensor.untyped_storage(), code)
            if facts.communicates:
                note_collective(log, facts, args, kwargs or {}, out, code, start - origin, end - origin)
        if log.sampler is not None:
            log.sampler.at_operator(end)
        return out

    def _see_item(self, tensor: torch.Tensor, code: int) -> int:
        """One tensor of a list: note it if unknown. Returns its category as a bit."""
        try:
            live = self.log.live.get(id(tensor.untyped_storage()))
        except (RuntimeError, NotImplementedError):
            self._see_parts(tensor, code)
            return 0
        if live is None or type(tensor) is _Parameter:
            live = self._see(tensor, code, False)
        return 1 << live.category

    def _see_parts(self, tensor: torch.Tensor, code: int) -> None:
        for part in parts(tensor):
            self._see(part, code, False)

    def _new(self, storage: torch.UntypedStorage, code: int, inputs: int, needs_grad: bool, seconds: float) -> None:
        """Note an output's new storage in its category, for people; the package's docstring has the rules."""
        log = self.log
        if code & IN_BACKWARD and not code & RECOMPUTE:
            made = type(_node()).__name__ == "AccumulateGrad" and _from_engine()
            category = cat.GRADIENTS if made else cat.OTHER
        elif log.in_optimizer:
            category = cat.OTHER
        elif _grad_enabled():
            category = cat.ACTIVATIONS if needs_grad else cat.OTHER
        else:
            category = cat.ACTIVATIONS if inputs & _KEPT and not inputs & _STATES else cat.OTHER
        log.birth(storage, code, category, seconds)

    def _see(self, tensor: torch.Tensor, code: int, is_new: bool) -> Live:
        """The live storage of a tensor that is unknown, or a `Parameter`."""
        log = self.log
        storage = tensor.untyped_storage()
        live = log.live.get(id(storage))
        if live is None:
            category = cat.PARAMETERS if type(tensor) is _Parameter else cat.OTHER
            return log.birth(storage, code if is_new else code | FIRST_SEEN, category)
        if live.category != cat.PARAMETERS and type(tensor) is _Parameter:
            log.label(live, cat.PARAMETERS, log.param_names.get(id(tensor), ""))
        return live

    def _maybe_gradient(self, tensor: torch.Tensor) -> None:
        """Autograd hands a leaf its first gradient by detaching it: label that before anyone can free it."""
        node = _node()
        if type(node).__name__ == "AccumulateGrad":
            live = self.log.live.get(id(tensor.untyped_storage()))
            if live is not None and live.category != cat.GRADIENTS:
                name = self.log.param_names.get(id(node.variable), "")
                self.log.label(live, cat.GRADIENTS, name and name + ".grad")

    def _recompute(self) -> int:
        """RECOMPUTE if the running operator is a forward one although a backward pass runs, else 0.

        A backward formula runs with grad mode off, unless the pass was asked to create a graph; then only what a
        module or `torch.utils.checkpoint` runs is taken for forward.
        """
        if self.module or not (self.backwards and self.backwards[-1]):
            return RECOMPUTE
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
                return RECOMPUTE
            frame = frame.f_back
        return 0


_KEPT = 1 << cat.ACTIVATIONS | 1 << cat.INPUT_DATA
_STATES = 1 << cat.GRADIENTS | 1 << cat.OPTIMIZER_STATE

# Set after the class is made, because __init_subclass__ would wrap it for torch.compile, at a microsecond per call.
RecordingMode.__torch_dispatch__ = RecordingMode.dispatch


# torch.compile must not look into what runs here: said once for the code, where its decorator costs at every call.
_eval_frame = torch._C._dynamo.eval_frame
if hasattr(_eval_frame, "set_code_exec_strategy"):
    _skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(RecordingMode.dispatch.__code__, _eval_frame._FrameExecStrategy(_skip, _skip))


def _from_engine() -> bool:
    """Whether autograd itself, and no Python hook, called the operator that is running."""
    try:
        return sys._getframe(3).f_code.co_name == "_engine_run_backward"
    except ValueError:  # a backward thread of PyTorch's own has no frames below
        return True


def _check_growth(log: Log, tensor: torch.Tensor, size: list[int], *rest: object) -> None:
    """Refuse `Tensor.resize_` over the budget before it happens: it cannot be taken back."""
    end = tensor.storage_offset() + prod(size) if 0 not in size else 0
    log.check_growth(tensor.untyped_storage(), end * tensor.element_size())


def _unwraps_itself(types: tuple) -> bool:
    plain = _Tensor.__torch_dispatch__
    return any(t.__torch_dispatch__ is not plain and not issubclass(t, FakeTensor) for t in types)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, _Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors inside a sparse one."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
