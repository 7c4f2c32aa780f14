"""Low-rank adapters: two small factors beside each dense layer train, and the network below them stays as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.errors import FedstillError
from fedstill.core.types import Model, Weights
from fedstill.models.network import Network


class Adapted(nn.Linear):
    """y = (W + up down) x + b, where W and b are a given layer's and do not train (LoRA, Hu et al., ICLR 2022).

    up (out, rank) begins at zero, so the layer begins as the given one. down (rank, in) is drawn as PyTorch draws a
    dense layer. LoRA's scale alpha / rank is 1 here, because it only rescales the learning rate and the start.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        bound = layer.in_features**-0.5
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)


def adapted(network: Network, rank: int) -> Network:
    """Put factors of this rank beside every dense layer of the encoder, and freeze all else but the head.

    Rank 0 leaves the network as it is. The base is drawn before the factors, so it is that of the network without them.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise FedstillError(f"model.adapters = {rank} must be a whole number: 0 for none, e.g. 4")
    if not rank:
        return network
    layers = [path for path, layer in network.encoder.named_modules() if type(layer) is nn.Linear]
    if not layers:
        raise FedstillError("model.adapters: this network has no dense layer below its head: leave adapters out")
    network.encoder.requires_grad_(False)
    for path in layers:
        layer = network.encoder.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        widest = min(layer.in_features, layer.out_features)
        if rank > widest:
            raise FedstillError(
                f"model.adapters = {rank}: the layer encoder.{path} of {layer.in_features} inputs and "
                f"{layer.out_features} outputs has at most rank {widest}: choose a smaller rank"
            )
        network.encoder.set_submodule(path, Adapted(layer, rank))
    return network


def on_base(weights: Weights, first: Weights, model: Model) -> Weights:
    """Return the weights of a network without adapters as the base of `model`, whose adapters are those of `first`.

    Weights of another form come back as they are: their reader says what is wrong with them.
    """
    frozen = {name: weights.params[name] for name in model.frozen_names if name in weights.params}
    if not model.frozen_names or len(frozen) < len(model.frozen_names):
        return weights
    trained = {name: leaf for name, leaf in weights.params.items() if name not in frozen}
    beside = {name: leaf for name, leaf in first.params.items() if name not in trained}
    return Weights({**beside, **trained}, {**weights.buffers, **frozen})
