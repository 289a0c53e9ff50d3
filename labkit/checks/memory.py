"""Checks of lab 00, where the memory goes: parameters, model states, activations, the peak of a step, the card that holds it."""

from labkit.checks import (  # noqa: F401  they register their checks
    _memory_activations,
    _memory_count,
    _memory_estimate,
    _memory_live,
)
