"""Still pictures, drawn by matplotlib from Recordings and nothing else.

Every function returns a `Picture`: a matplotlib Figure that also says in words what it shows (`picture.alt`). As the
last value of a cell it leaves the PNG and those words in the notebook. Matplotlib is imported when the first picture is
asked for.
"""

from importlib import import_module

_HOMES = {
    "Picture": "labkit.figures.picture",
    "memory_over_time": "labkit.figures.memory",
    "compare_memory": "labkit.figures.memory",
    "u_curve": "labkit.figures.curves",
    "u_curve_and_memory": "labkit.figures.curves",
    "buffer_steps": "labkit.figures.buffers",
    "lanes": "labkit.figures.lanes",
    "lines": "labkit.figures.plots",
    "stacked_bars": "labkit.figures.plots",
    "step_weights": "labkit.figures.accumulation",
    "pieces_and_memory": "labkit.figures.accumulation",
    "traffic": "labkit.figures.allreduce",
    "ring_steps": "labkit.figures.allreduce",
    "message_lanes": "labkit.figures.allreduce",
    "predicted_times": "labkit.figures.allreduce",
    "step_lanes": "labkit.figures.data_parallel",
    "clock_lanes": "labkit.figures.parameter_server",
    "value_histogram": "labkit.figures.number_formats",
    "staircase": "labkit.figures.number_formats",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.figures' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
