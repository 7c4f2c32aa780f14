"""FedGen's term: a generator that says ln 3 for class 0 makes every number one of the hand."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import F64, local_view, number

from fedstill.compose.combine import bound, combine
from fedstill.core.errors import FedstillError
from fedstill.core.tree import stack
from fedstill.core.types import Batch, Model, Need, Output, Weights
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.feature_generator import generated_features, labels_among, row_noise

SAID = {0: math.log(3.0), 1: -1.0}  # the one feature of each class


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def generator(noise=1, by_noise=0.0):
    """feature = by_noise * (sum of the noise) + what SAID has for the class."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        assert not training, "a client runs the generator in eval mode"
        return Output(x @ weights.params["g"], x), weights.buffers

    start = Weights({"g": number([[by_noise]] * noise + [[SAID[0]], [SAID[1]]])}, {})
    return Model("said", init=lambda _: start, apply=apply, classes=2)


def head(params, features):
    """Logits (h feature, 0)."""
    return torch.cat([params["h"] * features, torch.zeros_like(features)], dim=-1)


def model():
    def apply(weights, x, *, training=False, weight=None, seed=None):
        features = weights.params["f"] * x
        return Output(head(weights.params, features), features), {}

    return Model("line", lambda _: Weights({"f": number(1.0), "h": number(1.0)}, {}), apply, head, ("h",), classes=2)


def received(label_weight=0.0, match_weight=0.0, labels=(1.0, 0.0), inventor=None):
    weights = (inventor or generator()).init(0)
    return {
        "generator": weights._asdict(), "labels": number(list(labels)),
        "label_weight": number(label_weight), "match_weight": number(match_weight),
    }  # fmt: skip


def term(inventor=None, noise=1, **options):
    return bound(generated_features(lambda _: inventor or generator(), noise=noise, **options), model())


def value_and_slopes(objective, batch, slots, *, f=1.0, h=1.0, at=0):
    params = {"f": number(f).requires_grad_(), "h": number(h).requires_grad_()}
    view = local_view(Weights(params, {}), params=params, received=slots, seed=seed(at))
    output, _ = model().apply(Weights(params, {}), batch.x, training=True)
    loss = objective.loss(output, batch, view)
    slopes = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    return loss.item(), [slope.item() for slope in slopes]


def batch_of(x, y, weight=None):
    return Batch(number(x).unsqueeze(-1), torch.tensor(y), number(weight or [1.0] * len(y)))


def test_the_label_part_is_the_heads_cross_entropy_on_what_the_generator_says():
    """h(G) = (ln 3, 0) is (3/4, 1/4): r a (-ln 3/4), and its slope in h is -r a (1 - 3/4) ln 3."""
    objective = term(ratio=2.0, count=7, match_term=False)
    loss, (slope_f, slope_h) = value_and_slopes(objective, batch_of([5.0], [1]), received(label_weight=5.0))
    assert loss == pytest.approx(-10 * math.log(0.75))
    assert slope_h == pytest.approx(-10 * 0.25 * math.log(3.0))
    assert slope_f == 0.0, "generated features pass no extractor"


def test_the_matching_part_is_the_divergence_from_the_heads_answer_for_the_same_class():
    """Class 0 wants (3/4, 1/4), the model says (1/2, 1/2) of x = 0: ln 2 - H(3/4)."""
    objective = term(label_term=False)
    loss, _ = value_and_slopes(objective, batch_of([0.0], [0]), received(match_weight=10.0))
    assert loss == pytest.approx(10 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)))


def test_the_target_of_the_matching_part_gets_no_gradient():
    """d KL / dz_0 = p_0 - 3/4 at z_0 = f h x alone; f h x = ln 3 is the target, where nothing pulls."""
    objective, slots = term(label_term=False), received(match_weight=1.0)
    _, slopes = value_and_slopes(objective, batch_of([2.0], [0]), slots, f=0.5)
    pull = 1 / (1 + math.exp(-1.0)) - 0.75
    assert slopes == pytest.approx([pull * 2.0, pull * 1.0])
    assert value_and_slopes(objective, batch_of([math.log(3.0)], [0]), slots)[1] == pytest.approx([0.0, 0.0])


def test_both_parts_add_up():
    data, slots = batch_of([0.3, -1.0], [0, 1]), received(3.0, 2.0)
    both, *single = (
        value_and_slopes(term(**options), data, slots) for options in ({}, {"match_term": False}, {"label_term": False})
    )
    assert both[0] == pytest.approx(sum(one[0] for one in single))
    assert both[1] == pytest.approx([sum(pair) for pair in zip(*(one[1] for one in single), strict=True)])


def test_a_weight_of_zero_adds_exactly_nothing_whatever_the_generator_says():
    wild = generator()
    wild_slots = received(inventor=wild)
    wild_slots["generator"] = {"params": {"g": number([[math.inf]] * 3)}, "buffers": {}}
    assert value_and_slopes(term(wild), batch_of([0.3, -1.0], [0, 1]), wild_slots) == (0.0, [0.0, 0.0])


def test_samples_of_weight_zero_and_how_many_there_are_change_nothing():
    """The noise of a row does not depend on the rows behind it."""
    inventor = generator(noise=3, by_noise=0.7)
    for kind in ("uniform", "normal"):
        objective = term(inventor, 3, noise_kind=kind)
        slots = received(1.0, 1.0, inventor=inventor)
        alone = value_and_slopes(objective, batch_of([0.5, 1.0], [0, 1]), slots, at=5)
        padded = value_and_slopes(
            objective, batch_of([0.5, 1.0, 9.0, 9.0], [0, 1, 0, 1], [1.0, 1.0, 0.0, 0.0]), slots, at=5
        )
        assert padded[0] == pytest.approx(alone[0])
        assert padded[1] == pytest.approx(alone[1])


@pytest.mark.parametrize("gone", ["label_term", "match_term"])
def test_noise_is_new_in_every_step(gone):
    inventor = generator(noise=3, by_noise=0.7)
    objective, slots = term(inventor, 3, **{gone: False}), received(1.0, 1.0, inventor=inventor)
    losses = {value_and_slopes(objective, batch_of([0.5, 1.0], [0, 1]), slots, at=step)[0] for step in range(5)}
    assert len(losses) == 5


def test_a_cohort_under_vmap_is_a_loop_over_its_clients():
    inventor = generator(noise=2, by_noise=0.5)
    objective, slots = term(inventor, 2), received(1.0, 1.0, (1.0, 1.0), inventor)
    data = [batch_of([0.5 * k, 1.0], [0, k % 2]) for k in range(3)]
    seeds, params = torch.arange(3), [{"f": number(1.0 + k), "h": number(0.5 - k)} for k in range(3)]

    def loss(batch, params, at):
        view = local_view(Weights(params, {}), params=params, received=slots, seed=at)
        return objective.loss(model().apply(Weights(params, {}), batch.x)[0], batch, view)

    wide = {name: leaf.requires_grad_() for name, leaf in stack(params).items()}
    together = torch.func.vmap(loss)(stack(data), wide, seeds)
    slopes = torch.autograd.grad(together.sum(), list(wide.values()))
    for k in range(3):
        value, alone = value_and_slopes(objective, data[k], slots, f=1.0 + k, h=0.5 - k, at=k)
        assert together[k].item() == pytest.approx(value)
        assert [slope[k].item() for slope in slopes] == pytest.approx(alone)


def test_labels_are_drawn_alike_among_the_known_ones():
    drawn = torch.bincount(labels_among(seed(1), 6000, number([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])), minlength=6)
    assert drawn[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (drawn[[1, 3, 4]] - 2000).abs().max() < 4 * math.sqrt(6000 * (1 / 3) * (2 / 3))
    assert torch.unique(labels_among(seed(1), 50, number([0.0, 0.0, 1.0]))).tolist() == [2]


@pytest.mark.parametrize(("kind", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("normal", 0.0, 1.0)])
def test_noise_is_of_its_kind_and_differs_from_seed_to_seed(kind, mean, variance):
    drawn = row_noise(seed(3), 400, 50, kind).to(F64)
    assert float(drawn.mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / drawn.numel()))
    assert float(drawn.var()) == pytest.approx(variance, rel=0.05)
    assert torch.equal(row_noise(seed(3), 7, 50, kind).to(F64), drawn[:7])
    assert not torch.equal(row_noise(seed(4), 7, 50, kind).to(F64), drawn[:7])


def test_the_term_waits_for_its_model_also_in_a_sum():
    loose = combine(cross_entropy(), generated_features(lambda _: generator(), noise=1))
    assert loose.needs == {Need.HEAD, Need.FEATURES}
    data, slots = batch_of([0.0], [0]), received(label_weight=1.0)
    with pytest.raises(FedstillError, match="bind it"):
        value_and_slopes(loose, data, slots)
    loss, _ = value_and_slopes(bound(loose, model()), data, slots)
    assert loss == pytest.approx(math.log(2.0) - math.log(0.75))
