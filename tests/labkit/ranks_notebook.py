"""A stand-in for a notebook, for tests of ranks."""

import functools
import threading
import types

import numpy
import torch
import torch.distributed as dist

from labkit.ranks import run_ranks


def notebook(source: str) -> types.ModuleType:
    """Run ``source`` as the only cell of a notebook: in a ``__main__`` that nothing can import, so that its functions travel by value."""
    module = types.ModuleType("__main__")
    module.__dict__.update(torch=torch, dist=dist, run_ranks=run_ranks, threading=threading, np=numpy, functools=functools)
    exec(compile(source, "<cell>", "exec"), module.__dict__)
    return module
