"""MobileNetV2: what a block computes, how far images shrink, the same models from both engines."""

import numpy as np
import pytest
import torch
from engine_cases import trained_in_float64
from torch import Tensor, nn

from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.types import Training
from fedstill.models import MODELS, build_model, why_unbatchable
from fedstill.models.zoo.mobile import InvertedResidual, Unit


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


def test_a_whole_number_is_a_width():
    one, same = (build_model("mobilenet_v2", input_shape=(3, 8, 8), classes=4, width=w).init(0) for w in (1, 1.0))
    assert all(torch.equal(one.params[key], same.params[key]) for key in one.params)


# ShuffleNet: what a unit computes, the same models from both engines.


def shufflenet(side: int, **options: object) -> nn.Module:
    with torch_stream(0):
        return MODELS["shufflenet"]((3, side, side), 4, **options).double()


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
    unit = units(shufflenet(8, norm="none"))[index]
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
        for unit in units(shufflenet(8))
    ]
    first = [(24, 44, 176, 2, 1, 2), (200, 50, 200, 2, 2, 2), (400, 100, 400, 2, 2, 2)]
    later = [(200, 50, 200, 1, 2, 2), (400, 100, 400, 1, 2, 2), (800, 200, 800, 1, 2, 2)]
    assert found == [first[0], *3 * [later[0]], first[1], *7 * [later[1]], first[2], *3 * [later[2]]]
    assert all(unit.depthwise[0].groups == unit.depthwise[0].in_channels for unit in units(shufflenet(8)))
    stem = shufflenet(8).encoder[0][0]
    assert (stem.out_channels, stem.kernel_size, stem.stride) == (24, (1, 1), (1, 1))


@pytest.mark.parametrize(("side", "left"), [(32, 4), (28, 4), (64, 8), (8, 1)])
def test_maps_shrink_eightfold_and_the_features_are_their_means(side, left):
    net = shufflenet(side).eval()
    x = draw(2, 3, side, side)
    maps = net.encoder[:-2](x)
    assert maps.shape == (2, 800, left, left)
    torch.testing.assert_close(net(x)[0], maps.mean((2, 3)))


def test_vmap_can_train_its_grouped_convolutions():
    assert why_unbatchable(shufflenet(8, norm="none").float(), torch.zeros(3, 3, 8, 8)) is None


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "options", "sizes"), [("mobilenet_v2", {"width": 0.125}, (12, 10, 5)), ("shufflenet", {}, (9, 6))]
)
def test_both_engines_train_a_cohort_to_the_same_models(name, options, sizes):
    model, count = build_model(name, input_shape=(3, 16, 16), classes=4, **options), sum(sizes)
    images = draw(count, 3, 16, 16).float(), torch.arange(count) % 4
    training = Training(batch_size=6, epochs=1, lr=0.01, momentum=0.9)
    (start, batched), (_, looped) = (
        trained_in_float64(engine, model, images, sizes, training) for engine in ("batched", "looped")
    )
    assert (batched.params["head.weight"][0] - start.params["head.weight"]).abs().max() > 1e-4
    torch.testing.assert_close(batched, looped, rtol=1e-9, atol=1e-9)
