"""Residual networks (He et al., CVPR 2016) of basic blocks.

Two different nets are called "ResNet-8" in the papers: `resnet8` (78,042 parameters) and `resnet8_wide` (4,903,242).
With norm 'none' the convolutions have biases, since nothing else would shift their output.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.models.network import Network, Norm, Shape, choose, classifier, image_shape, initialise, normed_conv

Stages = tuple[tuple[int, int], ...]  # channels and number of blocks of each


class BasicBlock(nn.Module):
    """relu(conv(relu(conv(x))) + x), with a 1x1 convolution on the shortcut where shapes change."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = normed_conv(before, after, norm, kernel=3, stride=stride)
        self.second = normed_conv(after, after, norm, kernel=3, stride=1)
        same = before == after and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else normed_conv(before, after, norm, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def _residual(
    name: str, stages: Stages, input_shape: Shape, classes: int, norm: Norm, projection: int, *, stem: str = "cifar"
) -> Network:
    """A stem; stages of blocks, the first of each with stride 2 (but 1 in the first stage); global mean; linear."""
    channels, _, _ = image_shape(name, input_shape, least=1)
    before = stages[0][0]
    if choose("stem", stem, ("imagenet", "cifar")) == "cifar":
        layers: list[nn.Module] = [normed_conv(channels, before, norm, kernel=3), nn.ReLU()]
    else:
        first = normed_conv(channels, before, norm, kernel=7, stride=2)
        layers = [first, nn.MaxPool2d(3, 2, padding=1), nn.ReLU()]
    for stage, (width, blocks) in enumerate(stages):
        for block in range(blocks):
            layers.append(BasicBlock(before, width, 2 if stage > 0 and block == 0 else 1, norm))
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return classifier(layers, before, classes, projection)


def resnet8(
    input_shape: Shape, classes: int, *, norm: str = "batch", groups: int = 2, init: str = "paper", projection: int = 0
) -> Network:
    """CIFAR ResNet of depth 6n + 2, n = 1 (MrTF, FedDF, D2C-FL): stages 16, 32, 64 of one block; 64 features."""
    stages = ((16, 1), (32, 1), (64, 1))
    return initialise(_residual("resnet8", stages, input_shape, classes, Norm(norm, groups), projection), init)


def resnet20(
    input_shape: Shape, classes: int, *, norm: str = "batch", groups: int = 2, init: str = "paper", projection: int = 0
) -> Network:
    """CIFAR ResNet of depth 6n + 2, n = 3: stages 16, 32, 64 of three blocks; 64 features."""
    stages = ((16, 3), (32, 3), (64, 3))
    return initialise(_residual("resnet20", stages, input_shape, classes, Norm(norm, groups), projection), init)


def resnet8_wide(
    input_shape: Shape, classes: int, *, norm: str = "batch", groups: int = 2, projection: int = 0
) -> Network:
    """FedAUX's ResNet-8: stages 64, 128, 256, 512 of one block each, 3x3 stem; 512 features."""
    stages = ((64, 1), (128, 1), (256, 1), (512, 1))
    return _residual("resnet8_wide", stages, input_shape, classes, Norm(norm, groups), projection)


def resnet18(
    input_shape: Shape,
    classes: int,
    *,
    stem: str = "imagenet",
    norm: str = "batch",
    groups: int = 2,
    projection: int = 0,
) -> Network:
    """ResNet-18: stages 64, 128, 256, 512 of two blocks; 512 features.

    stem 'imagenet' is FedFTG's code (7x7 stride 2, then 3x3 max-pooling stride 2, also on 32x32 images); 'cifar' is one
    3x3 convolution. norm 'group' with 2 groups is FedDyn's. Initialised as torchvision does.
    """
    stages = ((64, 2), (128, 2), (256, 2), (512, 2))
    network = _residual("resnet18", stages, input_shape, classes, Norm(norm, groups), projection, stem=stem)
    return initialise(network, linear=False)


def resnet34(
    input_shape: Shape,
    classes: int,
    *,
    stem: str = "imagenet",
    norm: str = "batch",
    groups: int = 2,
    projection: int = 0,
) -> Network:
    """ResNet-34 (FedFTG, Table 10): stages 64, 128, 256, 512 of 3, 4, 6, 3 blocks; 512 features; else as resnet18."""
    stages = ((64, 3), (128, 4), (256, 6), (512, 3))
    network = _residual("resnet34", stages, input_shape, classes, Norm(norm, groups), projection, stem=stem)
    return initialise(network, linear=False)
