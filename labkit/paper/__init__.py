"""Paper scale: code run on tensors that have sizes and no numbers, on ranks that answer at once.

    try:
        with paper_scale():
            model = GPT(GPT2_XL)  # 6 GB that nobody allocates
            with Recorder(watch=model) as recorder:
                step(model)
        print(recorder.recording.peak_bytes)
    except PaperScaleError as error:
        print(error)

Everything made inside is a fake tensor (`torch._subclasses.FakeTensorMode`): operators compute shapes and types, and a
`Recorder` counts the bytes as on a laptop. With `ranks` there is a process group whose collectives return at once, so that
one process shows what one rank of many holds and sends.

Where code asks for a number, every unknown one counts as 0: `loss.item()` is 0.0, `if norm > 1` is not taken,
`torch.isfinite(grad).all()` is true, `torch.equal` says True. Tensors made of numbers (`torch.tensor([1, 2])`, a short `arange`)
are real ones and keep them, as does what is computed from them alone.

What cannot run at all (`tensor.numpy()`, `x[mask]`, whose shape depends on numbers) raises `PaperScaleError`, which names the
line. That costs no points: a notebook's paper-scale cell is given code without a check, and prints the error as above.

Make models and data inside; a later block can go on with them. A real tensor from outside works as an input: operators of
real tensors alone run for real, and where it meets a fake one it stays as it is, and gets no gradient.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

from ._answers import Answers
from ._errors import PaperScaleError, explain
from ._patches import patches

__all__ = ["PaperScaleError", "paper_scale"]

_fakes = FakeTensorMode(allow_non_fake_inputs=True)  # one for all blocks: what one block made, the next can use
_active: list[Answers] = []


@contextmanager
def paper_scale(ranks: int = 1, rank: int = 0) -> Iterator[None]:
    """Run the block on fake tensors and, with `ranks` > 1, as rank `rank` of a process group that is not there.

    Everything is as before when the block ends, however it ends. Inside another `paper_scale` the tensors are the outer one's.
    Raises `PaperScaleError` for what needs numbers, ValueError for a rank that is none, RuntimeError when there is a process
    group already.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} ranks: ranks count from 0")
    with ExitStack() as stack:
        if ranks > 1:
            _group(stack, ranks, rank)
        if not _active:
            answers = Answers()
            _active.append(answers)
            stack.callback(_active.clear)
            stack.callback(answers.take_back)
            patches(stack)
            stack.enter_context(_fakes)
            stack.enter_context(answers)
        try:
            yield
        except Exception as error:
            told = explain(error, _active[0].made_up)
            if told is None:
                raise
            raise PaperScaleError(told) from error


def _group(stack: ExitStack, ranks: int, rank: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise RuntimeError("there is a process group already; paper_scale(ranks=...) makes one of its own")
    stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
