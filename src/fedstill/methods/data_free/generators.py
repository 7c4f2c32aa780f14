"""Networks that invent samples: noise beside a one-hot class (B, d + K) -> flat samples (B, values).

Inputs of a run are normalised, mean 0 and variance 1 a channel (or column), and so is what a generator of inputs makes:
its last layer is a BatchNorm without parameters, as in FedFTG's code. One of features ends in a dense layer.

Reference: Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning",
CVPR 2022, tables 7 and 8; Fang et al., "Data-Free Adversarial Distillation", 2019; Zhu et al., "Data-Free Knowledge
Distillation for Heterogeneous Federated Learning", ICML 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Model
from fedstill.models.from_module import from_module

SLOPE = 0.2  # of LeakyReLU; the supplement calls it "inplace"
SIDE = 64  # s of Table 8(b) where no images are known: Tiny-ImageNet's


class Wanted(NamedTuple):
    """The samples that a generator is asked to invent: their shape, classes and noise."""

    name: str
    shape: tuple[int, ...]  # of one sample, or (F,) of features
    classes: int
    noise: int  # d
    inputs: tuple[int, ...]  # of features: the shape of what the run's model reads, or () if not told


class SideBySide(nn.Module):
    """Noise and class, each through a dense layer of its own: (B, d + K) -> (B, 2 width)."""

    def __init__(self, wanted: Wanted, width: int) -> None:
        super().__init__()
        self.noise = wanted.noise
        self.of_noise = nn.Linear(wanted.noise, width)
        self.of_class = nn.Linear(wanted.classes, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.of_noise(x[:, : self.noise]), self.of_class(x[:, self.noise :])], dim=1)


def _twice() -> nn.Module:
    return nn.Upsample(scale_factor=2)  # nearest


def _active(layer: nn.Module, width: int) -> list[nn.Module]:
    return [layer, nn.BatchNorm2d(width), nn.LeakyReLU(SLOPE)]


def _image(wanted: Wanted, multiple: int) -> tuple[int, int, int]:
    """(channels, height, width), or a line that says what this generator needs."""
    if len(wanted.shape) != 3:
        raise _impossible(wanted, "images (channels, height, width)", "use 'table' for data, 'dense' for features")
    channels, height, width = wanted.shape
    if height % multiple or width % multiple:
        raise _impossible(
            wanted, f"images whose sides are multiples of {multiple}", "use 'small', which makes any size"
        )
    return channels, height, width


def _vector(wanted: Wanted) -> int:
    if len(wanted.shape) != 1:
        raise _impossible(wanted, "features (F,)", "use 'conv', 'deconv' or 'small' for images")
    return wanted.shape[0]


def _impossible(wanted: Wanted, makes: str, instead: str) -> FedstillError:
    return FedstillError(
        f"method.generator.network = '{wanted.name}' makes {makes}, and {wanted.shape} is wanted: {instead}, or 'auto'"
    )


def conv(wanted: Wanted) -> nn.Sequential:
    """FedFTG's Table 7(a) in the order of its code: maps are enlarged before a convolution, and normalised last."""
    channels, height, width = _image(wanted, 4)
    return nn.Sequential(
        SideBySide(wanted, 4 * height * width),
        nn.Unflatten(1, (128, height // 4, width // 4)),
        nn.BatchNorm2d(128),
        _twice(),
        *_active(nn.Conv2d(128, 128, 3, padding=1), 128),
        _twice(),
        *_active(nn.Conv2d(128, 64, 3, padding=1), 64),
        nn.Conv2d(64, channels, 3, padding=1),
        nn.Tanh(),
        nn.BatchNorm2d(channels, affine=False),
        nn.Flatten(),
    )


def conv_paper(wanted: Wanted) -> nn.Sequential:
    """FedFTG's Table 7(a) as printed: maps are enlarged after a convolution; values from -1 to 1 (Tanh is last).

    A quarter of the work of `conv` (30 M multiplications an image of 3x32x32, not 115 M), and as many parameters.
    """
    channels, height, width = _image(wanted, 4)
    return nn.Sequential(
        SideBySide(wanted, 4 * height * width),
        nn.Unflatten(1, (128, height // 4, width // 4)),
        nn.BatchNorm2d(128),
        *_active(nn.Conv2d(128, 128, 3, padding=1), 128),
        _twice(),
        *_active(nn.Conv2d(128, 64, 3, padding=1), 64),
        _twice(),
        nn.Conv2d(64, channels, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
    )


def small(wanted: Wanted) -> nn.Sequential:
    """One hidden layer of 128 units, for images of any size on a CPU; normalised last.

    A try on Fashion-mini (Dirichlet 0.2, eight clients, eight rounds) found convolutions of 32 and 16 maps no better:
    FedFTG with an MLP 72.1 % against 71.8 (four seeds, FedAvg 68.2), with LeNet-5 57.0 against 57.1 (two seeds, FedAvg
    51.7). A step of 50 images of 28x28 takes them 21 ms on one core, and the dense layers 1.
    """
    channels, _, _ = _image(wanted, 1)
    return nn.Sequential(
        nn.Linear(wanted.noise + wanted.classes, 128),
        nn.BatchNorm1d(128),
        nn.LeakyReLU(SLOPE),
        nn.Linear(128, math.prod(wanted.shape)),
        nn.Tanh(),
        nn.Unflatten(1, wanted.shape),
        nn.BatchNorm2d(channels, affine=False),
        nn.Flatten(),
    )


def deconv(wanted: Wanted) -> nn.Sequential:
    """FedFTG's Table 8(a), for large images: four transposed convolutions, each twice as large; d = 256 there.

    Differs from the paper: printed as Conv2D; transposed 4x4 convolutions as in the generator that it is borrowed from
    (DFAD's second one). The table ends in Tanh; normalised last, as the code does with Table 7(a).
    """
    channels, height, width = _image(wanted, 16)
    layers: list[nn.Module] = []
    for before, after in pairwise((512, 256, 128, 64, 64)):
        layers += _active(nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False), after)
    return nn.Sequential(
        SideBySide(wanted, height * width),
        nn.Unflatten(1, (512, height // 16, width // 16)),
        nn.BatchNorm2d(512),
        *layers,
        nn.Conv2d(64, channels, 3, padding=1),
        nn.Tanh(),
        nn.BatchNorm2d(channels, affine=False),
        nn.Flatten(),
    )


def _feature_layers(wanted: Wanted, width: int, hidden: tuple[int, ...]) -> nn.Sequential:
    size = _vector(wanted)
    layers: list[nn.Module] = []
    for before, after in pairwise((2 * width, *hidden)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.LeakyReLU(SLOPE)]
    return nn.Sequential(SideBySide(wanted, width), nn.BatchNorm1d(2 * width), *layers, nn.Linear(hidden[-1], size))


def features(wanted: Wanted) -> nn.Sequential:
    """FedFTG's Table 7(b), for features (FedGen, FedFTG(F)): 8192 wide, 72 M parameters."""
    return _feature_layers(wanted, 4096, (8192,))


def features_large(wanted: Wanted) -> nn.Sequential:
    """FedFTG's Table 8(b), for features of large images: layers as wide as an image of the run has pixels, s^2."""
    pixels = math.prod(wanted.inputs[1:]) if len(wanted.inputs) == 3 else SIDE * SIDE
    return _feature_layers(wanted, pixels, (pixels, pixels))


def dense(wanted: Wanted) -> nn.Sequential:
    """FedGen's own: one hidden layer of 256 on noise and class; values without bounds, for features."""
    read = wanted.noise + wanted.classes
    return nn.Sequential(nn.Linear(read, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, math.prod(wanted.shape)))


def table(wanted: Wanted) -> nn.Sequential:
    """`dense` for data without rows and columns of pixels: each value is normalised last, as the run's inputs are."""
    return nn.Sequential(*dense(wanted), nn.BatchNorm1d(math.prod(wanted.shape), affine=False))


GENERATORS: dict[str, Callable[[Wanted], nn.Sequential]] = {
    "conv": conv,
    "conv_paper": conv_paper,
    "deconv": deconv,
    "small": small,
    "features": features,
    "features_large": features_large,
    "dense": dense,
    "table": table,
}
AUTO = "auto"


def build_generator(
    name: str, *, shape: tuple[int, ...], classes: int, noise: int, inputs: tuple[int, ...] = ()
) -> Model:
    """A generator as a Model that reads (B, noise + classes) and whose logits are samples, flat; made once.

    Args:
        name: one of GENERATORS, or "auto": by the shape.
        shape: of one sample, or (F,) of features.
        noise: d, how many random numbers a sample is made of.
        inputs: where features are wanted, the shape of what the run's model reads. It tells "auto" that (F,) are
            features and not columns of a table, and is s of Table 8(b).

    >>> model = build_generator("auto", shape=(1, 8, 8), classes=10, noise=16)
    >>> model.name, model.apply(model.init(0), torch.zeros(5, 26))[0].logits.shape
    ('small', torch.Size([5, 64]))
    """
    wanted = Wanted(name, tuple(shape), classes, noise, tuple(inputs))
    for key, numbers in {"noise": (noise,), "classes": (classes,), "shape": wanted.shape}.items():
        if not numbers or any(not isinstance(number, int) or number < 1 for number in numbers):
            raise FedstillError(f"generator: {key} = {numbers} must be of whole numbers of at least 1")
    if name == AUTO:
        wanted = wanted._replace(name=_fitting(wanted))
    check_generator(wanted.name)
    return _built(wanted)


def check_generator(name: str) -> str:
    """The name, if there is such a generator: known before any round, whatever the data are."""
    if name not in (*GENERATORS, AUTO):
        raise FedstillError(
            f"method.generator.network = '{name}' is unknown: {suggest(str(name), (*GENERATORS, AUTO))}"
        )
    return name


def _fitting(wanted: Wanted) -> str:
    """The cheapest of those that the papers use for such a shape."""
    if len(wanted.shape) != 3:
        return "dense" if wanted.inputs else "table"
    sides = wanted.shape[1:]
    if min(sides) >= SIDE and not any(side % 16 for side in sides):
        return "deconv"
    return "conv" if min(sides) >= 32 and not any(side % 4 for side in sides) else "small"


@cache
def _built(wanted: Wanted) -> Model:
    # All of them batch (a test runs each under vmap), so that the trial runs of from_module can be left out.
    return from_module(
        lambda: GENERATORS[wanted.name](wanted),
        input_shape=(wanted.noise + wanted.classes,),
        name=wanted.name,
        check=False,
    )
