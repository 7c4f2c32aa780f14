"""Generators: parameter counts and layers of the papers, what comes out, where gradients go, many at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Model, Weights
from fedstill.methods.data_free.generators import GENERATORS, Wanted, build_generator
from fedstill.models import why_unbatchable

CIFAR, FASHION, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)
# Of each generator one that is quick to run: (name, shape, inputs)
QUICK = [
    ("conv", (3, 8, 12), ()),
    ("conv_paper", (3, 8, 12), ()),
    ("deconv", (3, 16, 32), ()),
    ("small", (1, 7, 5), ()),
    ("features_large", (6,), (3, 4, 5)),
    ("dense", (6,), ()),
    ("table", (6,), ()),
]


def network(name: str, shape: tuple[int, ...], classes: int, noise: int, inputs: tuple[int, ...] = ()) -> nn.Module:
    with torch.device("meta"):  # 72 M parameters are only counted
        return GENERATORS[name](Wanted(name, shape, classes, noise, inputs))


def size(module: nn.Module) -> int:
    return sum(leaf.numel() for leaf in module.parameters())


def built(name: str, shape: tuple[int, ...], inputs: tuple[int, ...] = ()) -> Model:
    return build_generator(name, shape=shape, classes=3, noise=4, inputs=inputs)


def asked(count: int, *, classes: int = 3, noise: int = 4, seed: int = 0) -> Tensor:
    """Noise beside a one-hot class, each class in turn."""
    z = torch.randn(count, noise, generator=torch_generator(seed), dtype=torch.float64)
    return torch.cat([z, torch.eye(classes, dtype=torch.float64)[torch.arange(count) % classes]], dim=1)


def double(weights: Weights) -> Weights:
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, weights)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "noise", "parameters"),
    [
        ("conv", CIFAR, 10, 100, 682_499),  # card 19
        ("conv", CIFAR, 100, 256, 1_690_115),
        ("conv_paper", CIFAR, 10, 100, 682_499),
        ("features", (512,), 10, 100, 71_803_392),
        # two dense layers into s^2 = 4096, BatchNorm 8192, two of 4096 with BatchNorm, 512
        (
            *("features_large", (512,), 200, 256),
            257 * 4096 + 201 * 4096 + 2 * 8192 + 8193 * 4096 + 4097 * 4096 + 2 * 2 * 4096 + 4097 * 512,
        ),
        # two dense layers into 64^2, BatchNorm 512, 4x4 kernels without bias with BatchNorm, 3x3 to three colours
        (
            *("deconv", (3, 64, 64), 200, 256),
            (257 + 201) * 4096
            + 2 * 512
            + 16 * (512 * 256 + 256 * 128 + 128 * 64 + 64 * 64)
            + 2 * (256 + 128 + 64 + 64)
            + (9 * 64 + 1) * 3,
        ),
        ("small", FASHION, 10, 100, 111 * 128 + 2 * 128 + 129 * 784),
        ("small", DIGITS, 10, 100, 111 * 128 + 2 * 128 + 129 * 64),
        ("dense", (512,), 10, 32, 43 * 256 + 2 * 256 + 257 * 512),  # FedGen's, of 42 numbers
        ("table", (13,), 3, 32, 36 * 256 + 2 * 256 + 257 * 13),
    ],
)
def test_parameter_counts_are_those_of_the_tables_and_small_for_small_images(name, shape, classes, noise, parameters):
    assert size(network(name, shape, classes, noise)) == parameters


def test_layers_of_table_8b_are_as_wide_as_the_images_of_the_run_have_pixels():
    layers = [layer for layer in network("features_large", (7,), 10, 100, CIFAR) if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(2048, 1024), (1024, 1024), (1024, 7)]


def maps(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and maps of every convolution and enlargement of a run."""
    found: list[tuple[str, tuple[int, ...]]] = []
    with torch_stream(0):
        module = GENERATORS[name](Wanted(name, shape, 3, 4, ()))
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Upsample):
            layer.register_forward_hook(
                lambda layer, _, out: found.append((type(layer).__name__, tuple(out.shape[1:])))
            )
    with torch.no_grad():
        module(asked(2).float())
    return found


def test_the_code_enlarges_before_a_convolution_and_the_paper_after():
    """Card 19: convolutions at 16, 32, 32 in the code and at 8, 16, 32 in Table 7(a)."""
    last = ("Conv2d", CIFAR)
    assert maps("conv", CIFAR) == [
        *(("Upsample", (128, 16, 16)), ("Conv2d", (128, 16, 16))),
        *(("Upsample", (128, 32, 32)), ("Conv2d", (64, 32, 32)), last),
    ]
    assert maps("conv_paper", CIFAR) == [
        *(("Conv2d", (128, 8, 8)), ("Upsample", (128, 16, 16))),
        *(("Conv2d", (64, 16, 16)), ("Upsample", (64, 32, 32)), last),
    ]


def test_table_8a_doubles_the_sides_four_times():
    stages = [(256, 8, 8), (128, 16, 16), (64, 32, 32), (64, 64, 64)]
    wanted = [*(("ConvTranspose2d", stage) for stage in stages), ("Conv2d", (3, 64, 64))]
    assert maps("deconv", (3, 64, 64)) == wanted


def test_feature_generators_compute_what_their_table_says():
    """Table 8(b) in NumPy, in eval mode: the first running statistics are mean 0 and variance 1."""
    model = built("features_large", (6,), (3, 4, 5))
    weights = double(model.init(0))
    x = asked(5)
    of = [leaf.numpy() for leaf in weights.params.values() if leaf.dim() == 2]
    biases = [weights.params[name[:-6] + "bias"].numpy() for name, leaf in weights.params.items() if leaf.dim() == 2]
    norm = 1 / np.sqrt(1 + 1e-5)
    z, y = x[:, :4].numpy(), x[:, 4:].numpy()
    hidden = norm * np.concatenate([z @ of[0].T + biases[0], y @ of[1].T + biases[1]], axis=1)
    for weight, bias in zip(of[2:4], biases[2:4], strict=True):
        hidden = norm * (hidden @ weight.T + bias)
        hidden = np.where(hidden > 0, hidden, 0.2 * hidden)
    found = model.apply(weights, x)[0].logits
    np.testing.assert_allclose(found.numpy(), hidden @ of[4].T + biases[4], rtol=1e-10, atol=1e-12)
    assert found.shape == (5, 6)


def normed(x: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> Tensor:
    """BatchNorm by its formula."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
    scale, shift = (torch.as_tensor(part).reshape(1, -1, 1, 1) for part in (scale, shift))
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def leaky(x: Tensor) -> Tensor:
    return x.clamp_min(0) + 0.2 * x.clamp_max(0)


def enlarged(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def test_the_default_generator_computes_what_fedftgs_code_does():
    """Card 19: dense layers side by side, BN, x2, conv, BN, LeakyReLU, x2, conv, BN, LeakyReLU, conv, Tanh, BN."""
    model = built("conv", (3, 8, 12))
    weights = double(model.init(0))
    values = [leaf + 0.1 * torch.arange(leaf.numel()).reshape(leaf.shape).cos() for leaf in weights.params.values()]
    pairs = list(zip(values[::2], values[1::2], strict=True))  # weight and bias of each layer, in order
    (of_noise, of_class, first, conv_1, norm_1, conv_2, norm_2, conv_3), x = pairs, asked(5)
    flat = torch.cat([F.linear(x[:, :4], *of_noise), F.linear(x[:, 4:], *of_class)], dim=1)
    maps = enlarged(normed(flat.reshape(5, 128, 2, 3), *first))
    maps = enlarged(leaky(normed(F.conv2d(maps, *conv_1, padding=1), *norm_1)))
    maps = leaky(normed(F.conv2d(maps, *conv_2, padding=1), *norm_2))
    images = normed(F.conv2d(maps, *conv_3, padding=1).tanh())
    changed = Weights(dict(zip(weights.params, values, strict=True)), weights.buffers)
    found = model.apply(changed, x, training=True)[0].logits
    torch.testing.assert_close(found, images.flatten(1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "shape"), [("conv", CIFAR), ("small", FASHION), ("small", (3, 9, 13)), ("deconv", (2, 16, 16))]
)
def test_images_of_a_batch_are_normalised_as_the_inputs_of_a_run_are(name, shape):
    model = built(name, shape)
    samples = model.apply(model.init(0), asked(30).float(), training=True)[0].logits
    assert samples.shape == (30, np.prod(shape))
    images = samples.reshape(30, *shape)
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(shape[0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(images.var((0, 2, 3)), torch.ones(shape[0]), atol=0.01, rtol=0)


def test_columns_of_a_table_are_normalised_and_features_are_not():
    table, features = built("table", (6,)), built("dense", (6,))
    drawn = [model.apply(model.init(0), asked(30).float(), training=True)[0].logits for model in (table, features)]
    torch.testing.assert_close(drawn[0].mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn[0].var(0, correction=0), torch.ones(6), atol=1e-3, rtol=0)
    assert (drawn[1].mean(0).abs() > 1e-3).any()


def test_the_printed_generator_ends_in_values_from_minus_one_to_one():
    model = built("conv_paper", (3, 8, 8))
    samples = model.apply(model.init(0), 50 * asked(30).float(), training=True)[0].logits
    assert 0.1 < samples.abs().max() <= 1


@pytest.mark.parametrize(("name", "shape", "inputs"), QUICK)
def test_gradients_reach_the_noise_and_every_parameter(name, shape, inputs):
    model = built(name, shape, inputs)
    weights = double(model.init(0))
    x = asked(6).requires_grad_()
    leaves = {key: leaf.requires_grad_() for key, leaf in weights.params.items()}
    samples = model.apply(Weights(leaves, weights.buffers), x, training=True)[0].logits
    to_x, *to_leaves = torch.autograd.grad(samples.pow(3).sum(), [x, *leaves.values()])
    assert (to_x[:, :4].abs().sum(1) > 1e-9).all()
    # What stands before a BatchNorm cannot be shifted: such biases get a gradient of zero, as they should.
    weights_of = [gradient for key, gradient in zip(leaves, to_leaves, strict=True) if leaves[key].dim() > 1]
    assert all(gradient.abs().max() > 1e-9 for gradient in weights_of)


@pytest.mark.parametrize(("name", "shape", "inputs"), QUICK)
def test_samples_depend_on_class_and_noise(name, shape, inputs):
    model = built(name, shape, inputs)
    weights = double(model.init(1))
    z = asked(1)[:, :4]
    kinds = torch.eye(3, dtype=torch.float64)
    of_classes = model.apply(weights, torch.cat([z.expand(3, 4), kinds], dim=1))[0].logits
    of_noise = model.apply(weights, torch.cat([asked(3)[:, :4], kinds[:1].expand(3, 3)], dim=1))[0].logits
    for samples in (of_classes, of_noise):
        assert (samples[0] - samples[1]).abs().max() > 1e-6
        assert (samples[1] - samples[2]).abs().max() > 1e-6


@pytest.mark.parametrize(("name", "shape", "inputs"), QUICK)
def test_many_generators_at_once_equal_one_after_the_other_and_return_new_statistics(name, shape, inputs):
    model = built(name, shape, inputs)
    both = double(stack([model.init(seed) for seed in (1, 2)]))
    x = torch.stack([asked(5, seed=seed) for seed in (3, 4)])

    def run(weights: Weights, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        output, buffers = model.apply(weights, x, training=True)
        return output.logits, buffers

    together, statistics = vmap(run)(both, x)
    for i in range(2):
        before = rows(both, i)
        alone, buffers = run(before, x[i])
        torch.testing.assert_close(together[i], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(rows(statistics, i), buffers, rtol=1e-10, atol=1e-10)
        moved = [key for key in buffers if not torch.equal(buffers[key], before.buffers[key])]
        assert moved == list(before.buffers)
        assert all(buffers[key] == 1 for key in buffers if key.endswith("num_batches_tracked"))


@pytest.mark.parametrize(("name", "shape", "inputs"), QUICK)
def test_vmap_can_train_each_generator(name, shape, inputs):
    assert built(name, shape, inputs).traits.unbatchable is None
    with torch_stream(0):
        module = GENERATORS[name](Wanted(name, shape, 3, 4, inputs))
    assert why_unbatchable(module, asked(3).float()) is None


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), DIGITS, (3, 11, 6), (1, 29, 31)])
def test_the_small_generator_makes_images_of_any_size(shape):
    model = built("small", shape)
    weights = model.init(0)
    for training in (True, False):
        samples = model.apply(weights, asked(4).float(), training=training)[0].logits
        assert samples.shape == (4, np.prod(shape))
        assert samples.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "inputs", "name"),
    [
        (CIFAR, (), "conv"),
        ((1, 32, 32), (), "conv"),
        ((3, 84, 84), (), "conv"),
        ((3, 64, 64), (), "deconv"),
        ((3, 112, 112), (), "deconv"),
        (FASHION, (), "small"),
        (DIGITS, (), "small"),
        ((3, 33, 32), (), "small"),
        ((3, 97, 97), (), "small"),
        ((30,), (), "table"),
        ((512,), CIFAR, "dense"),
    ],
)
def test_auto_chooses_by_the_shape(shape, inputs, name):
    assert build_generator("auto", shape=shape, classes=2, noise=4, inputs=inputs).name == name


def test_the_same_wish_is_the_same_model():
    first = built("small", DIGITS)
    assert built("small", DIGITS) is built("auto", list(DIGITS)) is first
    assert built("small", (1, 8, 9)) is not first
    assert first.input_shape == (7,)


def test_the_page_of_models_lists_every_generator_with_its_parameters():
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8").partition("## Generators")[2]
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    listed = {row[2].strip("`"): row[4] for row in cells[1:]}
    assert listed.keys() == GENERATORS.keys()
    for name, shape, classes, noise in (
        *((name, CIFAR, 10, 100) for name in ("conv", "conv_paper")),
        *(("deconv", (3, 64, 64), 200, 256), ("small", FASHION, 10, 100), ("small", DIGITS, 10, 100)),
        *(("features", (512,), 10, 100), ("features_large", (512,), 200, 256)),
    ):
        assert f"{size(network(name, shape, classes, noise)):,}" in listed[name], name
    assert size(network("dense", (7,), 10, 100)) == size(network("table", (7,), 10, 100)) == 28_928 + 7 * 257
    assert listed["dense"].startswith("28,928 + 257 for each")
    assert listed["table"].startswith("28,928 + 257 for each")


@pytest.mark.slow
def test_table_7b_runs_as_a_model():
    model = build_generator("features", shape=(512,), classes=10, noise=100)
    weights = model.init(0)
    assert sum(leaf.numel() for leaf in weights.params.values()) == 71_803_392
    assert model.apply(weights, asked(4, classes=10, noise=100).float(), training=True)[0].logits.shape == (4, 512)


def test_impossible_wishes_are_told_in_one_line_with_what_to_use():
    def message(name, shape, **numbers):
        with pytest.raises(FedstillError) as caught:
            build_generator(name, **{"shape": shape, "classes": 3, "noise": 4, **numbers})
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "did you mean 'deconv'" in message("decon", CIFAR)
    assert "did you mean 'auto'" in message("aut", CIFAR)
    assert "use 'table' for data, 'dense' for features" in message("conv", (30,))
    assert "multiples of 4, and (3, 30, 32) is wanted: use 'small'" in message("conv", (3, 30, 32))
    assert "multiples of 16, and (3, 40, 40) is wanted: use 'small'" in message("deconv", (3, 40, 40))
    for name in ("features", "features_large"):
        assert "makes features (F,), and (3, 32, 32) is wanted" in message(name, CIFAR)
    assert "noise = (0,)" in message("small", DIGITS, noise=0)
    assert "classes = (2.5,)" in message("small", DIGITS, classes=2.5)
    assert "shape = ()" in message("auto", ())
