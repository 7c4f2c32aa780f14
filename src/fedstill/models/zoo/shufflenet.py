"""ShuffleNet (Zhang et al., CVPR 2018) with two groups, as it is built for 32x32 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.models.network import Network, Norm, classifier, image_shape, normed_conv

STEM, PARTS = 24, 2
STAGES = ((200, 4), (400, 8), (800, 4))  # (channels, units)


class Unit(nn.Module):
    """relu(x + expand(relu(depthwise(shuffle(relu(reduce(x))))))); with stride 2, the 3x3 mean of x stands beside it.

    The 1x1 convolutions `reduce` and `expand` are grouped, but for `reduce` on the stem's few channels.
    """

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        added = after - before if stride == 2 else after
        hidden = added // 4
        self.stride, self.parts = stride, 1 if before == STEM else PARTS
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
    input_shape: tuple[int, ...], classes: int, *, norm: str = "batch", groups: int = 2, projection: int = 0
) -> Network:
    """FedAUX's ShuffleNet, 887,582 parameters (10 classes): 800 features, the mean of 4x4 maps at 32x32.

    ShuffleNet 1x with two groups; its stem is one 1x1 convolution of stride 1 without pooling. `groups` is
    GroupNorm's. Initialised as PyTorch does.
    """
    channels, _, _ = image_shape("shufflenet", input_shape, least=1)
    kind = Norm(norm, groups)
    layers: list[nn.Module] = [normed_conv(channels, STEM, kind), nn.ReLU()]
    before = STEM
    for after, units in STAGES:
        for unit in range(units):
            layers.append(Unit(before, after, 2 if unit == 0 else 1, kind))
            before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return classifier(layers, before, classes, projection)
