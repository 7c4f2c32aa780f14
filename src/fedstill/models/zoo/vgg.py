"""VGG (Simonyan and Zisserman, ICLR 2015) for 32x32 images."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.models.network import (
    Network,
    classifier,
    dense,
    image_shape,
    initialise,
    initialise_convolutions,
    norm_layer,
)

VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # convolutions before each pooling


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


def vgg11(
    input_shape: tuple[int, ...], classes: int, *, norm: str = "none", groups: int = 2, projection: int = 0
) -> Network:
    """VGG11 as FedNTD has it: 3x3 convolutions 64 to 512 with five poolings, dense 512, 512; features the last 512.

    Below 32x32 the last pooling is left out, as FedNTD does for MNIST. FedFTG names a VGG11 (Table 10) and does not say
    which. Convolutions start Kaiming-normal (fan out), linear layers by PyTorch's default.
    """
    channels, height, width = image_shape("vgg11", input_shape, least=16)
    small = min(height, width) < 32
    layers: list[nn.Module] = []
    for number, stage in enumerate(VGG11, start=1):
        for before, after in pairwise((channels, *stage)):
            layers += [nn.Conv2d(before, after, 3, padding=1), norm_layer(norm, after, groups), nn.ReLU()]
        if not (small and number == len(VGG11)):
            layers.insert(-1, nn.MaxPool2d(2))  # before the last ReLU, see cnn.py
        channels = stage[-1]
    shrunk = 16 if small else 32
    layers += [nn.Flatten(), *dense(512 * (height // shrunk) * (width // shrunk), 512, 512)]
    network = classifier(layers, 512, classes, projection)
    initialise_convolutions(network)
    return network
