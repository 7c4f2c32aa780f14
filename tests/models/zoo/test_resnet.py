"""The networks of FedFTG: their layers beside the papers', and the same models from both engines."""

from __future__ import annotations

import pytest
import torch
from engine_cases import trained_in_float64
from torch import Tensor, nn

from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.types import Training, Weights
from fedstill.models import MODELS, build_model, why_unbatchable
from fedstill.models.zoo.resnet import BasicBlock


def network(name: str, shape: tuple[int, int, int], **options: object) -> nn.Module:
    with torch_stream(0):
        return MODELS[name](shape, 4, **options)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(0))


def sizes_after_each_layer(net: nn.Module, shape: tuple[int, int, int]) -> list[tuple[int, int]]:
    """(maps, side) after the stem and each block, convolution and pooling."""
    x, found = draw(2, *shape), []
    with torch.no_grad():
        for layer in net.eval().encoder:
            x = layer(x)
            if isinstance(layer, nn.Sequential | BasicBlock | nn.Conv2d | nn.MaxPool2d):
                found.append((x.shape[1], x.shape[2]))
    return found


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", (2, 2, 2, 2)), ("resnet34", (3, 4, 6, 3))])
@pytest.mark.parametrize(
    ("stem", "first", "sides"), [("imagenet", [(64, 16), (64, 8)], (8, 4, 2, 1)), ("cifar", [(64, 32)], (32, 16, 8, 4))]
)
def test_stages_and_maps_on_32x32_images_are_those_of_the_card(name, blocks, stem, first, sides):
    """Card 19: with the ImageNet stem 32 pixels become 16, 8, 8, 4, 2, 1."""
    stages = [
        (width, side)
        for width, side, count in zip((64, 128, 256, 512), sides, blocks, strict=True)
        for _ in range(count)
    ]
    assert sizes_after_each_layer(network(name, (3, 32, 32), stem=stem), (3, 32, 32)) == first + stages


@pytest.mark.parametrize(("side", "last"), [(32, [(512, 2), (512, 2), (512, 1)]), (28, [(512, 1), (512, 1)])])
def test_vgg11_has_eight_convolutions_and_leaves_one_pixel(side, last):
    """Configuration A of VGG; FedNTD drops the last pooling for 28x28 images."""
    wanted = [
        *((64, side), (64, side // 2), (128, side // 2), (128, side // 4)),
        *((256, side // 4), (256, side // 4), (256, side // 8), (512, side // 8), (512, side // 8), (512, side // 16)),
    ]
    found = sizes_after_each_layer(network("vgg11", (1, side, side)), (1, side, side))
    assert found == wanted + last


def test_vgg11_starts_as_fedntd_does():
    """Convolutions N(0, 2 / (9 x filters)), biases 0; dense layers as PyTorch starts them."""
    layers = [layer for layer in network("vgg11", (3, 32, 32)).modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert layers[7].weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    assert not any(layer.bias.any() for layer in layers[:8])
    assert layers[8].weight.abs().max().item() == pytest.approx(512**-0.5, rel=0.01)


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_resnet18_with_two_groups_has_feddyns_norms_and_no_buffers(stem):
    net = network("resnet18", (3, 8, 8), stem=stem, norm="group")
    norms = [layer for layer in net.modules() if isinstance(layer, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {2}
    assert len(norms) == 20
    assert not list(net.buffers())


def test_resnet34_has_the_buffer_entries_of_its_norms():
    """Two statistics a normed channel and a counter a norm: stem, two a block, one a changed shortcut."""
    channels = 64 + 2 * (3 * 64 + 4 * 128 + 6 * 256 + 3 * 512) + 128 + 256 + 512
    buffers = network("resnet34", (3, 8, 8)).buffers()
    assert sum(leaf.numel() for leaf in buffers) == 2 * channels + 1 + 2 * 16 + 3


def trained(engine: str, name: str, shape: tuple[int, int, int], options: dict[str, object]) -> tuple[Weights, Weights]:
    """(start, models of two clients after an epoch)."""
    model = build_model(name, input_shape=shape, classes=4, **options)
    images = draw(12, *shape), torch.arange(12) // 3
    return trained_in_float64(engine, model, images, (4, 8), Training(batch_size=4, epochs=1, lr=0.01))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        # On 8x8 images the ImageNet stem leaves one pixel, and BatchNorm over a few values makes rounding errors large.
        ("resnet18", (3, 16, 16), {"stem": "cifar"}),
        ("resnet18", (3, 8, 8), {"norm": "group"}),
        ("resnet34", (3, 8, 8), {"norm": "group"}),
        ("vgg11", (3, 16, 16), {}),
        ("vgg11", (3, 16, 16), {"norm": "batch"}),
    ],
)
def test_both_engines_train_a_cohort_to_the_same_models(name, shape, options):
    start, batched = trained("batched", name, shape, options)
    _, looped = trained("looped", name, shape, options)
    assert (batched.params["head.bias"][0] - start.params["head.bias"]).abs().max() > 1e-4
    torch.testing.assert_close(batched, looped, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_vmap_can_train_resnet34():
    assert why_unbatchable(network("resnet34", (3, 8, 8)), draw(3, 3, 8, 8)) is None
