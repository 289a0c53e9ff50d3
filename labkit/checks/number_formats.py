"""Lab 03, number formats: bits to numbers and back, what a cast loses, and the scale that saves it (arXiv 1710.03740)."""

from labkit.checks import (  # noqa: F401  they register their checks
    _number_formats_decode,
    _number_formats_eight,
    _number_formats_encode,
    _number_formats_limits,
    _number_formats_stochastic,
    _number_formats_sums,
    _number_formats_underflow,
    _number_formats_window,
)
