"""A network of your own, for an experiment file: model.name = "examples/my_network.py:Net"."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """One hidden layer; of input_shape, classes and vocabulary a network is given those that it asks for."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, self.head(features)
