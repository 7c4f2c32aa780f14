"""SimCLR's loss and network: against a slow formula, numbers by hand, and torch's own layers."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_stream
from fedstill.core.setup import Preparation
from fedstill.core.types import Batch, Output, Training, Weights
from fedstill.methods.pretraining.contrastive import (
    PROJECTION,
    check_images,
    neighbour_accuracy,
    neighbour_probe,
    no_labels,
    nt_xent,
    projected,
    simclr_pretext,
)
from fedstill.models import build_model, from_module


def unit_rows(count, width, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def numpy_nt_xent(first, second, temperature):
    """Equation 1 of the paper, view by view."""
    z = np.concatenate([first, second])
    count, total = len(first), 0.0
    for i in range(2 * count):
        other = (i + count) % (2 * count)
        top = math.exp(z[i] @ z[other] / temperature)
        bottom = sum(math.exp(z[i] @ z[k] / temperature) for k in range(2 * count) if k != i)
        total -= math.log(top / bottom)
    return total / (2 * count)


def loss_of(first, second, temperature, weight=None):
    z = torch.from_numpy(np.concatenate([first, second], axis=1))
    weight = torch.ones(len(z), dtype=torch.float64) if weight is None else weight
    return nt_xent(temperature).loss(Output(z, z), Batch(z, z, weight), None)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_loss_is_the_papers_equation(count, temperature):
    first, second = unit_rows(count, 4), unit_rows(count, 4, seed=1)
    assert float(loss_of(first, second, temperature)) == pytest.approx(numpy_nt_xent(first, second, temperature))


def test_numbers_by_hand():
    """Two samples on two axes at t = 1/2: views agree: ln((e^2 + 2) / e^2); each view like the other sample's: + 2."""
    axes = np.eye(2)
    assert float(loss_of(axes, axes, 0.5)) == pytest.approx(math.log((math.e**2 + 2) / math.e**2))
    assert float(loss_of(axes, axes[::-1].copy(), 0.5)) == pytest.approx(math.log(math.e**2 + 2))
    assert float(loss_of(axes[:1], axes[:1], 0.5)) == pytest.approx(0.0)  # nobody to be told from
    same = np.tile(axes[:1], (8, 1))
    assert float(loss_of(same, same, 0.5)) == pytest.approx(math.log(15))  # 16 views alike


def test_padding_is_neither_asked_nor_compared_with_and_may_be_nan():
    first, second = unit_rows(5, 4), unit_rows(5, 4, seed=1)
    wanted = float(loss_of(first[:3], second[:3], 0.5))
    first[3:], second[3:] = np.nan, np.nan
    z = torch.from_numpy(np.concatenate([first, second], axis=1)).requires_grad_()
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    loss = nt_xent(0.5).loss(Output(z, z), Batch(z, z, weight), None)
    assert float(loss.detach()) == pytest.approx(wanted)
    (gradient,) = torch.autograd.grad(loss, z)
    assert bool(gradient.isfinite().all())
    assert not bool(gradient[3:].any())
    assert bool(gradient[:3].any())


class Net(nn.Module):
    """Features of two channels' worth of pixels, with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(2 * 9, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def net():
    return from_module(Net, input_shape=(2, 3, 3), classes=3, check=False)


def in_torch(weights, x, hidden=6, projection=4):
    """The reference code: the net on one view after the other, then g, then unit length."""
    module = Net()
    own = {**weights.params, **weights.buffers}
    module.load_state_dict({name: leaf for name, leaf in own.items() if name not in PROJECTION})
    g = nn.Sequential(
        nn.Linear(5, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, projection)
    )
    names = ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias")
    g.load_state_dict({n: own[p] for n, p in zip(names, PROJECTION, strict=True)}, strict=False)
    outs = [nn.functional.normalize(g(module(view)[0]), dim=-1) for view in (x[:, :2], x[:, 2:])]
    return torch.cat(outs, 1), dict(module.named_buffers())


def views(count=6, seed=0):
    return torch.randn(count, 4, 3, 3, generator=torch.Generator().manual_seed(seed))


def test_two_views_pass_one_after_the_other_and_are_projected_to_length_one():
    model = projected(net(), hidden=6, projection=4)
    weights = model.init(3)
    found, buffers = model.apply(weights, views(), training=True)
    with torch.no_grad():
        wanted, statistics = in_torch(weights, views())
    assert float((found.logits - wanted).abs().max()) < 1e-6
    assert found.logits.shape == (6, 8)
    assert torch.allclose(found.logits.reshape(6, 2, 4).norm(dim=2), torch.ones(6, 2))
    assert buffers.keys() == statistics.keys()
    assert all(torch.allclose(buffers[name], leaf) for name, leaf in statistics.items())
    assert int(buffers["body.2.num_batches_tracked"]) == 2


def test_padding_changes_no_output_of_a_real_row():
    model = projected(net(), hidden=6, projection=4)
    weights, x = model.init(3), views()
    wanted, kept = model.apply(weights, x[:4], training=True)
    x[4:] = float("nan")
    found, buffers = model.apply(weights, x, training=True, weight=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    assert float((found.logits[:4] - wanted.logits).abs().max()) < 1e-5
    assert all(torch.allclose(buffers[name], leaf, atol=1e-6) for name, leaf in kept.items())


def test_parameters_of_the_model_keep_their_names_and_values_of_the_projection_are_torchs_own():
    model = projected(net(), hidden=512, projection=128)
    weights = model.init(0)
    assert weights.params.keys() == {*net().init(0).params, *PROJECTION}
    shapes = [tuple(weights.params[name].shape) for name in PROJECTION]
    assert shapes == [(512, 5), (512,), (512,), (128, 512), (128,)]
    with torch_stream(1):
        like = nn.Linear(5, 512).weight.detach()
    drawn = weights.params[PROJECTION[0]]
    assert float(drawn.abs().max()) == pytest.approx(5**-0.5, rel=0.01)
    assert float(drawn.std()) == pytest.approx(float(like.std()), rel=0.05)
    assert not torch.equal(model.init(1).params[PROJECTION[0]], drawn)


def test_dropout_draws_another_mask_for_the_second_view():
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(18, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    model = projected(from_module(build, input_shape=(2, 3, 3), classes=3, check=False))
    x = views(1)
    x[:, 2:] = x[:, :2]
    features = model.apply(model.init(0), x, training=True, seed=torch.tensor(5))[0].features
    first, second = (features == 0.0).chunk(2, dim=1)
    assert bool((first != second).any())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 6), r"needs images .* shape \(6,\): leave simclr out"),
        (torch.zeros(4, 6, dtype=torch.int32), r"needs images .* shape \(6,\): on text use masked_lm or next_token"),
        (torch.zeros(1, 3, 2, 2), "at least 2 unlabeled images, and there is 1"),
        (torch.full((4, 3, 2, 2), 1.5), "0 to 1"),
        (torch.full((4, 3, 2, 2), -0.5), "0 to 1"),
    ],
)
def test_what_has_no_views_is_refused_in_words(x, message):
    with pytest.raises(FedstillError, match=message):
        check_images(x)
    check_images(torch.zeros(2, 3, 2, 2))


def test_a_model_without_a_head_of_its_own_is_refused():
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(18, 3), nn.Tanh())

    with pytest.raises(FedstillError, match="its features and its head cannot be separated"):
        projected(from_module(build, input_shape=(2, 3, 3), classes=3, check=False))


@pytest.mark.parametrize("name", ["cnn", "resnet8_wide", "mobilenet_v2", "mlp"])
def test_the_projection_reads_the_features_of_every_network(name):
    model = build_model(name, input_shape=(3, 16, 16), classes=10)
    both = projected(model)
    output = both.apply(both.init(0), torch.rand(2, 6, 16, 16, generator=torch.Generator().manual_seed(0)))[0]
    assert output.logits.shape == (2, 256)


def test_a_pretext_asks_for_views_and_is_known_by_its_options():
    pretext = simclr_pretext(Training(epochs=3), temperature=0.1, projection=16, hidden=32)
    assert pretext.training.augment == ("views",)
    assert pretext.identity == {"temperature": 0.1, "projection": 16, "hidden": 32}
    assert no_labels(torch.zeros(4, 3, 2, 2)).tolist() == [0, 0, 0, 0]


# The nearest-neighbour look at an extractor.


def slow_accuracy(bank, labels, queries, truth, k, temperature):
    right = 0
    for query, answer in zip(queries, truth, strict=True):
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in bank]
        votes = {}
        for place in sorted(range(len(bank)), key=lambda j: -cosines[j])[:k]:
            votes[labels[place]] = votes.get(labels[place], 0.0) + math.exp(cosines[place] / temperature)
        right += max(sorted(votes), key=lambda c: votes[c]) == answer
    return right / len(queries)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.5), (7, 0.5), (7, 0.05), (500, 0.1)])
def test_it_is_the_weighted_vote_of_the_nearest(k, temperature):
    generator = np.random.default_rng(0)
    labels, truth = generator.integers(0, 3, 60), generator.integers(0, 3, 700)  # more than one piece of queries
    bank = generator.normal(size=(60, 4)) + np.eye(3, 4)[labels]
    queries = generator.normal(size=(700, 4)) + np.eye(3, 4)[truth]
    found = neighbour_accuracy(
        *(torch.from_numpy(part) for part in (bank, labels, queries, truth)), k=k, temperature=temperature
    )
    assert found == pytest.approx(slow_accuracy(bank, labels, queries, truth, min(k, 60), temperature))
    assert 0.3 < found < 0.95


def test_near_neighbours_count_more_than_many_far_ones():
    """At 0, 60 and 60 degrees: e^(1/t) against 2 e^(0.5/t), equal at t = 0.5 / ln 2 = 0.72."""
    bank = torch.tensor([[1.0, 0.0], [0.5, 3**0.5 / 2], [0.5, -(3**0.5) / 2]])
    labels, query = torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.0]])
    for temperature, answer in ((0.7, 0), (0.75, 1)):
        assert neighbour_accuracy(bank, labels, query, torch.tensor([answer]), temperature=temperature) == 1.0


@dataclass
class Features:
    """A trainer whose extractor hands on what it is shown."""

    def outputs(self, weights, x, **_):
        return Output(x, x)


def looked_at(labeled):
    preparation = Preparation(1, None, 1, None, 0, Features(), None, labeled=labeled)
    return neighbour_probe(k=5)(Weights({}, {}), preparation)


def test_a_probe_tells_good_features_from_useless_ones_and_leaves_out_what_has_no_label():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (400,), generator=generator)
    noise = torch.randn(400, 4, generator=generator)
    good = torch.nn.functional.one_hot(y, 4) + 0.1 * noise
    assert looked_at((good, y)) == {"knn_accuracy": 1.0}
    assert looked_at((noise, y))["knn_accuracy"] < 0.5
    half = torch.where(torch.arange(400) % 2 == 0, y, -1)
    assert looked_at((good, half)) == {"knn_accuracy": 1.0}


@pytest.mark.parametrize("labeled", [None, (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))])
def test_without_labels_or_with_hardly_any_it_says_nothing(labeled):
    assert looked_at(labeled) == {}
