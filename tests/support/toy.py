"""The toy federation of the tests: classes around the corners of a simplex, clients that hold neighbouring classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.tree import flatten
from fedstill.core.types import Dataset, Federation, Model
from fedstill.models import build_model, from_module

Points = tuple[Tensor, Tensor]


def points(*path: Any, count: int, classes: int = 4, features: int = 6, apart: float = 2.0) -> Points:
    """Inputs and labels that the seed path draws; class c lies `apart` along axis c, with noise of 1."""
    generator = numpy_generator(seed_for(*path))
    y = generator.integers(0, classes, count)
    x = generator.normal(size=(count, features)) + apart * np.eye(classes, features)[y]
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def federation_of(train: Points, test: Points, sizes: Sequence[int], **server: Any) -> Federation:
    """Client k holds sizes[k] training samples, in the order of their labels; `server` is what the server holds."""
    names = tuple("abcdefghij"[: int(torch.cat([train[1], test[1]]).max()) + 1])
    offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)
    indices = torch.argsort(train[1], stable=True)
    return Federation(Dataset("toy", *train, names), Dataset("toy", *test, names), indices, offsets, **server)


class NormNet(nn.Module):
    """BatchNorm on features. No bias before it: its gradient would be rounding, which Adam scales up to a step."""

    def __init__(self, features: int = 6, hidden: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def network(net: str = "mlp", *, features: int = 6, hidden: int = 8, classes: int = 4) -> Model:
    """An MLP with one hidden layer, (`adapted`) with adapters beside it, or (`norm`) with BatchNorm."""
    if net in ("mlp", "adapted"):
        beside = {"adapters": 2} if net == "adapted" else {}
        return build_model("mlp", input_shape=(features,), classes=classes, hidden=(hidden,), init="torch", **beside)
    module = partial(NormNet, features, hidden, classes)
    return from_module(module, input_shape=(features,), classes=classes, check=False)


def same_bits(found: Any, wanted: Any) -> bool:
    """Whether two trees have the same names and the same tensors to the last bit."""
    found, wanted = flatten(found), flatten(wanted)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def furthest(found: Any, wanted: Any) -> float:
    """The largest difference between two trees of the same names."""
    found, wanted = flatten(found), flatten(wanted)
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - leaf.double()).abs().max()) for name, leaf in wanted.items())
