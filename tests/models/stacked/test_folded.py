"""Grouped convolutions of many clients as one, on any device; the truth is one client after the other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Weights
from fedstill.models import MODELS, build_model, from_module
from fedstill.models.stacked import convolutions as stacked_conv
from fedstill.models.stacked import folded as folded_conv
from fedstill.models.stacked.folded import FoldedConv2d, FoldedGroupNorm, FoldedMean, FoldedShuffle
from fedstill.models.stateless import Context, convert, weights_of

CLIENTS, ROWS = 3, 4
LAYERS = {
    "1x1": nn.Conv2d(8, 6, 1, bias=False),
    "1x1 of two groups": nn.Conv2d(8, 12, 1, groups=2),
    "1x1 of every other pixel": nn.Conv2d(8, 6, 1, stride=2, bias=False),
    "1x1 of a wider image": nn.Conv2d(8, 6, 1, padding=1),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    "depthwise, wide apart": nn.Conv2d(6, 6, 3, padding=2, dilation=2, stride=2, groups=6),
    "two filters a channel": nn.Conv2d(5, 10, 3, groups=5),
    "few channels": nn.Conv2d(3, 7, 3, padding=1),
    "of no symmetry": nn.Conv2d(6, 4, (2, 3), padding=(0, 2), stride=(2, 1), groups=2),
}


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    """A GPU's own kernels would take the place of folding where they suit a layer."""
    monkeypatch.setattr(stacked_conv, "available", lambda: False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def folded(layer: nn.Module) -> nn.Module:
    """A copy that runs many clients at once."""
    return convert(copy.deepcopy(layer), Context())


def inputs_of(layer: nn.Conv2d) -> list[Tensor]:
    x = draw(CLIENTS, ROWS, layer.in_channels, 9, 8)
    bias = [] if layer.bias is None else [draw(CLIENTS, layer.out_channels, seed=2)]
    return [tensor.requires_grad_() for tensor in (x, draw(CLIENTS, *layer.weight.shape, seed=1), *bias)]


def call(module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
    found: Tensor = torch.func.functional_call(module, dict(zip(("weight", "bias"), weights, strict=False)), (x,))
    return found


def plain(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


@pytest.mark.parametrize("name", LAYERS)
def test_all_clients_at_once_are_each_clients_convolution_and_gradients(name):
    layer = LAYERS[name]
    inputs, own = inputs_of(layer), folded(layer)
    assert type(own) is FoldedConv2d
    found = torch.func.vmap(lambda *each: call(own, *each))(*inputs)
    wanted = torch.stack([plain(layer, *each) for each in zip(*inputs, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    direction = draw(*wanted.shape, seed=3)
    gradients = [torch.autograd.grad(result, inputs, direction) for result in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["1x1 of two groups", "depthwise", "few channels"])
def test_clients_that_see_the_same_images_and_share_a_bias(name):
    layer = LAYERS[name]
    x, weight = (tensor.detach() for tensor in inputs_of(layer)[:2])
    bias = draw(layer.out_channels, seed=4)
    biased = folded(nn.Conv2d(**{**settings(layer), "bias": True}))
    found = torch.func.vmap(lambda own: call(biased, x[0], own, bias))(weight)
    wanted = torch.stack([plain(layer, x[0], own, bias) for own in weight])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def settings(layer: nn.Conv2d) -> dict[str, object]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    return {name: getattr(layer, name) for name in names}


def test_gradients_of_gradients():
    layer = LAYERS["1x1 of two groups"]
    inputs, own = inputs_of(layer), folded(layer)

    def twice(result: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), inputs)

    found = torch.func.vmap(lambda *each: call(own, *each))(*inputs)
    wanted = torch.stack([plain(layer, *each) for each in zip(*inputs, strict=True)])
    torch.testing.assert_close(twice(found), twice(wanted), rtol=1e-11, atol=1e-11)


def test_a_chain_of_them_copies_no_image():
    """What one leaves, the next one takes as it lies: else folding would cost what it saves."""
    image = folded_conv.fold(draw(CLIENTS, ROWS, 8, 5, 5), 0, CLIENTS)
    assert image.shape == (ROWS, CLIENTS * 8, 5, 5)
    for name in ("1x1 of two groups", "depthwise"):
        layer = LAYERS[name]
        out = folded_conv.convolve(image, draw(CLIENTS, *layer.weight.shape), folded_conv.form_of(layer))
        assert out.is_contiguous(memory_format=torch.channels_last)
        parted = folded_conv.unfold(out, CLIENTS)
        assert folded_conv.fold(parted.relu() + parted, 1, CLIENTS).stride() == out.stride()
        assert folded_conv.fold(parted, 1, CLIENTS).data_ptr() == out.data_ptr()


def test_alone_it_is_torchs_own_convolution_bit_for_bit():
    for layer in LAYERS.values():
        x = draw(ROWS, layer.in_channels, 9, 8).float()
        assert torch.equal(folded(layer)(x), layer(x))


def test_in_bf16_products_are_of_rounded_numbers():
    layer = LAYERS["1x1 of two groups"]
    inputs = [tensor.detach().float() for tensor in inputs_of(layer)]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.vmap(lambda *each: call(folded(layer), *each))(*inputs)
    exact = torch.stack([plain(layer, *each) for each in zip(*inputs, strict=True)])
    assert found.dtype == torch.bfloat16
    assert 0 < (found.float() - exact).norm() / exact.norm() < 1e-2  # eight bits of mantissa


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_all_clients_is_that_of_each(affine, training):
    x = draw(CLIENTS, ROWS, 5, 6, 6).requires_grad_()
    mean, variance = draw(CLIENTS, 5, seed=1), draw(CLIENTS, 5, seed=2).abs()
    before = mean.clone(), variance.clone()
    own = [draw(CLIENTS, 5, seed=seed).requires_grad_() for seed in (3, 4)] if affine else []
    how = {"training": training, "momentum": 0.1, "eps": 1e-5}

    def norm(x: Tensor, mean: Tensor, variance: Tensor, *own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = own or (None, None)
        return folded_conv.batch_norm(x, (mean, variance), weight, bias, **how)

    found, *running = torch.func.vmap(norm)(x, mean, variance, *own)
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])
    wanted = torch.stack([
        F.batch_norm(x[i], mean[i], variance[i], *(leaf[i] for leaf in own), **how) for i in range(CLIENTS)
    ])  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(running, [mean, variance], rtol=1e-12, atol=1e-12)
    direction = draw(*wanted.shape, seed=5)
    gradients = [torch.autograd.grad(result, (x, *own), direction) for result in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (FoldedMean(1), nn.AdaptiveAvgPool2d(1)),
        (FoldedGroupNorm(2, 8).double(), nn.GroupNorm(2, 8).double()),
        (FoldedShuffle(4), nn.ChannelShuffle(4)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_layers_between_convolutions_take_a_folded_image(own, kind):
    image = folded_conv.unfold(folded_conv.fold(draw(CLIENTS, ROWS, 8, 5, 5), 0, CLIENTS), CLIENTS).requires_grad_()
    found = torch.func.vmap(own, in_dims=1)(image)
    wanted = torch.stack([kind(each) for each in image.unbind(1)])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    direction = draw(*wanted.shape)
    gradients = [torch.autograd.grad(result, image, direction) for result in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert torch.equal(own(image[:, 0]), kind(image[:, 0]))


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        *((layer, True) for layer in LAYERS.values()),
        (nn.Conv2d(512, 512, 1), True),
        (nn.Conv2d(7, 8, 3), True),
        (nn.Conv2d(8, 8, 3), False),
        (nn.Conv2d(16, 16, 3, groups=2), False),
        (nn.Conv2d(3, 8, 3, dilation=2), False),
        (nn.Conv2d(8, 8, 1, padding="same"), False),
        (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=8), False),
        (nn.ConvTranspose2d(8, 8, 1), False),
        (nn.Conv1d(8, 8, 1), False),
    ],
)
def test_what_folds(layer, fits):
    assert folded_conv.folds(layer) is fits


@pytest.mark.parametrize(("name", "fold"), [("mobilenet_v2", True), ("shufflenet", True), ("resnet8", False)])
def test_a_network_folds_if_all_its_convolutions_do(name, fold):
    network = convert(MODELS[name]((3, 16, 16), 4), Context())
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | FoldedConv2d)]
    assert convolutions
    assert all(isinstance(layer, FoldedConv2d) is fold for layer in convolutions)


class AsksForItself(nn.Module):
    """Its function asks how memory lies, and nobody can replace a function."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.group_norm(self.mix(x), 2).mean((2, 3)))


class Views(nn.Module):
    """Flattens as only images of one order in memory can be."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Conv2d(3, 8, kernel), nn.BatchNorm2d(8), nn.Linear(8 * (7 - kernel) ** 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(x)).view(len(x), -1))


@pytest.mark.parametrize("module", [AsksForItself(), Views(1), Views(3)], ids=["asks", "views", "does not fold"])
def test_a_module_that_cannot_read_a_folded_image_runs_for_many_clients_without(module):
    model = from_module(module, input_shape=(3, 6, 6), classes=4)
    assert model.traits.unbatchable is None
    weights, x = stack([weights_of(module)] * CLIENTS), draw(CLIENTS, ROWS, 3, 6, 6).float()
    for training in (True, False):

        def answer(weights: Weights, x: Tensor, mode: bool = training) -> Tensor:
            return model.apply(weights, x, training=mode)[0].logits

        wanted = torch.stack([answer(rows(weights, i), x[i]) for i in range(CLIENTS)])
        torch.testing.assert_close(torch.func.vmap(answer)(weights, x), wanted)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.pool, self.head = nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)
        self.norm = nn.BatchNorm2d(8)
        for layer in (self.mix, self.norm, self.pool):
            layer.register_forward_hook(lambda _, __, out: 2.0 * out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.norm(self.mix(x))).flatten(1)) * self.mix.out_channels


def test_layers_keep_their_hooks_and_attributes():
    module = Reads().eval()
    x = draw(ROWS, 3, 6, 6).float()
    model = from_module(module, input_shape=(3, 6, 6), classes=4)
    assert torch.equal(model.apply(weights_of(module), x, training=False)[0].logits, module(x))


def test_a_gradient_within_vmap_of_a_layer_that_does_not_train():
    """As objectives that look at curvature do; the frozen weight is seen by vmap, not by torch.func.grad."""
    layer, own = LAYERS["1x1"], folded(LAYERS["1x1"])
    x, weight = (tensor.detach() for tensor in inputs_of(layer))

    def slope(run):
        return lambda x, weight: torch.func.grad(lambda scale: run(scale * x, weight).square().sum())(torch.tensor(2.0))

    found = torch.func.vmap(slope(lambda x, weight: call(own, x, weight)))(x, weight)
    wanted = torch.stack(
        [slope(lambda x, weight: plain(layer, x, weight))(*each) for each in zip(x, weight, strict=True)]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["mobilenet_v2", "shufflenet"])
@pytest.mark.filterwarnings("error")
def test_networks_that_fold_answer_in_eval_mode_as_each_client_does(name):
    model = build_model(name, input_shape=(3, 16, 16), classes=4)
    each = [tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, model.init(i)) for i in range(2)]
    x = draw(ROWS, 3, 16, 16)
    found = torch.func.vmap(lambda weights: model.apply(weights, x, training=False)[0].logits)(stack(each))
    wanted = torch.stack([model.apply(weights, x, training=False)[0].logits for weights in each])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
