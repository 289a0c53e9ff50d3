"""Checks of lab 05, gradient accumulation: a large batch in small pieces."""

from labkit.checks import (  # noqa: F401  they register their checks
    _accumulation_amp,
    _accumulation_epoch,
    _accumulation_largest,
    _accumulation_tokens,
    _accumulation_window,
)
