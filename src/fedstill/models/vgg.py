"""VGG for 32x32 images."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.models.network import Network, image_shape, initialise, norm_layer


def vgg8(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    norm: str = "batch",
    groups: int = 2,
    dropout: float = 0.5,
    init: str = "paper",
) -> Network:
    """MrTF's VGG8: 3x3 convolutions 64, 128, 256, 512, 512, each normed and pooled; head 512 - 512 - classes.

    Features are the flattened maps (512 at 32x32). The paper's table has no norm, its code has BatchNorm (ours).
    """
    if not 0.0 <= dropout < 1.0:
        raise FedstillError(f"model.dropout = {dropout} must be at least 0 and below 1")
    channels, height, width = image_shape("vgg8", input_shape, least=32)
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 64, 128, 256, 512, 512)):
        convolution = nn.Conv2d(before, after, 3, padding=1)
        layers += [convolution, norm_layer(norm, after, groups), nn.MaxPool2d(2), nn.ReLU()]
    head: list[nn.Module] = []
    for width_before in (512 * (height // 32) * (width // 32), 512):
        head += [nn.Linear(width_before, 512), nn.ReLU(), nn.Dropout(dropout)]
    network = Network(nn.Sequential(*layers, nn.Flatten()), nn.Sequential(*head, nn.Linear(512, classes)))
    return initialise(network, init)
