"""The levels of memory of this machine: how large each is, and how fast it gives back what it holds."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import torch

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_REGISTER_BYTES = {"DEFAULT": 16 * 16, "AVX2": 16 * 32, "AVX512": 32 * 64}  # vector registers of one core
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def memory_levels(device: str = "cpu") -> dict[str, int]:
    """Level -> bytes of it, the nearest to arithmetic first.

    A card: registers and shared memory of all its processors, L2, device memory. A CPU: vector registers and L1 of one core, L2, L3,
    main memory; a level whose size the system does not tell is left out.
    """
    if torch.device(device).type == "cuda":
        card = torch.cuda.get_device_properties(device)
        sizes = {
            "registers": 4 * getattr(card, "regs_per_multiprocessor", 0) * card.multi_processor_count,
            "shared memory": getattr(card, "shared_memory_per_multiprocessor", 0) * card.multi_processor_count,
            "L2": card.L2_cache_size,
            "device memory": card.total_memory,
        }
    else:
        sizes = {"registers": _REGISTER_BYTES.get(torch.backends.cpu.get_cpu_capability(), 0), **_cpu_caches(), "memory": _main_memory()}
    return {name: size for name, size in sizes.items() if size}


def _cpu_caches() -> dict[str, int]:
    sizes: dict[str, int] = {}
    for cache in sorted(_CACHES.glob("index*")):  # Linux
        with contextlib.suppress(OSError, ValueError):
            level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                sizes[f"L{level}"] = int(size[:-1]) * _UNITS[size[-1]] if size[-1] in _UNITS else int(size)
    for name, key in () if sizes else (("L1", "hw.l1dcachesize"), ("L2", "hw.l2cachesize"), ("L3", "hw.l3cachesize")):  # macOS
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            sizes[name] = int(subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=2, check=True).stdout)
    return sizes


def _main_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return 0


def read_bandwidth(nbytes: int, device: str = "cpu", seconds: float = 0.1) -> float:
    """Bytes per second at which `nbytes` bytes are read again and again, by one thread or by the whole card.

    One operator sums the same bytes many times: they stay in the nearest level that holds them, and the operator's start does not
    count. The best of several runs, about `seconds` in all.
    """
    numbers = torch.ones(max(1, nbytes // 4), device=device)
    total = 2**32 if numbers.is_cuda else 2**26
    again = max(1, total // (4 * numbers.numel()))
    rows, sums = numbers.expand(again, -1), torch.empty(again, device=device)
    best, ends, threads = 0.0, time.perf_counter() + seconds, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.sum(rows, 1, out=sums)  # warm
        while best == 0.0 or time.perf_counter() < ends:
            _finish(numbers)
            start = time.perf_counter()
            torch.sum(rows, 1, out=sums)
            _finish(numbers)
            best = max(best, again * numbers.nbytes / (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    return best


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
