"""FedAvg by hand: one full step is gradient descent, on one client or on the pooled data."""

import torch
from by_hand import blobs, federate_by_hand, linear, linear_model
from torch.nn.functional import cross_entropy

from fedstill.methods import fedavg

DATA = [blobs(k, 8 + 6 * k) for k in range(3)]
START = linear(3, 4, seed=2)


def after(method, *, data=DATA, rounds=2, steps=3, lr=0.2, **how):
    return federate_by_hand(method, linear_model(), data, START, rounds=rounds, steps=steps, lr=lr, **how)


def test_one_client_one_full_step_is_centralised_gradient_descent():
    params = {name: leaf.clone().requires_grad_() for name, leaf in START.params.items()}
    loss = cross_entropy(DATA[0].x @ params["weight"].T + params["bias"], DATA[0].y)
    gradients = torch.autograd.grad(loss, list(params.values()))
    ours = after(fedavg(), data=DATA[:1], rounds=1, steps=1).weights[0].params
    for (name, leaf), gradient in zip(params.items(), gradients, strict=True):
        torch.testing.assert_close(ours[name], leaf.detach() - 0.2 * gradient, rtol=1e-14, atol=1e-15)


def test_one_step_by_size_is_a_step_on_the_pooled_data():
    pooled = type(DATA[0])(*(torch.cat(parts) for parts in zip(*DATA, strict=True)))
    ours, central = after(fedavg(), steps=1), after(fedavg(), data=[pooled], steps=1)
    torch.testing.assert_close(ours.weights[-1].params, central.weights[-1].params)


def test_rate_zero_changes_nothing():
    result = after(fedavg(), lr=0.0).weights[-1].params
    torch.testing.assert_close(result, START.params, rtol=1e-15, atol=0)
