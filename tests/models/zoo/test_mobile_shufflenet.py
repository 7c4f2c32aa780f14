"""ShuffleNet: what a unit computes, the same models from both engines."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import tree_map
from fedstill.core.types import Dataset, Federation, Training
from fedstill.engine import build_engine
from fedstill.local.terms import cross_entropy
from fedstill.models import MODELS, build_model, why_unbatchable
from fedstill.models.zoo.mobile import Unit


def network(side: int, **options: object) -> nn.Module:
    with torch_stream(0):
        return MODELS["shufflenet"]((3, side, side), 4, **options).double()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(0), dtype=torch.float64)


def units(net: nn.Module) -> list[Unit]:
    return [layer for layer in net.encoder if isinstance(layer, Unit)]


def convolve(x: np.ndarray, layer: nn.Sequential, *, groups: int, stride: int = 1) -> np.ndarray:
    """A grouped convolution, one output map after the other: map o reads the maps of its own group alone."""
    weight, bias = (leaf.detach().numpy() for leaf in (layer[0].weight, layer[0].bias))
    outputs, read, kernel, _ = weight.shape
    padded = np.pad(x, ((0, 0), (0, 0), (kernel // 2,) * 2, (kernel // 2,) * 2))
    side = (x.shape[2] + stride - 1) // stride
    out = np.empty((len(x), outputs, side, side))
    for o in range(outputs):
        first = o // (outputs // groups) * read
        for i in range(side):
            for j in range(side):
                rows, columns = (slice(at * stride, at * stride + kernel) for at in (i, j))
                window = padded[:, first : first + read, rows, columns]
                out[:, o, i, j] = (window * weight[o]).sum((1, 2, 3)) + bias[o]
    return out


def mean_of_nine(x: np.ndarray) -> np.ndarray:
    """Stride 2; what lies outside the image counts as zero."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    side = (x.shape[2] + 1) // 2
    out = np.empty((*x.shape[:2], side, side))
    for i in range(side):
        for j in range(side):
            out[:, :, i, j] = padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].sum((2, 3)) / 9
    return out


@pytest.mark.parametrize(("index", "side", "parts"), [(0, 6, 1), (1, 4, 2), (4, 5, 2)])
def test_a_unit_reduces_shuffles_filters_expands_and_adds_or_stands_beside_its_input(index, side, parts):
    unit = units(network(8, norm="none"))[index]
    given = draw(2, unit.reduce[0].in_channels, side, side)
    x, stride = given.numpy(), 1 if index == 1 else 2
    reduced = np.maximum(convolve(x, unit.reduce, groups=parts), 0)
    hidden = reduced.shape[1]
    order = [part * (hidden // parts) + place for place in range(hidden // parts) for part in range(parts)]
    filtered = np.maximum(convolve(reduced[:, order], unit.depthwise, groups=hidden, stride=stride), 0)
    expanded = convolve(filtered, unit.expand, groups=2)
    expected = expanded + x if stride == 1 else np.concatenate([expanded, mean_of_nine(x)], 1)
    np.testing.assert_allclose(unit(given).detach().numpy(), np.maximum(expected, 0), rtol=1e-10, atol=1e-12)


def test_the_units_are_those_of_fedaux():
    """Card 10: 4, 8, 4 units of 200, 400, 800 channels, the first of each of stride 2, hidden a quarter of the new."""
    found = [
        (
            *(unit.reduce[0].in_channels, unit.depthwise[0].out_channels, unit.expand[0].out_channels),
            *(unit.depthwise[0].stride[0], unit.reduce[0].groups, unit.expand[0].groups),
        )
        for unit in units(network(8))
    ]
    first = [(24, 44, 176, 2, 1, 2), (200, 50, 200, 2, 2, 2), (400, 100, 400, 2, 2, 2)]
    later = [(200, 50, 200, 1, 2, 2), (400, 100, 400, 1, 2, 2), (800, 200, 800, 1, 2, 2)]
    assert found == [first[0], *3 * [later[0]], first[1], *7 * [later[1]], first[2], *3 * [later[2]]]
    assert all(unit.depthwise[0].groups == unit.depthwise[0].in_channels for unit in units(network(8)))
    stem = network(8).encoder[0][0]
    assert (stem.out_channels, stem.kernel_size, stem.stride) == (24, (1, 1), (1, 1))


@pytest.mark.parametrize(("side", "left"), [(32, 4), (28, 4), (64, 8), (8, 1)])
def test_maps_shrink_eightfold_and_the_features_are_their_means(side, left):
    net = network(side).eval()
    x = draw(2, 3, side, side)
    maps = net.encoder[:-2](x)
    assert maps.shape == (2, 800, left, left)
    torch.testing.assert_close(net(x)[0], maps.mean((2, 3)))


def test_vmap_can_train_its_grouped_convolutions():
    assert why_unbatchable(network(8, norm="none").float(), torch.zeros(3, 3, 8, 8)) is None


@pytest.mark.matrix
def test_both_engines_train_a_cohort_to_the_same_models():
    model = build_model("shufflenet", input_shape=(3, 16, 16), classes=4)
    images, labels = draw(15, 3, 16, 16).float(), torch.arange(15) % 4
    dataset = Dataset("noise", images, labels, tuple("abcd"))
    federation = Federation(dataset, dataset, torch.arange(15), torch.tensor([0, 9, 15]))
    start = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, model.init(0))
    training = Training(batch_size=6, epochs=1, lr=0.01, momentum=0.9)
    found = []
    for name in ("batched", "looped"):
        engine = build_engine(name, "cpu", model=model, federation=federation, precision="float64")
        work = LocalWork(cross_entropy(), training, start, seed=7)
        found.append(engine.train(work, np.arange(2), {}).uploads.weights)
    assert (found[0].params["head.weight"][0] - start.params["head.weight"]).abs().max() > 1e-4
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
