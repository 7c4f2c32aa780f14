"""The common parts of the built-in networks: encoder and head, norm layers, initialisation, checks of options."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from fedstill.core.errors import FedstillError, suggest

NORMS = ("batch", "group", "none")
INITS = ("paper", "torch")
Shape = tuple[int, ...]  # of one sample: (channels, height, width), (columns,) or (tokens,)


class Network(nn.Module):
    """Returns (features, logits): the encoder maps x to features (B, F), the head maps features to logits (B, K)."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(x)
        return features, self.head(features)


class Projection(nn.Sequential):
    """MOON's projection of `width` features before the classifier: Linear, ReLU, Linear."""

    def __init__(self, width: int, projection: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))


def classifier(layers: list[nn.Module], width: int, classes: int, projection: int) -> Network:
    """Return a network of layers that end in `width` features, and one linear head.

    projection: width of a projection between them; its output is the features and the head's input (Li et al., CVPR
    2021). 0 puts none.
    """
    if not isinstance(projection, int) or isinstance(projection, bool) or projection < 0:
        raise FedstillError(f"model.projection = {projection} must be a whole number: 0 for none, 256 as in MOON")
    if projection:
        layers = [*layers, Projection(width, projection)]
    return Network(nn.Sequential(*layers), nn.Linear(projection or width, classes))


def dense(*widths: int) -> list[nn.Module]:
    """Return a linear layer and a ReLU for each step from width to width."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers


def check_counts(**counts: int) -> None:
    """Refuse options of a network that are no whole numbers of at least 1."""
    for key, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FedstillError(f"model.{key} = {value} must be a whole number of at least 1")


def choose(key: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise FedstillError(f"model.{key} = '{value}' is unknown: {suggest(str(value), known)}")
    return value


def norm_layer(norm: str, channels: int, groups: int) -> nn.Module:
    """Return the layer that normalises a convolution's output; 'none' is the identity."""
    choose("norm", norm, NORMS)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "none":
        return nn.Identity()
    if groups < 1 or channels % groups:
        raise FedstillError(f"model.groups = {groups} must divide the {channels} channels of every layer")
    return nn.GroupNorm(groups, channels)


class Norm(NamedTuple):
    """The normalisation that follows every convolution of a network."""

    kind: str
    groups: int


def normed_conv(
    before: int, after: int, norm: Norm, *, kernel: int = 1, stride: int = 1, parts: int = 1
) -> nn.Sequential:
    """Return a convolution and its norm; `parts` = `before` is depthwise, each map with its own filter."""
    bias = norm.kind == "none"  # nothing else would shift the output
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=parts, bias=bias)
    return nn.Sequential(convolution, norm_layer(norm.kind, after, norm.groups))


def image_shape(name: str, input_shape: Shape, *, least: int) -> tuple[int, int, int]:
    """Return (channels, height, width), and refuse samples that are no images of at least this size."""
    if len(input_shape) != 3:
        raise FedstillError(
            f"model.name = '{name}' needs images (channels, height, width), this data has shape {tuple(input_shape)}: "
            "use 'mlp'"
        )
    channels, height, width = input_shape
    if min(height, width) < least:
        raise FedstillError(
            f"model.name = '{name}' needs images of at least {least}x{least}, these are {height}x{width}: "
            "use 'cnn' or 'resnet8'"
        )
    return channels, height, width


def initialise(network: Network, init: str = "paper", *, linear: bool = True) -> Network:
    """Initialise a network and return it: 'paper' as MrTF does, 'torch' as PyTorch does.

    MrTF: convolutions Kaiming-normal by fan out (He et al., ICCV 2015), linear layers N(0, 0.01), biases 0. linear:
    False leaves linear layers as PyTorch starts them. The layers of a projection stay so, too, because two more layers
    of N(0, 0.01) would shrink their input a hundredfold.
    """
    if choose("init", init, INITS) == "torch":
        return network
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    kept = {layer for part in network.modules() if isinstance(part, Projection) for layer in part}
    for layer in network.modules():
        if linear and isinstance(layer, nn.Linear) and layer not in kept:
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return network
