"""Checks of lab 02, activation checkpointing: sqrt(n) memory for one more forward (Chen et al. 2016, arXiv 1604.06174)."""

from labkit.checks import (  # noqa: F401  they register their checks
    _checkpointing_function,
    _checkpointing_plans,
    _checkpointing_recursive,
    _checkpointing_saved,
    _checkpointing_sequential,
)
