"""What the papers claim of distillation on clients, of restricted softmax and of label smoothing."""

import math

import pytest
import torch
from by_hand import F64, federate_by_hand, linear, linear_model
from own_counts import counting, counts_of
from weighed import weighed

from fedstill.core.types import Batch
from fedstill.local import majority, target_mask
from fedstill.methods import METHODS, fedavg, fedlmd, fedlmd_tf, fedntd, fedntd_tf, fedrs, kd, label_smoothing

CLASSES, FEATURES = 4, 4
START = linear(CLASSES, FEATURES, seed=6)


def samples_of(*counts: int, seed: int = 0) -> Batch:
    """So many samples of each class, around centres that overlap a little."""
    y = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
    noise = torch.randn(len(y), FEATURES, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return Batch(2.0 * torch.eye(CLASSES, FEATURES, dtype=F64)[y] + noise, y, torch.ones(len(y), dtype=F64))


def trained(method, data, *, start=START, rounds=1, steps=5, lr=0.2):
    history = federate_by_hand(counting(method), linear_model(), data, start, rounds=rounds, steps=steps, lr=lr)
    return history.weights[-1]


def same_bits(ours, other):
    return all(torch.equal(ours.params[name], leaf) for name, leaf in other.params.items())


def furthest(ours, other):
    return max((ours.params[name] - leaf).abs().max().item() for name, leaf in other.params.items())


SKEWED = [samples_of(9, 5, 1, 0, seed=1), samples_of(0, 1, 7, 8, seed=2)]


@pytest.mark.parametrize("method", [kd, fedntd])
def test_the_first_step_from_the_teacher_itself_is_fedavgs(method):
    assert furthest(trained(method(), SKEWED, steps=1), trained(fedavg(), SKEWED, steps=1)) < 1e-15
    assert furthest(trained(method(), SKEWED, steps=2), trained(fedavg(), SKEWED, steps=2)) > 1e-4


@pytest.mark.parametrize("method", [fedlmd, fedlmd_tf, fedntd_tf])
def test_the_first_step_of_label_masking_or_without_a_teacher_is_not_fedavgs(method):
    assert furthest(trained(method(), SKEWED, steps=1), trained(fedavg(), SKEWED, steps=1)) > 1e-3


EVEN = [samples_of(3, 3, 3, 3, seed=3), samples_of(5, 5, 5, 5, seed=4)]
ONE_CLASS = [samples_of(6, 0, 0, 0, seed=5), samples_of(0, 0, 4, 0, seed=6)]


@pytest.mark.parametrize("data", [EVEN, ONE_CLASS], ids=["no majority class", "only the own class"])
@pytest.mark.parametrize(("masked", "plain"), [(fedlmd, fedntd), (fedlmd_tf, fedntd_tf)])
def test_clients_without_another_majority_class_run_fedntd_to_the_last_bit(data, masked, plain):
    ours, other = (trained(method(beta=0.7, tau=2.0), data, rounds=3) for method in (masked, plain))
    assert same_bits(ours, other)
    assert furthest(trained(masked(), SKEWED, rounds=3), trained(plain(), SKEWED, rounds=3)) > 1e-3


KNOWING = trained(fedavg(), [samples_of(40, 40, 40, 40, seed=7)], start=linear(CLASSES, FEATURES), steps=200)
HALF = samples_of(30, 30, 0, 0, seed=8)
MISSING = samples_of(0, 0, 40, 40, seed=9)


def accuracy_on(data, weights):
    return (linear_model().apply(weights, data.x)[0].logits.argmax(-1) == data.y).double().mean().item()


def after_a_long_visit(method):
    """A model that knows all classes, trained on a client that lacks two of them."""
    return trained(method, [HALF], start=KNOWING, steps=150, lr=0.5)


@pytest.mark.parametrize("method", [kd, fedntd, fedrs])
def test_a_client_forgets_less_of_the_classes_that_it_lacks(method):
    assert accuracy_on(MISSING, KNOWING) > 0.75
    forgotten = accuracy_on(MISSING, after_a_long_visit(fedavg()))
    assert forgotten < 0.35
    kept = after_a_long_visit(method())
    assert accuracy_on(MISSING, kept) > forgotten + 0.1
    assert accuracy_on(HALF, kept) > 0.85


def test_label_masking_gives_minority_classes_more_of_what_a_sample_is_not():
    """The negative supervision of majority classes: what FedLMD adds to FedNTD, and FedLMD-Tf to FedNTD-Tf."""

    def minority_share(method):
        logits = linear_model().apply(after_a_long_visit(method), HALF.x)[0].logits
        others = torch.softmax(logits, -1).masked_fill(target_mask(HALF.y, CLASSES), 0.0)
        return (others[:, 2:].sum(-1) / others.sum(-1)).mean().item()

    assert minority_share(fedlmd()) > minority_share(fedntd()) + 0.1
    assert minority_share(fedlmd_tf()) > minority_share(fedntd_tf()) + 0.1
    assert min(minority_share(fedntd()), minority_share(fedntd_tf())) > minority_share(fedavg()) + 0.1


def test_on_that_client_the_two_classes_that_it_has_are_its_majority():
    assert majority(counts_of(HALF, CLASSES)).tolist() == [True, True, False, False]


def test_at_alpha_zero_the_rows_of_missing_classes_stay_where_they_are():
    for leaf, start in zip(after_a_long_visit(fedrs(alpha=0.0)).params.values(), KNOWING.params.values(), strict=True):
        assert torch.equal(leaf[2:], start[2:])
        assert (leaf[:2] - start[:2]).abs().max() > 0.1


def test_the_smaller_alpha_the_less_a_missing_class_moves():
    moved = [
        (after_a_long_visit(fedrs(alpha=alpha)).params["weight"] - KNOWING.params["weight"])[2:].norm().item()
        for alpha in (1.0, 0.5, 0.1)
    ]
    assert moved == sorted(moved, reverse=True)


def test_smoothed_labels_bound_the_margin_that_hard_labels_let_grow():
    """One point per class: the optimum has log-probability ratios of (1 - eps + eps / C) / (eps / C)."""
    corners = Batch(torch.eye(CLASSES, FEATURES, dtype=F64), torch.arange(CLASSES), torch.ones(CLASSES, dtype=F64))

    def margin(method):
        logits = linear_model().apply(trained(method, [corners], steps=400, lr=8.0), corners.x)[0].logits
        own = logits.diagonal().unsqueeze(-1)
        return (own - logits + 1e9 * torch.eye(CLASSES, dtype=F64)).min().item()

    epsilon = 0.2
    assert margin(label_smoothing(epsilon=epsilon)) == pytest.approx(math.log((1 - 0.15) / 0.05), abs=1e-6)
    assert margin(fedavg()) > 5.0


def test_uniform_weighting_reaches_the_server():
    data = [SKEWED[0], samples_of(1, 0, 0, 0, seed=1)]
    for name in ("kd", "fedntd_tf", "fedlmd", "fedlmd_tf", "label_smoothing", "fedrs"):
        by_size, evenly = (trained(weighed(METHODS[name](), w), data) for w in ("size", "uniform"))
        alone = [trained(METHODS[name](), [batch]) for batch in data]
        for weights, shares in ((by_size, (15 / 16, 1 / 16)), (evenly, (0.5, 0.5))):
            expected = sum(p * one.params["weight"] for p, one in zip(shares, alone, strict=True))
            torch.testing.assert_close(weights.params["weight"], expected)
