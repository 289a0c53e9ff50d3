"""What recording costs: a training step under the recorder against no recorder and against its peers.

All contenders run the same step in turn, round after round, so that a slow moment of the machine hits them alike; a
ratio is the median over rounds of the two times of one round. Peers: no recorder, an empty `TorchDispatchMode`,
PyTorch's `MemTracker` and its profiler.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop on stderr

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from labkit.recorder import Recorder  # noqa: E402

# name, layers, width, batch, sequence length, rounds
SIZES = [
    ("2 layers, width 64", 2, 64, 4, 32, 12),
    ("4 layers, width 128", 4, 128, 4, 64, 12),
    ("6 layers, width 256", 6, 256, 4, 64, 8),
]


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """A small language model: embedding, blocks, head."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class EmptyMode(TorchDispatchMode):
    """Passes every operator on; the least that any recorder made of a dispatch mode costs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Step:
    """One training step of a fresh model, and the contexts to run it under."""

    def __init__(self, layers: int, width: int, batch: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = Net(layers, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.tokens = torch.randint(256, (batch, length))

    def __call__(self) -> None:
        logits = self.model(self.tokens)
        F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def mem_tracker(self):
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(self.model, self.optimizer)
        return tracker

    def profiler(self):
        return torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU])

    def recorder(self):
        return Recorder(watch=[self.model, self.optimizer, self.tokens])


def measure(step: Step, contenders: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of two steps per contender and round. Entering and leaving a context is outside the clock."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        gc.collect()
        gc.disable()
        for name, context in contenders.items():
            with context() as inside:
                seconds = 0.0
                for number in range(3):
                    start = time.perf_counter()
                    step()
                    seconds += time.perf_counter() - start if number else 0.0  # the first warms caches
                    if name == "MemTracker":
                        inside.reset_mod_stats()  # it refuses a second iteration otherwise
            if round_number:
                times[name].append(seconds)
        gc.enable()
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Median over rounds of a's seconds over b's."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def rows() -> list[dict]:
    """The table's rows: name, ours, peer, ratio, goal, met, unit."""
    result = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for size, layers, width, batch, length, rounds in SIZES:
        step = Step(layers, width, batch, length)
        step()
        quick = {"nothing": nullcontext, "empty": EmptyMode, "recorder": step.recorder}
        times = measure(step, quick, rounds)
        peers = {"nothing": nullcontext, "recorder": step.recorder}
        peers |= {"MemTracker": step.mem_tracker, "profiler": step.profiler}
        slow = measure(step, peers, max(4, rounds // 3))
        bound = width >= 128  # the smallest size has no goal: it is all overhead
        ours = statistics.median(times["recorder"]) / 2 * 1e3

        def row(what: str, peer_ms: float, value: float, goal: float | None, size=size, ours=ours) -> dict:
            met = None if goal is None else value <= goal
            return {"name": f"recorder, {size}: {what}", "ours": round(ours, 2), "peer": round(peer_ms, 2),
                    "ratio": round(value, 3), "goal": goal, "met": met, "unit": "ms per step"}

        def median_ms(timings: list[float]) -> float:
            return statistics.median(timings) / 2 * 1e3

        result.append(row("over no recorder", median_ms(times["nothing"]), ratio(times, "recorder", "nothing"), None))
        result.append(row("over an empty mode", median_ms(times["empty"]), ratio(times, "recorder", "empty"),
                          1.25 if bound else None))
        overhead = ratio(slow, "recorder", "nothing") - 1
        tracker = ratio(slow, "MemTracker", "nothing") - 1
        result.append(row("overhead, as a part of MemTracker's", median_ms(slow["MemTracker"]), overhead / tracker,
                          round(1 / 3, 3) if bound else None))
        result.append(row("over the profiler with memory", median_ms(slow["profiler"]),
                          ratio(slow, "recorder", "profiler"), None))
    torch.set_num_threads(threads)
    return result


if __name__ == "__main__":
    for r in rows():
        print(f"{r['name']:64} {r['ours']:9} {r['peer']:9} {r['ratio']:7} {r['goal']} {r['met']}")
