"""A training in parts: the optimiser goes on where the part before left it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_cases import MODULES, assert_close, assert_same_bits, dataset, engine_for, network, reads_images

from fedstill.core.seeds import seed_for
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.engine.plan import make_plan
from fedstill.local.terms import cross_entropy

COUNT = 21
ADAM = Training(epochs=2, batch_size=8, optimizer="adam", lr=5e-3, weight_decay=1e-2)
MOMENTUM = Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9)


def in_torch(net, data, training, seeds):
    """One optimiser of torch over the batches of all parts."""
    module, start = MODULES[net](), network(net).init(0)
    module.load_state_dict({**start.params, **start.buffers})
    if training.optimizer == "adam":
        optimizer = torch.optim.Adam(module.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=training.lr, momentum=training.momentum)
    losses = []
    for seed in seeds:
        plan = make_plan(
            np.arange(COUNT), np.array([COUNT]), np.zeros(1, np.int64), training=training, round=1,
            seed=seed_for(seed, "fit"),
        )  # fmt: skip
        for index, weight in zip(plan.index[:, 0], plan.weight[:, 0], strict=True):
            rows = torch.from_numpy(index[weight > 0])
            optimizer.zero_grad()
            loss = F.cross_entropy(module(data.x[rows]), data.y[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return dict(module.state_dict()), losses


def in_parts(engine, net, data, training, seeds, *, forget=False, objective=None):
    objective = objective or cross_entropy()
    weights, optimizer = network(net).init(0), {}
    for seed in seeds:
        fitted = engine.proceed(objective, weights, data.x, data.y, training, seed, optimizer=optimizer)
        weights, optimizer = fitted.weights, {} if forget else fitted.optimizer
    return fitted


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("training", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_parts_are_one_training_of_torch(net, training):
    engine, data = engine_for("looped", net), dataset(COUNT, images=reads_images(net))
    found = in_parts(engine, net, data, training, (1, 2, 3))
    wanted, losses = in_torch(net, data, training, (1, 2, 3))
    assert_close({**found.weights.params, **found.weights.buffers}, wanted)
    assert float(found.loss) == pytest.approx(np.mean(losses[-6:]), rel=1e-5)  # two epochs of three steps
    forgetful = in_parts(engine, net, data, training, (1, 2, 3), forget=True)
    gap = max(float((leaf - wanted[name]).abs().max()) for name, leaf in forgetful.weights.params.items())
    assert gap > 1e-3


def test_a_part_is_a_function_of_what_it_is_given():
    """A fresh engine, and optimiser state that came back from a file, end with the same bits."""
    data = dataset(COUNT, images=False)
    whole = in_parts(engine_for("looped", "mlp"), "mlp", data, ADAM, (1, 2))
    first = in_parts(engine_for("looped", "mlp"), "mlp", data, ADAM, (1,))
    stored = {name: leaf.numpy().copy() for name, leaf in flatten(first.optimizer).items()}
    engine = engine_for("looped", "mlp")
    engine.proceed(cross_entropy(), network("mlp").init(3), data.x, data.y, ADAM, 9, optimizer={})
    assert all(np.array_equal(stored[name], leaf.numpy()) for name, leaf in flatten(first.optimizer).items())
    second = engine.proceed(
        cross_entropy(), first.weights, data.x, data.y, ADAM, 2, optimizer=first.optimizer
    )  # fmt: skip
    assert_same_bits(second.weights, whole.weights)
    assert_same_bits(second.optimizer, whole.optimizer)


def test_the_first_part_is_a_fit():
    engine, data, objective = engine_for("looped", "mlp"), dataset(COUNT, images=False), cross_entropy()
    wanted = engine.fit(objective, network("mlp").init(0), data.x, data.y, ADAM, 1)
    assert_same_bits(in_parts(engine, "mlp", data, ADAM, (1,), objective=objective).weights, wanted)


def test_an_optimiser_without_memory_leaves_nothing():
    data = dataset(COUNT, images=False)
    assert in_parts(engine_for("looped", "mlp"), "mlp", data, Training(lr=0.1), (1,)).optimizer == {}


@pytest.mark.gpu
def test_captured_steps_go_on_with_the_optimiser_too():
    engine, data = engine_for("looped", "norm", device="cuda", precision="float32"), dataset(COUNT, images=False)
    weights, optimizer, objective = network("norm").init(0), {}, cross_entropy()
    weights = type(weights)(*({name: leaf.cuda() for name, leaf in part.items()} for part in weights))
    for seed in (1, 2, 3):
        fitted = engine.proceed(
            objective, weights, data.x.cuda(), data.y.cuda(), ADAM, seed, optimizer=optimizer
        )  # fmt: skip
        weights, optimizer = fitted.weights, fitted.optimizer
    wanted, _ = in_torch("norm", data, ADAM, (1, 2, 3))
    for name, leaf in weights.params.items():
        assert float((leaf.cpu() - wanted[name]).abs().max()) < 1e-4
