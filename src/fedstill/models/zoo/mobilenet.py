"""MobileNetV2 (Sandler et al., CVPR 2018) as it is built for 32x32 images."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.errors import FedstillError
from fedstill.models.network import Network, Norm, classifier, image_shape, normed_conv

STEM, LAST = 32, 1280


class _Stage(NamedTuple):
    expansion: int
    channels: int  # at width 1
    blocks: int
    stride: int  # of the first block


# The paper's Table 2 with stride 1 in place of 2 in the stem and in the second stage.
STAGES = (
    _Stage(1, 16, 1, 1),
    _Stage(6, 24, 2, 1),
    _Stage(6, 32, 3, 2),
    _Stage(6, 64, 4, 2),
    _Stage(6, 96, 3, 1),
    _Stage(6, 160, 3, 2),
    _Stage(6, 320, 1, 1),
)


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


def _scale(width: float) -> float:
    """All channel counts are multiples of 8."""
    number = isinstance(width, int | float) and not isinstance(width, bool)
    if not number or width <= 0 or (8 * width) % 1:
        raise FedstillError(
            f"model.width = {width} must be a multiple of 0.125 above 0: 1 is the full network, 0.5 FedAUX's"
        )
    return width


def mobilenet_v2(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    width: float = 1.0,
    norm: str = "batch",
    groups: int = 2,
    projection: int = 0,
) -> Network:
    """MobileNetV2 with 2,296,922 parameters (10 classes): 1280 features, the mean of 4x4 maps at 32x32.

    `width` scales every layer but the stem; 0.5 is FedAUX's (604,178). Besides the two strides it differs from the
    ImageNet net as FedAUX's code does: ReLU for ReLU6, an expansion in the first block too, a 1x1 shortcut in blocks
    of stride 1 that change the number of channels. Initialised as PyTorch does.
    """
    channels, _, _ = image_shape("mobilenet_v2", input_shape, least=1)
    scale, kind = _scale(width), Norm(norm, groups)
    layers: list[nn.Module] = [normed_conv(channels, STEM, kind, kernel=3), nn.ReLU()]
    before = STEM
    for stage in STAGES:
        after = int(stage.channels * scale)
        for block in range(stage.blocks):
            layers.append(InvertedResidual(before, after, stage.expansion, stage.stride if block == 0 else 1, kind))
            before = after
    features = int(LAST * scale)
    layers += [normed_conv(before, features, kind), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return classifier(layers, features, classes, projection)
