"""MOON and FedMMD over rounds, on softmax regression whose logits are its features."""

import pytest
import torch
from by_hand import blobs, federate_by_hand, linear, linear_model
from papers import released

from fedstill.core.types import Model, Output, Weights
from fedstill.methods import fedavg, fedmmd, moon

DATA = [blobs(k, 8 + 4 * k) for k in range(3)]
START = linear(3, 4, seed=1)
released_moon = released("fedlmd", "moon")
HOW = {"steps": 3, "lr": 0.2, "momentum": 0.5}


def seeing_model() -> Model:
    """Softmax regression; the features move with the weights."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        logits = x @ weights.params["weight"].T + weights.params["bias"]
        return Output(logits, logits), {}

    return Model("seeing", linear_model().init, apply)


def train(method, rounds, cohorts=None, **how):
    return federate_by_hand(method, seeing_model(), DATA, START, rounds=rounds, cohorts=cohorts, **{**HOW, **how})


def gap(ours: Weights, other: Weights) -> float:
    return max(float((ours.params[name] - other.params[name]).abs().max()) for name in other.params)


@pytest.mark.parametrize("previous", ["skip", "init", "start"])
def test_the_first_round_of_moon_is_fedavg(previous):
    """Whatever stands for the last model then is the received one, or nothing."""
    ours, plain = train(released_moon(mu=5.0, previous=previous), 2).weights, train(fedavg(), 2).weights
    assert gap(ours[0], plain[0]) < 1e-14
    assert gap(ours[1], plain[1]) > 1e-3


def test_skipping_the_first_visit_and_contrasting_with_the_received_model_give_the_same_weights():
    cohorts = [[0], [1, 2], [0, 1], [2]]
    skip, start, init = (
        train(released_moon(mu=5.0, previous=policy), 4, cohorts).weights for policy in ("skip", "start", "init")
    )
    assert all(gap(a, b) < 1e-12 for a, b in zip(skip, start, strict=True))
    assert gap(skip[1], init[1]) > 1e-4  # clients 1 and 2 come first in round 2, when the first model is the past


def test_only_clients_that_come_back_feel_the_contrast():
    cohorts = [[0], [1], [2]]
    ours, plain = (train(method, 3, cohorts).weights for method in (moon(mu=5.0), fedavg()))
    assert all(gap(a, b) == 0.0 for a, b in zip(ours, plain, strict=True))


def test_the_previous_model_is_the_clients_own_last_upload():
    cohorts = [[0, 1], [2, 1], [0]]
    history = train(moon(mu=0.0), 3, cohorts)
    at_start = [START, *history.weights]
    for client, last_seen in ((0, 2), (1, 1), (2, 1)):
        alone = federate_by_hand(
            fedavg(), seeing_model(), [DATA[client]], at_start[last_seen], rounds=1, **HOW
        ).weights[0]
        kept = history.clients[client]["previous"]
        assert gap(Weights(kept["params"], {}), alone) < 1e-14


def drift_of_features(method) -> float:
    """How far one client's features end from those of the model it got."""
    trained = train(method, 1, [[0]], steps=20).weights[0]
    before, after = (seeing_model().apply(weights, DATA[0].x)[0].features for weights in (START, trained))
    return float((after - before).square().sum(-1).mean())


def test_fedmmd_starts_like_fedavg_and_then_drifts_less():
    ours, plain = (train(method, 1, steps=1).weights[0] for method in (fedmmd(lam=3.0), fedavg()))
    assert gap(ours, plain) < 1e-14
    assert drift_of_features(fedmmd(lam=3.0)) < 0.5 * drift_of_features(fedavg())


def test_moon_ends_nearer_to_the_global_features_than_to_its_own_last_ones():
    """One client comes back after a round with all: cos(z, z_global) - cos(z, z_previous), compared with FedAvg's."""
    last = train(moon(), 1, steps=5).clients[0]["previous"]["params"]

    def lead(method):
        result = train(method, 2, [[0, 1, 2], [0]], steps=5)
        models = (result.weights[1], result.weights[0], Weights(last, {}))
        z, near, far = (seeing_model().apply(weights, DATA[0].x)[0].features for weights in models)
        return float((torch.cosine_similarity(z, near) - torch.cosine_similarity(z, far)).mean())

    assert lead(moon(mu=5.0)) > lead(fedavg()) + 0.05
