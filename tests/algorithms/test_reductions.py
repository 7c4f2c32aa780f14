"""A method whose knob is at zero is FedAvg to the last bit."""

import pytest
import torch
from by_hand import blobs, federate_by_hand, linear, linear_model

from fedstill.methods import build_algorithm

DATA = [blobs(k, 8 + 6 * k) for k in range(4)]
COHORTS = [[0, 1, 2], [3, 1], [2, 3, 0], [1, 0]]

KNOBS = [
    ("fedprox", {"mu": 0.0}),
    ("fedavgm", {"beta": 0.0, "server_lr": 1.0}),
    ("fedopt", {"optimizer": "sgd", "momentum": 0.0, "server_lr": 1.0}),
    ("fednova", {}),  # every client takes the same number of steps here
    ("fedntd", {"beta": 0.0}),
    ("fedcurv", {"lam": 0.0}),
    ("fedcurv", {"lam": 0.0, "fisher": "per_sample"}),
    ("moon", {"mu": 0.0}),
    ("moon", {"mu": 0.0, "previous": "init"}),
    ("fedmmd", {"lam": 0.0}),
    ("feddf", {"steps": 0, "weighting": "size"}),
]


def train(name, options, rounds=4):
    how = {"steps": 3, "lr": 0.2, "momentum": 0.5, "cohorts": COHORTS, "unlabeled": blobs(9, 12).x}
    start = linear(3, 4, seed=1)
    return federate_by_hand(build_algorithm(name, options), linear_model(), DATA, start, rounds=rounds, **how).weights


def same_bits(ours, other):
    return all(torch.equal(ours.params[name], other.params[name]) for name in other.params)


@pytest.mark.parametrize(("name", "options"), KNOBS, ids=lambda v: v if isinstance(v, str) else "")
def test_with_its_knob_at_zero_a_method_is_fedavg_bit_for_bit(name, options):
    for ours, plain in zip(train(name, options), train("fedavg", {}), strict=True):
        assert same_bits(ours, plain)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_without_controls_yet_is_uniform_fedavg_bit_for_bit(option):
    ours, plain = train("scaffold", {"option": option}), train("fedavg", {"weighting": "uniform"})
    assert same_bits(ours[0], plain[0])
    assert not same_bits(ours[1], plain[1])


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedprox", {"mu": 0.1}), ("fedavgm", {}), ("fedntd", {}), ("feddyn", {}), ("feddf", {"pool": "probabilities"})],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_with_its_knob_on_a_method_is_not_fedavg(name, options):
    assert not same_bits(train(name, options)[1], train("fedavg", {})[1])
