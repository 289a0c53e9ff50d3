"""Checks of lab 06, all-reduce: a sum over ranks from sends and receives."""

from labkit.checks import (  # noqa: F401  they register their checks
    _allreduce_naive,
    _allreduce_phases,
    _allreduce_predict,
    _allreduce_ring,
    _allreduce_tree,
)
