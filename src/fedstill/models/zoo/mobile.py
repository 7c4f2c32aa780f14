"""MobileNetV2 (Sandler et al., CVPR 2018) and ShuffleNet (Zhang et al., CVPR 2018) for 32x32 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.errors import FedstillError
from fedstill.models.network import Network, Norm, Shape, classifier, image_shape, normed_conv

MOBILE_STEM, LAST = 32, 1280


# The paper's Table 2 with stride 1 in place of 2 in the stem and in the second stage:
# (expansion, channels at width 1, blocks, stride of the first block).
MOBILE = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(nn.Module):
    """project(relu(depthwise(relu(expand(x))))), plus a shortcut at stride 1: a 1x1 convolution where widths differ."""

    def __init__(self, before: int, after: int, expansion: int, stride: int, norm: Norm) -> None:
        super().__init__()
        hidden = expansion * before
        self.expand = normed_conv(before, hidden, norm)
        self.depthwise = normed_conv(hidden, hidden, norm, kernel=3, stride=stride, parts=hidden)
        self.project = normed_conv(hidden, after, norm)
        self.shortcut: nn.Module | None = None
        if stride == 1:
            self.shortcut = nn.Identity() if before == after else normed_conv(before, after, norm)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(F.relu(self.depthwise(F.relu(self.expand(x)))))
        return out if self.shortcut is None else out + self.shortcut(x)


def mobilenet_v2(
    input_shape: Shape, classes: int, *, width: float = 1.0, norm: str = "batch", groups: int = 2, projection: int = 0
) -> Network:
    """MobileNetV2 with 2,296,922 parameters (10 classes): 1280 features, the mean of 4x4 maps at 32x32.

    `width` scales every layer but the stem; 0.5 is FedAUX's (604,178). Besides the two strides it differs from the
    ImageNet net as FedAUX's code does: ReLU for ReLU6, an expansion in the first block too, a 1x1 shortcut in blocks
    of stride 1 that change the number of channels. Initialised as PyTorch does.
    """
    channels, _, _ = image_shape("mobilenet_v2", input_shape, least=1)
    if not isinstance(width, int | float) or isinstance(width, bool) or width <= 0 or (8 * width) % 1:
        raise FedstillError(  # all channel counts are multiples of 8
            f"model.width = {width} must be a multiple of 0.125 above 0: 1 is the full network, 0.5 FedAUX's"
        )
    kind = Norm(norm, groups)
    layers: list[nn.Module] = [normed_conv(channels, MOBILE_STEM, kind, kernel=3), nn.ReLU()]
    before = MOBILE_STEM
    for expansion, full_width, blocks, stride in MOBILE:
        after = int(full_width * width)
        for block in range(blocks):
            layers.append(InvertedResidual(before, after, expansion, stride if block == 0 else 1, kind))
            before = after
    features = int(LAST * width)
    layers += [normed_conv(before, features, kind), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return classifier(layers, features, classes, projection)


SHUFFLE_STEM, PARTS = 24, 2
SHUFFLE_STAGES = ((200, 4), (400, 8), (800, 4))  # (channels, units)


class Unit(nn.Module):
    """relu(x + expand(relu(depthwise(shuffle(relu(reduce(x))))))); with stride 2, the 3x3 mean of x stands beside it.

    The 1x1 convolutions `reduce` and `expand` are grouped, but for `reduce` on the stem's few channels.
    """

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        added = after - before if stride == 2 else after
        hidden = added // 4
        self.stride, self.parts = stride, 1 if before == SHUFFLE_STEM else PARTS
        self.reduce = normed_conv(before, hidden, norm, parts=self.parts)
        self.shuffle = nn.ChannelShuffle(self.parts)  # (part, place) -> (place, part): the next reads from every part
        self.depthwise = normed_conv(hidden, hidden, norm, kernel=3, stride=stride, parts=hidden)
        self.expand = normed_conv(hidden, added, norm, parts=PARTS)
        self.beside = nn.AvgPool2d(3, 2, padding=1) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        reduced = self.shuffle(F.relu(self.reduce(x)))
        out: Tensor = self.expand(F.relu(self.depthwise(reduced)))
        if self.stride == 1:
            return F.relu(out + x)
        return F.relu(torch.cat([out, self.beside(x)], 1))


def shufflenet(
    input_shape: Shape, classes: int, *, norm: str = "batch", groups: int = 2, projection: int = 0
) -> Network:
    """FedAUX's ShuffleNet, 887,582 parameters (10 classes): 800 features, the mean of 4x4 maps at 32x32.

    ShuffleNet 1x with two groups; its stem is one 1x1 convolution of stride 1 without pooling. `groups` is
    GroupNorm's. Initialised as PyTorch does.
    """
    channels, _, _ = image_shape("shufflenet", input_shape, least=1)
    kind = Norm(norm, groups)
    layers: list[nn.Module] = [normed_conv(channels, SHUFFLE_STEM, kind), nn.ReLU()]
    before = SHUFFLE_STEM
    for after, units in SHUFFLE_STAGES:
        for unit in range(units):
            layers.append(Unit(before, after, 2 if unit == 0 else 1, kind))
            before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return classifier(layers, before, classes, projection)
