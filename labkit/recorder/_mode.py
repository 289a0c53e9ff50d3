"""The dispatch mode: sees every operator below autograd, and notes what it allocated."""

from time import perf_counter

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import categories as cat
from ._code import FIRST_SEEN, IN_BACKWARD, OP, RECOMPUTE
from ._comm import note_collective
from ._log import Log

_pack_op = OP.pack
_graph_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_node = torch._C._current_autograd_node
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_KEPT = 1 << cat.ACTIVATIONS | 1 << cat.INPUT_DATA
_STATES = 1 << cat.GRADIENTS | 1 << cat.OPTIMIZER_STATE


class RecordingMode(TorchDispatchMode):
    """Writes to one `Log`. Each thread enters a mode of its own, since a mode's entry count is not thread-safe."""

    supports_higher_order_operators = True

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.module = 0  # the running module's bits of a code

    def dispatch(self, func, types, args=(), kwargs=None):
        """Run one operator and note it."""
        log = self.log
        if types and _unwraps_itself(types):
            return NotImplemented  # DTensor and its like run first; their inner operators come back here
        facts = log.table[func]
        if facts.decompose:  # in inference mode composite operators arrive whole; autograd would have split them
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        if not log.active:
            return func(*args, **(kwargs or {}))
        code = facts.index | log.context | self.module
        backward = _graph_task() != -1
        if backward:
            code |= IN_BACKWARD | RECOMPUTE if _grad_enabled() else IN_BACKWARD
        start = perf_counter()
        out = func(*args, **kwargs) if kwargs else func(*args)
        end = perf_counter()
        flops = facts.count_flops(args, kwargs or {}, out) if facts.flop_formula else 0
        log.ops += _pack_op(code, start - log.start, end - start, flops)
        log.last_op = facts.index

        inputs, needs_grad = 0, False
        for arg in args:
            if isinstance(arg, _Tensor):
                seen, grad = self._see(arg, code, facts.hands_over)
                inputs |= seen
                needs_grad |= grad
            elif type(arg) in (list, tuple):
                for item in arg:
                    if isinstance(item, _Tensor):
                        seen, grad = self._see(item, code, facts.hands_over)
                        inputs |= seen
                        needs_grad |= grad
        if facts.allocates:
            category = self._category(code, inputs, needs_grad, facts)
            if isinstance(out, _Tensor):
                self._new(out, code, category)
            elif type(out) in (tuple, list):
                for item in out:
                    if isinstance(item, _Tensor):
                        self._new(item, code, category)
        if facts.resizes:
            self._check_sizes(args, kwargs, code)
        if facts.comm:
            note_collective(log, facts, args, kwargs or {}, out, code, start - log.start, end - log.start)
        return out

    def _see(self, tensor, code, hands_over):
        log = self.log
        storage = tensor.untyped_storage()
        live = log.live.get(id(storage))
        if live is None:
            category = cat.PARAMETERS if type(tensor) is _Parameter else cat.OTHER
            live = log.birth(storage, code if hands_over else code | FIRST_SEEN, category)
        elif type(tensor) is _Parameter and live.category != cat.PARAMETERS:
            log.label(live, cat.PARAMETERS, "")
        return 1 << live.category, tensor.requires_grad

    def _new(self, tensor, code, category):
        storage = tensor.untyped_storage()
        if id(storage) not in self.log.live:
            self.log.birth(storage, code, category)
        elif category == cat.GRADIENTS:
            self.log.label(self.log.live[id(storage)], category, "")

    def _category(self, code, inputs, needs_grad, facts):
        """What an operator's new output is for people; see the package's docstring for the rules."""
        if code & IN_BACKWARD and not code & RECOMPUTE:
            return cat.GRADIENTS if type(_node()).__name__ == "AccumulateGrad" else cat.OTHER
        if self.log.in_optimizer:
            return cat.OTHER
        if _grad_enabled():
            return cat.ACTIVATIONS if needs_grad else cat.OTHER
        return cat.ACTIVATIONS if inputs & _KEPT and not inputs & _STATES else cat.OTHER

    def _check_sizes(self, args, kwargs, code):
        log = self.log
        for tensor in (*args, *(kwargs or {}).values()):
            for item in tensor if type(tensor) in (list, tuple) else (tensor,):
                if not isinstance(item, _Tensor):
                    continue
                storage = item.untyped_storage()
                live = log.live.get(id(storage))
                if live is None:
                    log.birth(storage, code, cat.OTHER)
                elif live.nbytes != storage.nbytes():
                    log.resized(live, storage.nbytes(), code)


# Set after the class is made, because __init_subclass__ would wrap it for torch.compile, at a microsecond per call.
RecordingMode.__torch_dispatch__ = RecordingMode.dispatch


def _unwraps_itself(types: tuple) -> bool:
    return any(
        t not in _PLAIN and not issubclass(t, FakeTensor) and t.__torch_dispatch__ is not _Tensor.__torch_dispatch__
        for t in types
    )
