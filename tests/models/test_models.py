"""Every built-in network: shapes, parameter counts, one client against many, padding, initialisation."""

from functools import cache

import pytest
import torch
from quick import first_quick, quick_if
from torch import Tensor, nn
from torch.func import vmap

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Model, Weights
from fedstill.models import MODELS, READS_TEXT, build_model, form_of, model_options

CIFAR, MNIST, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)
# others: test_model_recurrent, _transformer; resnet34, which is resnet18 with more blocks: test_model_deep
IMAGE_NETS = [name for name in MODELS if name not in READS_TEXT | {"resnet34"}]

# Parameter counts of the method cards: (name, input, classes, options, parameters, features)
COUNTS = [
    ("mlp", MNIST, 10, {}, 1_985_930, 128),
    ("mlp", (64,), 10, {"hidden": [64]}, 64 * 64 + 64 + 64 * 10 + 10, 64),
    ("mlp", DIGITS, 10, {"hidden": []}, 64 * 10 + 10, 64),
    ("cnn", CIFAR, 10, {}, 2_156_490, 512),
    ("cnn", CIFAR, 100, {}, 2_202_660, 512),
    ("cnn", MNIST, 10, {}, 1_663_370, 512),
    ("cnn", DIGITS, 10, {}, 32 * 26 + 64 * (32 * 25 + 1) + 512 * (64 * 4 + 1) + 5130, 512),
    ("lenet5", CIFAR, 10, {}, 62_006, 84),
    ("lenet5", CIFAR, 100, {}, 69_656, 84),
    ("lenet", CIFAR, 10, {}, 66_766, 400),
    ("convnet", CIFAR, 10, {}, 188_810, 1024),
    ("fecnn", MNIST, 62, {}, 6_603_710, 3136),
    ("fecnn", MNIST, 62, {"form": "released"}, 608_702, 1024),
    ("vgg8", CIFAR, 10, {}, 4_444_170, 512),
    ("vgg8", CIFAR, 100, {}, 4_490_340, 512),
    ("vgg8", CIFAR, 10, {"norm": "none"}, 4_441_226, 512),
    ("vgg11", CIFAR, 10, {}, 9_750_922, 512),
    ("vgg11", MNIST, 10, {}, 9_750_922 - 2 * 9 * 64, 512),  # two colours less in the first convolution
    ("vgg11", (3, 64, 64), 10, {}, 9_750_922 + 3 * 512 * 512, 512),  # four pixels of the last maps, not one
    ("vgg11", CIFAR, 10, {"norm": "batch"}, 9_750_922 + 2 * 2752, 512),
    ("resnet8", CIFAR, 10, {}, 78_042, 64),
    ("resnet8", CIFAR, 100, {}, 83_892, 64),
    ("resnet20", CIFAR, 10, {}, 272_474, 64),
    ("resnet20", CIFAR, 100, {}, 278_324, 64),
    ("resnet8_wide", CIFAR, 10, {}, 4_903_242, 512),
    ("resnet8_wide", CIFAR, 100, {}, 4_949_412, 512),
    ("resnet18", CIFAR, 10, {}, 11_181_642, 512),
    ("resnet18", CIFAR, 10, {"stem": "cifar"}, 11_173_962, 512),
    ("resnet18", CIFAR, 100, {}, 11_227_812, 512),
    ("resnet34", CIFAR, 10, {}, 21_289_802, 512),
    ("mobilenet_v2", CIFAR, 10, {}, 2_296_922, 1280),
    ("mobilenet_v2", CIFAR, 10, {"width": 0.5}, 604_178, 640),
    ("mobilenet_v2", CIFAR, 100, {"width": 0.5}, 604_178 + 90 * 641, 640),
    ("mobilenet_v2", MNIST, 10, {}, 2_296_922 - 2 * 9 * 32, 1280),  # two colours less in the stem
    ("mobilenet_v2", (3, 64, 64), 200, {"width": 0.5}, 604_178 + 190 * 641, 640),
    ("shufflenet", CIFAR, 10, {}, 887_582, 800),
    ("shufflenet", CIFAR, 100, {}, 887_582 + 90 * 801, 800),
    ("shufflenet", MNIST, 10, {}, 887_582 - 2 * 24, 800),  # two colours less in the stem
    ("shufflenet", (3, 64, 64), 10, {}, 887_582, 800),
    # with MOON's projection d -> d -> p: d^2 + d + (d + 1) p more, and a head of p instead of d
    ("lenet5", CIFAR, 10, {"projection": 256}, 62_006 + 84**2 + 84 + 85 * 256 + (256 - 84) * 10, 256),  # MOON's own
    ("cnn", CIFAR, 10, {"projection": 256}, 2_156_490 + 512**2 + 512 + 513 * 256 + (256 - 512) * 10, 256),
    ("mlp", MNIST, 10, {"projection": 32}, 1_985_930 + 128**2 + 128 + 129 * 32 + (32 - 128) * 10, 32),
    ("resnet8", CIFAR, 10, {"projection": 256}, 78_042 + 64**2 + 64 + 65 * 256 + (256 - 64) * 10, 256),
    ("resnet20", CIFAR, 10, {"projection": 256}, 272_474 + 64**2 + 64 + 65 * 256 + (256 - 64) * 10, 256),
    ("resnet8_wide", CIFAR, 10, {"projection": 8}, 4_903_242 + 512**2 + 512 + 513 * 8 + (8 - 512) * 10, 8),
    ("resnet18", CIFAR, 10, {"projection": 256}, 11_181_642 + 512**2 + 512 + 513 * 256 + (256 - 512) * 10, 256),
    (
        *("mobilenet_v2", CIFAR, 10, {"width": 0.5, "projection": 256}),
        *(604_178 + 640**2 + 640 + 641 * 256 + (256 - 640) * 10, 256),
    ),
    ("shufflenet", CIFAR, 10, {"projection": 256}, 887_582 + 800**2 + 800 + 801 * 256 + (256 - 800) * 10, 256),
]

# Channels that a norm layer follows, by hand: stem, two a block (MobileNetV2, ShuffleNet: two of the hidden width and
# what the block adds), one a changed shortcut
NORMED = {
    "vgg8": 64 + 128 + 256 + 512 + 512,
    "vgg11": 64 + 128 + 2 * (256 + 512 + 512),
    "resnet8": 16 + 2 * (16 + 32 + 64) + 32 + 64,
    "resnet20": 16 + 6 * (16 + 32 + 64) + 32 + 64,
    "resnet8_wide": 64 + 2 * (64 + 128 + 256 + 512) + 128 + 256 + 512,
    "resnet18": 64 + 4 * (64 + 128 + 256 + 512) + 128 + 256 + 512,
    "mobilenet_v2": sum(
        (
            *(32, 2 * 32 + 16 + 16, 2 * 96 + 24 + 24, 2 * 144 + 24, 2 * 144 + 32, 2 * (2 * 192 + 32), 2 * 192 + 64),
            *(3 * (2 * 384 + 64), 2 * 384 + 96 + 96, 2 * (2 * 576 + 96), 2 * 576 + 160, 2 * (2 * 960 + 160)),
            *(2 * 960 + 320 + 320, 1280),
        )
    ),
    "shufflenet": sum(
        (
            *(24, 2 * 44 + 176, 3 * (2 * 50 + 200)),
            *(2 * 50 + 200, 7 * (2 * 100 + 400), 2 * 100 + 400, 3 * (2 * 200 + 800)),
        )
    ),
}
# At 8x8 MobileNetV2's last BatchNorms read one value a row: gradients of 25,000, and a rounding error of 1e-6 in them.
SMALLEST = {"vgg8": CIFAR} | dict.fromkeys(("lenet5", "lenet", "vgg11", "mobilenet_v2", "shufflenet"), (3, 16, 16))


@cache
def small(name: str, **options: object) -> Model:
    return build_model(name, input_shape=SMALLEST.get(name, (3, 8, 8)), classes=4, **options)


def is_first(case: tuple) -> bool:
    """Whether a row of COUNTS is its network's first."""
    return case is next(one for one in COUNTS if one[0] == case[0])


def size(weights: Weights) -> int:
    return sum(leaf.numel() for leaf in weights.params.values())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed), dtype=torch.float64)


@pytest.mark.parametrize(("name", "shape", "classes", "options", "parameters", "features"), quick_if(is_first, COUNTS))
def test_parameter_count_and_shapes_are_those_of_the_paper(name, shape, classes, options, parameters, features):
    model = build_model(name, input_shape=shape, classes=classes, **options)
    weights = model.init(0)
    assert size(weights) == parameters
    output, buffers = model.apply(weights, torch.rand(2, *shape, generator=torch_generator(1)))
    assert output.logits.shape == (2, classes)
    assert output.features.shape == (2, features)
    assert buffers.keys() == weights.buffers.keys()
    assert model.traits.features
    assert model.traits.unbatchable is None
    assert model.head is not None
    assert torch.allclose(model.head(weights.params, output.features), output.logits, atol=1e-5)


@pytest.mark.parametrize("name", quick_if(("vgg8", "resnet8").__contains__, NORMED))
def test_the_choice_of_norm_changes_the_count_by_the_channels_it_norms(name):
    models = [small(name, norm=norm) for norm in ("batch", "group", "none")]
    batch, group, none = (model.init(0) for model in models)
    channels = NORMED[name]
    own_biases = 0 if name.startswith("vgg") else channels  # a ResNet without norms has biases in its convolutions
    assert size(group) == size(batch)
    assert size(none) == size(batch) - 2 * channels + own_biases
    assert sum(leaf.numel() for leaf in batch.buffers.values() if leaf.dim()) == 2 * channels
    assert not group.buffers
    assert [model.traits.batch_statistics for model in models] == [True, False, False]


def test_resnet18_has_the_buffer_entries_of_the_released_code():
    buffers = build_model("resnet18", input_shape=CIFAR, classes=10).init(0).buffers
    assert sum(leaf.numel() for leaf in buffers.values()) == 9_620


def test_flags_say_what_a_network_is_made_of():
    assert not small("mlp").traits.convolutional
    assert all(small(name).traits.convolutional for name in IMAGE_NETS if name != "mlp")


def cohort(model: Model, shape: tuple[int, ...]) -> tuple[Weights, Tensor, Tensor, Tensor]:
    """Two clients with different weights, data, padding and seeds, in double precision."""
    both = stack([model.init(seed) for seed in (1, 2)])
    double = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, both)
    x = draw(2, 3, *shape)
    weight = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    return double, x, weight, torch.tensor([11, 12])


@pytest.mark.parametrize(
    ("name", "options", "training"),
    quick_if(
        lambda case: case[0] in ("mlp", "cnn", "lenet5", "resnet8"),
        [
            *((name, {}, True) for name in IMAGE_NETS),
            *((name, {}, False) for name in ("mlp", "cnn", "resnet8")),
            ("resnet8", {"norm": "group"}, True),
            ("resnet8", {"norm": "none"}, True),
            ("mobilenet_v2", {"width": 0.5, "norm": "group"}, True),
            ("shufflenet", {"norm": "none"}, True),
            ("lenet5", {"projection": 6}, True),
            ("fecnn", {"form": "released"}, True),
        ],
    ),
)
def test_many_clients_at_once_equal_one_after_the_other(name, options, training):
    model = small(name, **options)
    weights, x, weight, seeds = cohort(model, SMALLEST.get(name, (3, 8, 8)))
    leaves = [leaf.requires_grad_() for leaf in weights.params.values()]

    def client(weights: Weights, x: Tensor, weight: Tensor, seed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        output, buffers = model.apply(weights, x, training=training, weight=weight, seed=seed)
        per_row = output.logits.square().sum(1) + output.features.sin().sum(1)
        return (per_row * weight).sum(), buffers

    losses, buffers = vmap(client)(weights, x, weight, seeds)
    together = torch.autograd.grad(losses.sum(), leaves)
    alone = [client(rows(weights, i), x[i], weight[i], seeds[i]) for i in range(2)]
    one_by_one = torch.autograd.grad(alone[0][0] + alone[1][0], leaves)
    deep = name in ("mobilenet_v2", "shufflenet")  # BatchNorm of two rows of 2x2 maps, fifty layers deep
    close = 1e-8 if deep else 1e-10
    for a, b in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)
    for key in buffers:
        expected = torch.stack([alone[0][1][key], alone[1][1][key]])
        torch.testing.assert_close(buffers[key], expected, rtol=close, atol=close)


@pytest.mark.parametrize("name", first_quick(["vgg8", "resnet8", "mobilenet_v2", "shufflenet"], 2))
@pytest.mark.parametrize("garbage", first_quick([float("nan"), 1e9]))
def test_padding_changes_no_output_gradient_or_buffer(name, garbage):
    model = small(name)
    shape = SMALLEST.get(name, (3, 8, 8))
    weights = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, model.init(0))
    leaves = [leaf.requires_grad_() for leaf in weights.params.values()]
    real, seed = draw(3, *shape), torch.tensor(4)

    def step(x: Tensor, weight: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
        output, buffers = model.apply(weights, x, training=True, weight=weight, seed=seed)
        logits = output.logits[:3]
        return logits, torch.autograd.grad(logits.square().sum(), leaves), buffers

    plain = step(real, None)
    padded = step(torch.cat([real, torch.full_like(real, garbage)[:2]]), torch.tensor([1.0, 1, 1, 0, 0]))
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def pool_last(network: nn.Module) -> nn.Module:
    """The order of the papers: ReLU, then pooling."""
    encoder = network.encoder
    for i in range(len(encoder) - 1):
        if isinstance(encoder[i], nn.MaxPool2d) and isinstance(encoder[i + 1], nn.ReLU):
            encoder[i], encoder[i + 1] = encoder[i + 1], encoder[i]
    return network


@pytest.mark.parametrize(
    "name", first_quick(["cnn", "lenet5", "lenet", "convnet", "fecnn", "vgg8", "vgg11", "resnet18"], 2)
)
def test_relu_after_pooling_equals_relu_before_pooling_in_values_and_gradients(name):
    shape = SMALLEST.get(name, (3, 8, 8))
    with torch_stream(0):
        networks = [MODELS[name](shape, 4) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    assert any(isinstance(layer, nn.MaxPool2d) for layer in networks[1].encoder)
    orders = [networks[0], pool_last(networks[1])]
    assert [type(layer) for layer in orders[0].encoder] != [type(layer) for layer in orders[1].encoder]
    results = []
    for network in orders:
        network.eval().double()
        features, logits = network(draw(4, *shape))
        results.append((features, logits, *torch.autograd.grad(logits.square().sum(), list(network.parameters()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", first_quick(IMAGE_NETS, 2))
def test_init_is_a_function_of_the_seed_and_leaves_the_global_stream_alone(name):
    model = small(name)
    before = torch.random.get_rng_state()
    first, again, other = model.init(7), model.init(7), model.init(8)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first.params[key], again.params[key]) for key in first.params)
    assert not all(torch.equal(first.params[key], other.params[key]) for key in first.params)


def test_mrtf_networks_start_as_their_paper_says():
    params = build_model("vgg8", input_shape=CIFAR, classes=10, init="paper").init(0).params
    fan_out = 512 * 9
    assert params["encoder.16.weight"].std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.01)
    assert params["head.0.weight"].std().item() == pytest.approx(0.01, rel=0.01)
    assert all(not leaf.any() for name, leaf in params.items() if name.endswith("bias"))
    assert torch.equal(params["encoder.1.weight"], torch.ones(64))


def test_fedlmds_cnn_starts_as_pytorch_does():
    params = build_model("cnn", input_shape=CIFAR, classes=10).init(0).params
    bound = 1 / (3 * 25) ** 0.5  # U(-1/sqrt(fan in), 1/sqrt(fan in))
    weight = params["encoder.0.weight"]
    assert bound * 0.98 < weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    torch_default = build_model("mlp", input_shape=DIGITS, classes=10).init(0).params
    assert torch_default["encoder.1.weight"].abs().max().item() == pytest.approx(1 / 8, rel=0.02)


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_by_default_an_untrained_network_tells_samples_apart_and_as_in_mrtf_it_nearly_does_not(name):
    """The logits' deviation over the samples, which MrTF divides by: N(0, 0.01) weights in several layers shrink it."""
    x = torch.randn(64, *CIFAR, generator=torch.Generator().manual_seed(0))
    spread = {}
    for init in ("torch", "paper"):
        model = build_model(name, input_shape=CIFAR, classes=10, init=init)
        logits = model.apply(model.init(0), x)[0].logits
        spread[init] = float(logits.std(dim=0).mean())
    plain = build_model(name, input_shape=CIFAR, classes=10)
    assert float(plain.apply(plain.init(0), x)[0].logits.std(dim=0).mean()) == spread["torch"] > 4 * spread["paper"]


def test_without_a_projection_the_layers_draw_their_weights_one_after_the_other_with_the_head_last():
    with torch_stream(3):
        layers = [nn.Conv2d(3, 32, 5), nn.Conv2d(32, 64, 5), nn.Linear(64 * 2 * 2, 512), nn.Linear(512, 4)]
    drawn = [leaf for layer in layers for leaf in (layer.weight, layer.bias)]
    params = small("cnn").init(3).params
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(params.values(), drawn, strict=True))


@pytest.mark.parametrize("name", first_quick(["cnn", "lenet5", "resnet8_wide", "mobilenet_v2", "shufflenet"], 2))
def test_a_projection_leaves_the_first_weights_before_it_as_they_are(name):
    """Of networks that PyTorch initialises; others draw a second time, over all layers in order."""
    plain, projected = (small(name, **options).init(3).params for options in ({}, {"projection": 6}))
    assert len(projected) == len(plain) + 4
    assert all(torch.equal(plain[key], projected[key]) for key in plain if key.startswith("encoder."))


def test_the_features_of_a_projected_network_are_what_its_head_reads_after_linear_relu_linear():
    shape = (3, 8, 8)
    model, plain = small("cnn", projection=6), small("cnn")
    params, x = model.init(3).params, torch.rand(2, *shape, generator=torch_generator(1))
    before = plain.apply(plain.init(3), x)[0].features
    (first, second) = sorted({key.rpartition(".")[0] for key in params if key.count(".") == 3})
    hidden = (before @ params[f"{first}.weight"].T + params[f"{first}.bias"]).relu()
    features = hidden @ params[f"{second}.weight"].T + params[f"{second}.bias"]
    output = model.apply(model.init(3), x)[0]
    torch.testing.assert_close(output.features, features)
    torch.testing.assert_close(output.logits, features @ params["head.weight"].T + params["head.bias"])


def test_a_projection_starts_as_pytorch_does_in_networks_that_start_as_mrtf_does():
    params = build_model("resnet8", input_shape=CIFAR, classes=10, projection=256).init(0).params
    (first,) = (leaf for leaf in params.values() if leaf.shape == (64, 64))
    assert first.abs().max().item() == pytest.approx(1 / 8, rel=0.02)  # U(-1/sqrt(fan in), 1/sqrt(fan in))
    assert params["head.weight"].std().item() == pytest.approx(0.01, rel=0.1)


def test_mistakes_are_told_in_one_line_with_the_nearest_word():
    def message(*args, **options):
        with pytest.raises(FedstillError) as caught:
            build_model(*args, **{"input_shape": CIFAR, "classes": 10, **options})
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "did you mean 'resnet18'" in message("resnet-18")
    assert "did you mean 'norm'" in message("vgg8", nrm="batch")
    assert "model.norm is not an option of 'cnn'" in message("cnn", norm="batch")
    assert "model.projection = -1 must be a whole number" in message("cnn", projection=-1)
    assert "model.projection = 2.5" in message("resnet8", projection=2.5)
    assert "model.projection is not an option of 'vgg8'" in message("vgg8", projection=4)
    assert "model.norm = 'layer' is unknown" in message("vgg8", norm="layer")
    assert "did you mean 'imagenet'" in message("resnet18", stem="image")
    assert "needs images" in message("cnn", input_shape=(64,))
    assert "at least 32x32, these are 28x28" in message("vgg8", input_shape=MNIST)
    assert "at least 16x16, these are 8x8" in message("vgg11", input_shape=DIGITS)
    assert "did you mean 'resnet34'" in message("resnet-34")
    assert "must divide the 16 channels" in message("resnet8", norm="group", groups=3)
    assert "model.hidden" in message("mlp", hidden=[0])
    assert "model.dropout" in message("vgg8", dropout=1.5)
    assert "did you mean 'mobilenet_v2'" in message("mobilenetv2")
    assert "did you mean 'shufflenet'" in message("shuflenet")
    assert "needs images" in message("shufflenet", input_shape=(64,))
    assert "must divide the 24 channels" in message("shufflenet", norm="group", groups=5)
    for width in (0.3, 0, -1, True, float("nan"), "half"):
        assert f"model.width = {width} must be a multiple of 0.125 above 0" in message("mobilenet_v2", width=width)
    assert "must divide the 3 channels" in message("mobilenet_v2", width=0.125, norm="group")


def test_options_and_their_defaults_can_be_listed():
    assert model_options("cnn") == {"projection": 0}
    assert model_options("resnet18") == {"stem": "imagenet", "norm": "batch", "groups": 2, "projection": 0}


@pytest.mark.parametrize(
    ("make", "width"), [(build, width) for build in ("model", "form") for width in (2**62, 2**64)] + [("model", 10**13)]
)
def test_a_network_that_no_machine_holds_is_one_line(make, width):
    facts = {"input_shape": (64,), "classes": 10, "hidden": [width]}
    with pytest.raises(FedstillError, match="cannot be made with these options") as caught:
        build_model("mlp", **facts) if make == "model" else form_of("mlp", most=100, **facts)
    assert "\n" not in str(caught.value)
