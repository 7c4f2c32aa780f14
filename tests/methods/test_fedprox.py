"""FedProx by hand: the pull holds the model, and a client solves its closed form."""

import pytest
import torch
from by_hand import blobs, federate_by_hand, linear, linear_model, quadratic_data, scalar, scalar_model, with_quadratic

from fedstill.local import proximal
from fedstill.methods import fedprox


def test_an_infinite_pull_keeps_the_global_model_where_it_is():
    mu, data, start = 1e8, [blobs(k, 8 + 6 * k) for k in range(3)], linear(3, 4, seed=2)
    history = federate_by_hand(fedprox(mu=mu), linear_model(), data, start, rounds=2, steps=3, lr=1 / mu)
    torch.testing.assert_close(history.weights[-1].params, start.params, rtol=0, atol=1e-6)


def test_a_proximal_client_solves_its_own_closed_form():
    method = with_quadratic(fedprox(), proximal(0.5))
    history = federate_by_hand(
        method, scalar_model(), [quadratic_data(3.0, 4.0)], scalar(1.0), rounds=1, steps=80, lr=0.25
    )
    assert history.weights[0].params["w"].item() == pytest.approx((3.0 * 4.0 + 0.5 * 1.0) / 3.5)
