"""Checks of lab 07, data parallel training with overlap."""

from labkit.checks import (  # noqa: F401  they register their checks
    _data_parallel_average,
    _data_parallel_broadcast,
    _data_parallel_no_sync,
    _data_parallel_overlap,
    _data_parallel_priority,
    _data_parallel_shard,
)
