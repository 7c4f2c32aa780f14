"""MobileNetV2: what a block computes, how far images shrink, the same models from both engines."""

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
from fedstill.models.zoo.mobile import InvertedResidual


def network(shape: tuple[int, int, int], **options: object) -> nn.Module:
    with torch_stream(0):
        return MODELS["mobilenet_v2"](shape, 4, **{"width": 0.125, **options}).double()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(0), dtype=torch.float64)


def blocks(net: nn.Module) -> list[InvertedResidual]:
    return [layer for layer in net.encoder if isinstance(layer, InvertedResidual)]


def pointwise(x: np.ndarray, layer: nn.Sequential) -> np.ndarray:
    """A sum over maps at each pixel."""
    weight, bias = (leaf.detach().numpy() for leaf in (layer[0].weight, layer[0].bias))
    return np.einsum("oc,bchw->bohw", weight[:, :, 0, 0], x) + bias[:, None, None]


def depthwise(x: np.ndarray, layer: nn.Sequential, stride: int) -> np.ndarray:
    """A 3x3 filter over each map on its own, one output pixel after the other."""
    weight, bias = (leaf.detach().numpy() for leaf in (layer[0].weight, layer[0].bias))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    side = (x.shape[2] + stride - 1) // stride
    out = np.empty((*x.shape[:2], side, side))
    for i in range(side):
        for j in range(side):
            window = padded[:, :, i * stride : i * stride + 3, j * stride : j * stride + 3]
            out[:, :, i, j] = (window * weight[:, 0]).sum((2, 3)) + bias
    return out


@pytest.mark.parametrize(
    ("index", "stride", "shortcut"),
    [(0, 1, "convolution"), (1, 1, "convolution"), (2, 1, "itself"), (3, 2, "none"), (13, 2, "none")],
)
def test_a_block_expands_filters_each_map_on_its_own_projects_and_adds_its_shortcut(index, stride, shortcut):
    block = blocks(network((3, 8, 8), norm="none"))[index]
    given = draw(2, block.expand[0].in_channels, 6, 6)
    x = given.numpy()
    hidden = np.maximum(pointwise(x, block.expand), 0)
    expected = pointwise(np.maximum(depthwise(hidden, block.depthwise, stride), 0), block.project)
    if shortcut == "convolution":
        expected = expected + pointwise(x, block.shortcut)
    elif shortcut == "itself":
        expected = expected + x
    np.testing.assert_allclose(block(given).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def test_the_stages_are_those_of_the_paper_with_an_expansion_of_six_after_the_first():
    found = [
        (block.expand[0].in_channels, block.project[0].out_channels) for block in blocks(network((3, 8, 8), width=1))
    ]
    outputs = [16] + [24] * 2 + [32] * 3 + [64] * 4 + [96] * 3 + [160] * 3 + [320]
    assert found == list(zip([32, *outputs[:-1]], outputs, strict=True))
    ratios = [block.depthwise[0].groups / block.expand[0].in_channels for block in blocks(network((3, 8, 8), width=1))]
    assert ratios == [1] + [6] * 16


def test_at_half_width_the_layers_are_those_of_fedaux():
    """Card 10: (t, c, n, s) of its stages, a stem of 32 that is not halved, 640 features."""
    net = network((3, 32, 32), width=0.5)
    card = [(1, 8, 1, 1), (6, 12, 2, 1), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1)]
    wanted = [(t, c, s if i == 0 else 1) for t, c, n, s in card for i in range(n)]
    found = [
        (block.depthwise[0].groups // block.expand[0].in_channels, block.project[0].out_channels, *set(strides))
        for block in blocks(net)
        if (strides := block.depthwise[0].stride)
    ]
    assert found == wanted
    stem, last = net.encoder[0][0], net.encoder[-4][0]
    assert (stem.out_channels, stem.kernel_size, stem.stride) == (32, (3, 3), (1, 1))
    assert (last.in_channels, last.out_channels, last.kernel_size) == (160, 640, (1, 1))


@pytest.mark.parametrize(("side", "left"), [(32, 4), (28, 4), (64, 8), (8, 1)])
def test_maps_shrink_eightfold(side, left):
    net = network((3, side, side))
    maps = net.encoder[:-2].eval()(draw(2, 3, side, side))
    assert maps.shape == (2, 160, left, left)
    features, logits = net.eval()(draw(2, 3, side, side))
    assert features.shape == (2, 160)
    torch.testing.assert_close(features, maps.mean((2, 3)))
    assert logits.shape == (2, 4)


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_vmap_can_train_its_depthwise_convolutions(norm):
    assert why_unbatchable(network((3, 8, 8), norm=norm).float(), torch.zeros(3, 3, 8, 8)) is None


@pytest.mark.matrix
def test_both_engines_train_a_cohort_to_the_same_models():
    model = build_model("mobilenet_v2", input_shape=(3, 16, 16), classes=4, width=0.125)
    labels = torch.arange(27) % 4
    images = draw(27, 3, 16, 16).float()
    dataset = Dataset("noise", images, labels, tuple("abcd"))
    federation = Federation(dataset, dataset, torch.arange(27), torch.tensor([0, 12, 22, 27]))
    start = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, model.init(0))
    training = Training(batch_size=6, epochs=1, lr=0.01, momentum=0.9)
    found = []
    for name in ("batched", "looped"):
        engine = build_engine(name, "cpu", model=model, federation=federation, precision="float64")
        work = LocalWork(cross_entropy(), training, start, seed=7)
        found.append(engine.train(work, np.arange(3), {}).uploads.weights)
    moved = (found[0].params["head.weight"][0] - start.params["head.weight"]).abs().max()
    assert moved > 1e-4
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_a_whole_number_is_a_width():
    one, same = (build_model("mobilenet_v2", input_shape=(3, 8, 8), classes=4, width=w).init(0) for w in (1, 1.0))
    assert all(torch.equal(one.params[key], same.params[key]) for key in one.params)
