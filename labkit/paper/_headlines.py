"""The courses' headline numbers, measured again at paper scale with ready-made techniques; the labs use the learner's own."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from labkit.gpt import GPT, GPT2_XL, GPT3, GPTConfig, next_token_loss
from labkit.recorder import Recorder, Recording
from labkit.resnets import LAYERS_1001, deep_resnet

from . import paper_scale


@dataclass(frozen=True)
class Headline:
    """One number: what the source says, and `measure`, which returns what we get and a note on the difference."""

    name: str
    unit: str
    paper: float
    measure: Callable[[], tuple[float, str]]


# GPT-2: parameters and states


@cache
def mixed_precision_step(config: GPTConfig, batch: int = 1) -> tuple[int, Recording]:
    """Parameters of a GPT, and one step of it: fp16 weights and gradients, fp32 masters under Adam; mark "after"."""
    with paper_scale():
        model = GPT(config).half()
        weights = list(model.parameters())
        masters = [weight.detach().float() for weight in weights]
        optimizer = torch.optim.Adam(masters)
        ids = torch.randint(0, config.vocab, (batch, config.context))
        with Recorder(watch=[model, optimizer, ids]) as recorder:
            loss = next_token_loss(model(ids).float(), ids)
            (loss * 1024).backward()
            for master, weight in zip(masters, weights, strict=True):
                master.grad = weight.grad.float() / 1024
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
            del loss
            recorder.mark("after")
        return sum(weight.numel() for weight in weights), recorder.recording


def gpt_parameters(config: GPTConfig) -> tuple[float, str]:
    return mixed_precision_step(config)[0] / 1e9, f"exactly {mixed_precision_step(config)[0]:,}; the lecture rounds"


def gpt_states(config: GPTConfig) -> tuple[float, str]:
    count, recording = mixed_precision_step(config)
    held = recording.by_category("after")
    states = held["parameters"] + held["gradients"] + held["optimizer state"]
    return states / 1e9, f"{states / count:.2f} bytes per parameter: fp16 weights and gradients, fp32 masters, two moments"


# 1,000 layers in two buffers


def layers_in_two_buffers(depth: int = 1000, width: int = 8192) -> tuple[float, str]:
    """Activations alive at the peak of a deep network in inference mode with ReLU in place, x left out."""
    with paper_scale():
        net = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU(inplace=True))))
        x = torch.randn(width, width)
        with Recorder(watch=[net, x]) as recorder, torch.inference_mode():
            net(x)
        weights = sum(parameter.nbytes for parameter in net.parameters())
    peak, made = recorder.recording.peak(born=True) / x.nbytes, len(recorder.recording.allocations(min_bytes=x.nbytes))
    return peak, f"nn.Sequential in inference mode, beside {weights / 1e9:.0f} GB of weights; it made {made:,} of them"


# The deep residual network


def plain(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def in_segments(segments: int) -> Callable:
    def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        edges = [index * len(layers) // segments for index in range(segments + 1)]
        for start, end in zip(edges, edges[1:], strict=False):
            x = checkpoint(nn.Sequential(*layers[start:end]), x, use_reentrant=False)
        return x

    return run


@cache
def resnet(stages: tuple[int, ...]) -> list[nn.Module]:
    with paper_scale():
        return deep_resnet(stages)


def resnet_step(run: Callable, stages: tuple[int, ...] = LAYERS_1001, batch: int = 32) -> Recording:
    """One step of the residual network on 224 x 224 images, forward and backward by `run(layers, x)`."""
    layers = resnet(stages)
    with paper_scale():
        for layer in layers:
            layer.zero_grad()
        x, classes = torch.randn(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        with Recorder(watch=[*layers, x]) as recorder:
            loss = nn.functional.cross_entropy(run(layers, x), classes)
            recorder.mark("between")
            loss.backward()
    return recorder.recording


@cache
def resnet_plain(stages: tuple[int, ...], batch: int) -> Recording:
    return resnet_step(plain, stages, batch)


def resnet_without(stages: tuple[int, ...] = LAYERS_1001, batch: int = 32) -> tuple[float, str]:
    peak = resnet_plain(stages, batch).peak_bytes
    weights = resnet_plain(stages, batch).by_category()["parameters"]
    return peak / 1e9, (
        f"{peak / 2**30:.1f} GiB; {weights / 1e9:.1f} GB of it are weights. The paper does not say how 1,000 layers spread over the "
        f"stages; here {'-'.join(map(str, stages))} blocks, and leaky ReLU in place, as in its authors' example"
    )


def resnet_sqrt(stages: tuple[int, ...] = LAYERS_1001, batch: int = 32) -> tuple[float, str]:
    segments = round(math.sqrt(sum(stages) + 2))
    held = (recording := resnet_step(in_segments(segments), stages, batch)).by_category()
    states = held["parameters"] + held["gradients"]
    return recording.peak_bytes / 1e9, (
        f"{segments} equal segments (the paper cuts by bytes); {states / 1e9:.1f} GB of it are weights and their gradients"
    )


def resnet_best(stages: tuple[int, ...] = LAYERS_1001, batch: int = 32, counts: tuple[int, int] = (37, 56)) -> tuple[float, str]:
    """At the count by formula, sqrt(n times inside over border), and at the one that was least of eleven from 26 to 111."""
    peaks = [resnet_step(in_segments(count), stages, batch).peak_bytes / 1e9 for count in counts]
    return min(peaks), (
        f"{counts[0]} segments, where k borders and n / k insides (four borders each) are equal: {peaks[0]:.2f}; {counts[1]}: "
        f"{peaks[1]:.2f}, since early blocks are larger, and most borders are gone when backward comes to them"
    )


# GPT-3 with LoRA


class _LowRank(nn.Module):
    """W + up @ down, with two matrices of rank r beside a frozen W (out, in)."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


@cache
def adapted(config: GPTConfig, rank: int = 4) -> tuple[int, int, int]:
    """Parameters of a GPT, trainable ones with a low-rank update on query and value, and the bytes of these at 16 bit."""
    with paper_scale():
        model = GPT(config).requires_grad_(False)
        total = sum(parameter.numel() for parameter in model.parameters())
        for block in model.blocks:
            for linear in (block.attention.query, block.attention.value):
                parametrize.register_parametrization(linear, "weight", _LowRank(linear.weight, rank), unsafe=True)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with Recorder() as recorder:
            saved = [parameter.detach().half() for parameter in trainable]
            nbytes = recorder.mark("saved") - sum(parameter.nbytes for parameter in trainable)
            del saved
        return total, sum(parameter.numel() for parameter in trainable), nbytes


def gpt3_parameters(config: GPTConfig = GPT3) -> tuple[float, str]:
    return adapted(config)[0] / 1e9, f"exactly {adapted(config)[0]:,}, with the head tied to the embedding"


def lora_ratio(config: GPTConfig = GPT3) -> tuple[float, str]:
    total, trainable, _ = adapted(config)
    return total / trainable, f"{trainable:,} trainable, r = 4 on query and value; 175e9 over that is {175e9 / trainable:,.0f}"


def lora_bytes(config: GPTConfig = GPT3) -> tuple[float, str]:
    return adapted(config)[2] / 1e6, f"{adapted(config)[2] / 2**20:.1f} MiB at 16 bit; the paper rounds 350 GB / 10,000"


def headlines() -> list[Headline]:
    """All of them, in the labs' order."""
    return [
        Headline("GPT-2: parameters", "billion", 1.5, lambda: gpt_parameters(GPT2_XL)),
        Headline("GPT-2: states under Adam", "GB", 24.0, lambda: gpt_states(GPT2_XL)),
        Headline("1,000 layers: activations alive", "", 2, layers_in_two_buffers),
        Headline("1,000-layer ResNet: plain", "GB", 48, resnet_without),
        Headline("  in sqrt(n) segments", "GB", 7, resnet_sqrt),
        Headline("  in more segments", "GB", 7, resnet_best),
        Headline("GPT-3: parameters", "billion", 175, gpt3_parameters),
        Headline("  LoRA: times fewer to train", "", 10_000, lora_ratio),
        Headline("  LoRA: bytes to save", "MB", 35, lora_bytes),
    ]
