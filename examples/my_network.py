"""A network of your own, for an experiment file: model.name = "examples/my_network.py:Net"."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """One hidden layer. fedstill passes input_shape, classes and vocabulary to a network whose signature names them."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, self.head(features)
