"""Tiny federations and networks, and one way to train a cohort on either engine."""

from __future__ import annotations

import numpy as np
import torch
import toy
from torch import Tensor, nn
from toy import NormNet

from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import flatten, tree_map
from fedstill.core.types import Dataset, Federation, Model, Training, Weights
from fedstill.engine import Engine, build_engine
from fedstill.local.terms import cross_entropy
from fedstill.models import build_model, from_module

CLASSES = 4
FEATURES = 6
IMAGE = (3, 8, 8)
UNEVEN = (5, 9, 1, 16, 4)  # with batches of 4: a last batch of one, a client of one sample, full batches
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NETS = ("mlp", "cnn", "norm", "drop")


def dataset(count: int, *, images: bool, seed: int = 0) -> Dataset:
    generator = numpy_generator(seed_for(seed, "samples", count))
    y = generator.integers(0, CLASSES, count)
    names = tuple("abcd")
    if images:
        x = generator.integers(0, 200, (count, *IMAGE)) + 12 * y[:, None, None, None]
        return Dataset("images", torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y), names, MEAN, STD)
    return Dataset("points", *toy.points(seed, "samples", count, count=count, apart=1.5), names)


def federation(sizes=UNEVEN, *, images: bool = False, seed: int = 0) -> Federation:
    """Client k holds sizes[k] rows; neighbours hold neighbouring classes."""
    train = dataset(sum(sizes), images=images, seed=seed)
    indices = torch.argsort(train.y, stable=True)
    offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)
    return Federation(train, dataset(11, images=images, seed=seed + 1), indices, offsets)


class ConvNet(nn.Module):
    """A convolution, pooling and a linear layer: 3 x 8 x 8 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(6 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class ConvNormNet(nn.Module):
    """BatchNorm on images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Linear(6 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class DropNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


MODULES = {"mlp": DenseNet, "cnn": ConvNet, "norm": NormNet, "convnorm": ConvNormNet, "drop": DropNet}


def reads_images(net: str) -> bool:
    return net.startswith("c")


def network(net: str = "mlp") -> Model:
    shape = IMAGE if reads_images(net) else (FEATURES,)
    return from_module(MODULES[net], input_shape=shape, classes=CLASSES, check=False)


def paper_cnn() -> Model:
    return build_model("cnn", input_shape=IMAGE, classes=CLASSES)


def engine_for(name: str, net: str = "mlp", data: Federation | None = None, **options) -> Engine:
    data = data or federation(images=reads_images(net))
    return build_engine(name, options.pop("device", "cpu"), model=network(net), federation=data, **options)


def in_dtype(weights: Weights, dtype: torch.dtype) -> Weights:
    """Counters of batches stay whole numbers."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, weights)


def train(engine: Engine, training: Training, *, objective=None, start: Weights | None = None, ids=None, **how):
    """One round of a cohort (everybody by default)."""
    ids = np.arange(len(engine.offsets) - 1) if ids is None else np.asarray(ids)
    states = how.pop("states", {})
    start = in_dtype(engine.model.init(3), engine.dtype) if start is None else start
    return engine.train(LocalWork(objective or cross_entropy(), training, start, **{"seed": 7, **how}), ids, states)


def trained_in_float64(engine: str, model: Model, samples: toy.Points, sizes, training: Training):
    """(the first model, the models of all clients after a round); client k holds sizes[k] of the samples."""
    data, start = toy.federation_of(samples, samples, sizes), in_dtype(model.init(0), torch.float64)
    built = build_engine(engine, "cpu", model=model, federation=data, precision="float64")
    return start, train(built, training, start=start).uploads.weights


def assert_close(found, wanted, *, tolerance: float = 1e-6) -> None:
    """Every leaf: |found - wanted| <= tolerance * (1 + largest |wanted| of that leaf); integers must be equal."""
    found, wanted = flatten(found), flatten(wanted)
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert found[name].shape == leaf.shape, name
        assert found[name].dtype == leaf.dtype, name
        if not leaf.is_floating_point():
            assert torch.equal(found[name].cpu(), leaf.cpu()), name
            continue
        scale = 1.0 + (float(leaf.abs().max()) if leaf.numel() else 0.0)
        torch.testing.assert_close(found[name].cpu(), leaf.cpu(), rtol=0.0, atol=tolerance * scale, msg=_telling(name))


def _telling(name: str):
    return lambda text: f"{name}: {text}"


def assert_same_bits(found, wanted) -> None:
    found, wanted = flatten(found), flatten(wanted)
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different
