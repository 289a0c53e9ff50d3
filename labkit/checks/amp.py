"""Checks of lab 04: mixed precision.

Right losses say little: a scaler that never changes trains as well on most steps. So these checks script the overflows and look at what
follows: the scale after each step, the gradients that the optimizer sees, what a skipped step leaves alone, and what ranks decide.
"""

from labkit.checks import _amp_masters, _amp_ranks, _amp_scaler, _amp_step  # noqa: F401
