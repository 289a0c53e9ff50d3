"""The deep residual network of Chen et al. 2016 (arXiv 1604.06174, section 5.2), as blocks of one tensor to one tensor.

Built after the authors' own example (`example_resnet.py` of dmlc/mxnet-memonger): bottleneck blocks whose every convolution, the last one
included, has a bias and is followed by batch normalisation and a leaky ReLU of slope 0.25; nothing after the sum; convolutions on the
shortcut of a stage's first block only. The leaky ReLU works in place, as MXNet's planner lets it. Images are (batch, 3, 224, 224).

The paper does not say how its 1,000 layers spread over the four stages. The example's 200 layers are (3, 24, 36, 3) blocks; `LAYERS_1001`
keeps the outer stages and the ratio of the inner ones: 3 * 333 convolutions, the first one and the classifier.

What other choices cost, at the peak of a plain step in fp32 (weights included; 50.4 GB with ours, 48 in the paper): 52.6 GB with all four
stages deepened alike, (15, 121, 182, 15); 56.6 GB with the leaky ReLU out of place.
"""

from collections.abc import Sequence

import torch
from torch import nn

LAYERS_200 = (3, 24, 36, 3)
LAYERS_1001 = (3, 131, 196, 3)


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation, leaky ReLU: (batch, inputs, h, w) -> (batch, outputs, h / stride, w / stride)."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.25, inplace=True))


class Bottleneck(nn.Module):
    """x + three convolutions of x, narrow inside: (batch, inputs, h, w) -> (batch, 4 * width, h / stride, w / stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.units = nn.Sequential(_unit(inputs, width, 1), _unit(width, width, 3, stride), _unit(width, 4 * width, 1))
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = _unit(inputs, 4 * width, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.units(x)


def deep_resnet(stages: Sequence[int] = LAYERS_1001, classes: int = 1000, width: int = 64) -> list[nn.Module]:
    """The network as a list: the stem, sum(stages) bottleneck blocks, the classifier; (batch, 3, h, w) to (batch, classes).

    The blocks of stage i work on images of 1 / 4 / 2**i of the size, at 4 * width * 2**i channels.
    """
    blocks: list[nn.Module] = [nn.Sequential(_unit(3, width, 7, 2), nn.MaxPool2d(3, 2, padding=1))]
    inputs = width
    for stage, count in enumerate(stages):
        inner = width * 2**stage
        for index in range(count):
            blocks.append(Bottleneck(inputs, inner, stride=2 if stage and not index else 1))
            inputs = 4 * inner
    return [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))]
