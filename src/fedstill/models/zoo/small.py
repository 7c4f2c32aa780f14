"""Dense networks, and plain convolutional ones: FedAvg's CNN, LeNet, MrTF's networks, VGG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.models.adapters import adapted
from fedstill.models.network import Network, Shape, choose, classifier, dense, image_shape, initialise, norm_layer


def mlp(
    input_shape: Shape,
    classes: int,
    *,
    hidden: Sequence[int] = (1024, 1024, 128),
    init: str = "torch",
    projection: int = 0,
    adapters: int = 0,
) -> Network:
    """MrTF's MLPNet: input - 1024 - 1024 - 128 - classes, ReLU; features are the last hidden layer.

    `hidden` gives other widths; it may be empty (a linear classifier on the raw input). `adapters` is the rank of the
    factors beside every dense layer: only they and the head train (models/adapters.py).
    """
    if any(not isinstance(width, int) or width < 1 for width in hidden):
        raise FedstillError(f"model.hidden = {list(hidden)} must be a list of positive whole numbers")
    widths = [math.prod(input_shape), *hidden]
    network = initialise(classifier([nn.Flatten(), *dense(*widths)], widths[-1], classes, projection), init)
    return adapted(network, adapters)


def _stage(before: int, after: int, kernel: int, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()]


def cnn(input_shape: Shape, classes: int, *, projection: int = 0) -> Network:
    """The CNN of FedAvg, FedNTD and FedLMD: two 5x5 convolutions (32, 64) with pooling, 512 features."""
    channels, height, width = image_shape("cnn", input_shape, least=4)
    flat = 64 * (height // 4) * (width // 4)
    stages = [*_stage(channels, 32, 5, 2), *_stage(32, 64, 5, 2)]
    return classifier([*stages, nn.Flatten(), *dense(flat, 512)], 512, classes, projection)


def _lenet_stages(channels: int, height: int, width: int, first: int, second: int) -> tuple[list[nn.Module], int]:
    """Two 5x5 convolutions without padding, each pooled, and the number of values that come out."""
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    stages = [*_stage(channels, first, 5, 0), *_stage(first, second, 5, 0), nn.Flatten()]
    return stages, second * rows * columns


def lenet5(input_shape: Shape, classes: int, *, projection: int = 0) -> Network:
    """The simple CNN of FedDF, D2C-FL and MOON: convolutions 6, 16, dense 120, 84; features are the 84."""
    stages, flat = _lenet_stages(*image_shape("lenet5", input_shape, least=16), 6, 16)
    return classifier([*stages, *dense(flat, 120, 84)], 84, classes, projection)


def lenet(input_shape: Shape, classes: int, *, init: str = "torch") -> Network:
    """MrTF's LeNet: convolutions 16, 16, then 120 - 84 - classes as head; features are the flattened maps."""
    stages, flat = _lenet_stages(*image_shape("lenet", input_shape, least=16), 16, 16)
    head = nn.Sequential(*dense(flat, 120, 84), nn.Linear(84, classes))
    return initialise(Network(nn.Sequential(*stages), head), init)


def fecnn(input_shape: Shape, classes: int, *, form: str = "paper", init: str = "torch") -> Network:
    """MrTF's network for FeMnist: 5x5 convolutions 32, 64, then a hidden layer and classes as head.

    form: 'paper' is LEAF's network (two poolings, hidden 2048), 'released' that of MrTF's code (the second pooling is
    an average to 4x4, hidden 512). Features are the flattened maps.
    """
    channels, height, width = image_shape("fecnn", input_shape, least=4)
    stages, flat, hidden = _stage(channels, 32, 5, 2), 64 * (height // 4) * (width // 4), 2048
    if choose("form", form, ("paper", "released")) == "paper":
        stages += _stage(32, 64, 5, 2)
    else:
        stages += [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
        flat, hidden = 64 * 16, 512
    head = nn.Sequential(*dense(flat, hidden), nn.Linear(hidden, classes))
    return initialise(Network(nn.Sequential(*stages, nn.Flatten()), head), init)


def convnet(input_shape: Shape, classes: int, *, init: str = "torch") -> Network:
    """MrTF's network for SVHN: 3x3 convolutions 32, 64, 64, then 128 - classes as head; features: flattened maps."""
    channels, height, width = image_shape("convnet", input_shape, least=8)
    stages = [*_stage(channels, 32, 3, 1), *_stage(32, 64, 3, 1), *_stage(64, 64, 3, 1)]
    head = nn.Sequential(*dense(64 * (height // 8) * (width // 8), 128), nn.Linear(128, classes))
    return initialise(Network(nn.Sequential(*stages, nn.Flatten()), head), init)


VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # convolutions before each pooling


def vgg8(
    input_shape: Shape, classes: int, *, norm: str = "batch", groups: int = 2, dropout: float = 0.5, init: str = "torch"
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


def vgg11(input_shape: Shape, classes: int, *, norm: str = "none", groups: int = 2, projection: int = 0) -> Network:
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
            layers.insert(-1, nn.MaxPool2d(2))  # before the last ReLU, as in `cnn`
        channels = stage[-1]
    shrunk = 16 if small else 32
    layers += [nn.Flatten(), *dense(512 * (height // shrunk) * (width // shrunk), 512, 512)]
    return initialise(classifier(layers, 512, classes, projection), linear=False)
