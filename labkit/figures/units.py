"""Bytes and seconds for people."""

from __future__ import annotations

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def byte_unit(largest: float) -> tuple[str, int]:
    """The unit (name, bytes) in which `largest` bytes read as a number of at least 1."""
    return next((unit for unit in _BYTES if largest >= unit[1]), _BYTES[-1])


def time_unit(largest: float) -> tuple[str, float]:
    """The unit (name, seconds) in which `largest` seconds read as a number of at least 1."""
    return next((unit for unit in _SECONDS if largest >= unit[1]), _SECONDS[-1])


def human_bytes(count: float) -> str:
    """131.4 MiB; whole bytes and KiB below that."""
    name, size = byte_unit(abs(count))
    return (
        f"{count / size:.0f} {name}" if size == 1 else f"{count / size:.{1 if abs(count) < 1000 * size else 0}f} {name}"
    )


def human_seconds(seconds: float) -> str:
    """12.3 ms"""
    name, size = time_unit(abs(seconds))
    return f"{seconds / size:.3g} {name}"
