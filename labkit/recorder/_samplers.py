"""What the card says beside the recorder: the caching allocator's counters, and the bytes that the driver sees in use."""

from time import perf_counter

import torch

INTERVAL_S = 0.01  # between samples while operators run; marks and phase borders are always sampled


class CudaSampler:
    """Samples the current CUDA device into a list of plain dicts.

    `allocated` and `reserved` are the caching allocator's bytes. `used` is what NVML reports for the whole card, other
    processes included, or, without the NVML package, total minus free as the CUDA runtime reports it.
    """

    def __init__(self, log) -> None:
        self.log = log
        self.device = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(self.device)
        self.card = {"name": properties.name, "total_bytes": properties.total_memory}
        self.next = 0.0

    def at_operator(self, now: float) -> None:
        """Sample if the last sample is old; `now` is `time.perf_counter()`."""
        if now >= self.next:
            self.sample()

    def sample(self) -> None:
        """Take one sample now."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        now = perf_counter()
        self.next = now + INTERVAL_S
        self.log.samples.append(
            {
                "seconds": now - self.log.start,
                "allocated": _current(stats, "allocated_bytes"),
                "reserved": _current(stats, "reserved_bytes"),
                "used": self._used(),
            }
        )

    def _used(self) -> int:
        try:
            return int(torch.cuda.device_memory_used(self.device))
        except Exception:  # no pynvml, or a driver without it
            free, total = torch.cuda.mem_get_info(self.device)
            return int(total - free)


def _current(stats: dict, name: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get("current", 0))


def cuda_sampler(log) -> CudaSampler | None:
    """A sampler if this process has a CUDA device in use, else None. Never initialises CUDA itself."""
    return CudaSampler(log) if torch.cuda.is_available() and torch.cuda.is_initialized() else None
