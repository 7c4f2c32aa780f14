"""BatchNorm and dropout inside cohorts: statistics of real rows only, masks from the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import assert_close, assert_same_bits, dataset, engine_for, federation, network, train
from quick import EITHER_ENGINE

from fedstill.core.tree import rows
from fedstill.core.types import Dataset, Federation, Objective, Training
from fedstill.engine.plan import make_plan

ENGINES = ("batched", "looped")
NO_STEP = Training(batch_size=4, lr=0.0)


@pytest.mark.parametrize("net", ["norm", "convnorm"])
@pytest.mark.parametrize("sizes", [(5, 9, 13), (1, 1, 1), (1, 4, 5)])
def test_a_last_batch_of_one_sample_breaks_nothing_and_both_engines_agree(net, sizes):
    training = Training(batch_size=4, epochs=2, lr=0.05, momentum=0.9)
    data = federation(sizes, images=net == "convnorm")
    batched, looped = (train(engine_for(name, net, data), training).uploads for name in ENGINES)
    for leaf in (*looped.weights.params.values(), *looped.weights.buffers.values(), looped.loss):
        assert bool(leaf.isfinite().all())
    assert_close(batched.weights, looped.weights)
    moved = looped.weights.params["head.bias"] - network(net).init(3).params["head.bias"]
    assert bool((moved.abs().amax(1) > 1e-4).all())


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_running_statistics_follow_the_batches_with_more_than_one_value(engine):
    """momentum 0.1: mean <- 0.9 mean + 0.1 (batch mean), var with n / (n - 1); a batch of one changes nothing."""
    data = federation((5,))
    uploads = train(engine_for(engine, "norm", data), NO_STEP).uploads
    model = network("norm")
    start = model.init(3)
    plan_rows = first_batch(data)
    hidden = data.train.x[plan_rows] @ start.params["body.0.weight"].T
    mean, variance = hidden.mean(0), hidden.var(0, unbiased=True)
    buffers = rows(uploads.weights.buffers, 0)
    torch.testing.assert_close(buffers["body.1.running_mean"], 0.1 * mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(buffers["body.1.running_var"], 0.9 + 0.1 * variance, rtol=1e-5, atol=1e-6)
    assert int(buffers["body.1.num_batches_tracked"]) == 1
    assert buffers["body.1.num_batches_tracked"].dtype == torch.int64


def first_batch(data: Federation) -> torch.Tensor:
    plan = make_plan(data.indices.numpy(), np.array([5]), np.zeros(1, np.int64), training=NO_STEP, round=1, seed=7)
    assert plan.weight.sum(2).tolist() == [[4.0], [1.0]]
    return torch.from_numpy(plan.index[0, 0])


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_client_does_not_see_the_statistics_of_another(engine):
    """One client's data are shifted by 100: nobody else's statistics or weights change."""
    plain = federation((6, 6, 6))
    x = plain.train.x.clone()
    x[plain.indices[6:12]] += 100.0
    shifted = Federation(
        Dataset("shifted", x, plain.train.y, plain.train.classes), plain.test, plain.indices, plain.offsets
    )
    training = Training(batch_size=4, lr=0.05)
    one, other = (train(engine_for(engine, "norm", data), training).uploads.weights for data in (plain, shifted))
    for client in (0, 2):
        assert_same_bits(rows(one, client), rows(other, client))
    assert float((other.buffers["body.1.running_mean"][1] - one.buffers["body.1.running_mean"][1]).abs().max()) > 1.0


def twins() -> Federation:
    """Two clients with the same samples."""
    train_set = dataset(8, images=False)
    double = Dataset("twins", train_set.x.repeat(2, 1), train_set.y.repeat(2), train_set.classes)
    return Federation(double, train_set, torch.arange(16), torch.tensor([0, 8, 16]))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_clients_with_the_same_data_drop_different_units(engine):
    """A batch of everything and no shuffling to tell them apart: without dropout the twins are equal."""
    training = Training(batch_size=8, lr=0.5)
    dropped = train(engine_for(engine, "drop", twins()), training).uploads.weights.params["head.weight"]
    assert float((dropped[0] - dropped[1]).abs().max()) > 1e-3
    plain = train(engine_for(engine, "mlp", twins()), training).uploads.weights.params["head.weight"]
    assert float((plain[0] - plain[1]).abs().max()) < 1e-6


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_masks_change_with_step_round_and_seed_and_are_the_same_again(engine):
    runner = engine_for(engine, "drop", federation((8,)))

    def moved(**how) -> torch.Tensor:
        return train(runner, Training(batch_size=8, lr=0.5), **how).uploads.weights.params["head.weight"]

    first = moved()
    assert torch.equal(moved(), first)
    assert not torch.allclose(moved(round=2), first, atol=1e-3)
    assert not torch.allclose(moved(seed=8), first, atol=1e-3)


def test_dropout_in_a_cohort_leaves_the_global_stream_alone():
    before = torch.random.get_rng_state()
    for engine in ENGINES:
        train(engine_for(engine, "drop"), Training(batch_size=4, lr=0.1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_of_the_units_are_dropped_in_training():
    """With a first layer that puts out ones, the features that are not zero are the units that were kept."""

    def loss(output, batch, local):
        return (output.features != 0).float().mean() + 0.0 * local.params["head.bias"].sum()

    start = network("drop").init(3)
    params = {name: torch.zeros_like(leaf) for name, leaf in start.params.items()}
    params["body.0.bias"] += 1.0
    training = Training(batch_size=40, epochs=20, lr=0.0)
    batched, looped = (
        float(train(engine_for(name, "drop", federation((40,))), training, objective=Objective(loss),
                    start=start._replace(params=params)).uploads.loss[0])
        for name in ENGINES
    )  # fmt: skip
    assert batched == pytest.approx(looped)
    assert batched == pytest.approx(0.5, abs=4 * (0.25 / (20 * 40 * 16)) ** 0.5)
