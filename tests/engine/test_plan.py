from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.core.types import Training
from fedstill.engine.plan import Plan, _positions, check_training, effective_steps, make_plan, sweep_plan

SIZES = st.lists(st.integers(0, 19), min_size=1, max_size=6)


def rows_of(sizes) -> np.ndarray:
    """Rows that name their client: client k holds 100 k, 100 k + 1, ..."""
    return np.concatenate([100 * k + np.arange(size) for k, size in enumerate(sizes)] or [[]]).astype(np.int64)


def plan_for(sizes, training: Training, *, ids=None, round: int = 1, seed: int = 0) -> Plan:
    ids = np.arange(len(sizes)) if ids is None else np.asarray(ids)
    return make_plan(rows_of(sizes), np.asarray(sizes), ids, training=training, round=round, seed=seed)


def seen(plan: Plan, client: int, steps: slice = slice(None)) -> list[int]:
    real = plan.weight[steps, client] > 0
    return plan.index[steps, client][real].tolist()


@given(SIZES, st.integers(1, 8), st.integers(0, 3))
def test_every_epoch_visits_every_sample_of_a_client_exactly_once(sizes, batch, epochs):
    plan = plan_for(sizes, Training(batch_size=batch, epochs=epochs))
    for client, size in enumerate(sizes):
        own = [100 * client + i for i in range(size)]
        per_epoch = math.ceil(size / batch)
        assert plan.steps[client] == epochs * per_epoch
        for epoch in range(epochs):
            visited = seen(plan, client, slice(epoch * per_epoch, (epoch + 1) * per_epoch))
            assert sorted(visited) == own


@given(SIZES, st.integers(1, 8), st.integers(1, 3))
def test_weights_count_samples_and_all_but_the_last_batch_of_an_epoch_are_full(sizes, batch, epochs):
    plan = plan_for(sizes, Training(batch_size=batch, epochs=epochs))
    assert set(np.unique(plan.weight)) <= {0.0, 1.0}
    np.testing.assert_array_equal(plan.weight.sum((0, 2)), epochs * np.asarray(sizes))
    for client, size in enumerate(sizes):
        filled = plan.weight[: plan.steps[client], client].sum(1)
        wanted = [min(batch, size - first) for first in range(0, size, batch)] * epochs
        assert filled.tolist() == wanted
        assert not plan.weight[plan.steps[client] :, client].any()


@given(SIZES, st.integers(1, 8))
def test_real_samples_come_first_in_a_batch_and_padding_repeats_a_row_of_the_same_client(sizes, batch):
    plan = plan_for(sizes, Training(batch_size=batch, epochs=2))
    assert (np.diff(plan.weight, axis=2) <= 0).all()
    for client, size in enumerate(sizes):
        if size:
            assert (plan.index[:, client] // 100 == client).all()
    for step, full in enumerate(plan.full):
        assert full == plan.weight[step, plan.steps > step].all()  # clients that have finished do not count


@given(SIZES, st.integers(1, 8), st.integers(0, 25))
def test_a_number_of_steps_is_taken_exactly_in_whole_passes(sizes, batch, steps):
    plan = plan_for(sizes, Training(batch_size=batch, steps=steps, epochs=99))
    np.testing.assert_array_equal(plan.steps, np.where(np.asarray(sizes) > 0, steps, 0))
    for client, size in enumerate(sizes):
        per_epoch = math.ceil(size / batch)
        for first in range(0, steps - per_epoch + 1, max(per_epoch, 1)):
            if size:
                assert sorted(seen(plan, client, slice(first, first + per_epoch))) == [
                    100 * client + i for i in range(size)
                ]
        assert len(set(seen(plan, client))) == min(size, len(seen(plan, client)))


ONE_OF_ALL = ("index", "weight", "bits", "seeds", "lr")


@given(SIZES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_clients_plan_depends_neither_on_the_order_nor_on_the_rest_of_the_cohort(sizes, batch, shuffler):
    training = Training(batch_size=batch, epochs=2, augment=("crop",), lr_epoch_decay=0.5)
    everybody = plan_for(sizes, training)
    some = shuffler.sample(range(len(sizes)), shuffler.randint(1, len(sizes)))
    rows = np.concatenate([100 * k + np.arange(sizes[k]) for k in some]).astype(np.int64)
    part = make_plan(rows, np.asarray([sizes[k] for k in some]), np.asarray(some), training=training, round=1, seed=0)
    for place, client in enumerate(some):
        steps = int(everybody.steps[client])
        assert part.steps[place] == steps
        assert part.travel[place] == everybody.travel[client]
        assert part.finish_seeds[place] == everybody.finish_seeds[client]
        for name in ONE_OF_ALL:
            mine, other = getattr(part, name), getattr(everybody, name)
            np.testing.assert_array_equal(mine[:steps, place], other[:steps, client])


def test_rounds_clients_epochs_and_seeds_shuffle_differently():
    training = Training(batch_size=50, epochs=2)
    first = plan_for([50, 50], training)
    orders = [
        (first.index[0, 0] - 0).tolist(),
        (first.index[1, 0] - 0).tolist(),
        (first.index[0, 1] - 100).tolist(),
        plan_for([50, 50], training, round=2).index[0, 0].tolist(),
        plan_for([50, 50], training, seed=1).index[0, 0].tolist(),
        plan_for([50, 50], training, ids=[5, 6]).index[0, 0].tolist(),
    ]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert orders[0] != sorted(orders[0])
    assert len(np.unique(first.seeds)) == first.seeds.size
    assert len(np.unique(first.finish_seeds)) == 2


def test_shuffles_are_uniform():
    """Where the first of 4 samples lands in 4,000 shuffles: chi-square, 3 degrees, 1 in 10,000 is 21.1."""
    plan = plan_for([4] * 4000, Training(batch_size=4))
    place = np.argmax(plan.index[0] % 100 == 0, axis=1)
    counts = np.bincount(place, minlength=4)
    assert ((counts - 1000) ** 2 / 1000).sum() < 21.1


def test_every_sample_has_bits_of_its_own_but_only_where_something_is_augmented():
    plan = plan_for([30, 30], Training(batch_size=8, epochs=3, augment=("flip",)))
    drawn = plan.bits[plan.weight > 0]
    assert len(np.unique(drawn)) == len(drawn) == 180
    assert not plan_for([30, 30], Training(batch_size=8)).bits.any()


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.booleans(),
    st.sampled_from(["constant", "cosine", "cyclic"]),
    st.floats(0.5, 1.0),
)
def test_travel_is_how_far_a_constant_unit_gradient_moves_the_weights(sizes, momentum, nesterov, schedule, decay):
    training = Training(
        batch_size=4, epochs=2, lr=0.1, momentum=momentum, nesterov=nesterov and momentum > 0,
        lr_schedule=schedule, lr_epoch_decay=decay,
    )  # fmt: skip
    plan = plan_for(sizes, training)
    for client in range(len(sizes)):
        velocity = distance = 0.0
        for step in range(int(plan.steps[client])):
            velocity = momentum * velocity + 1.0
            moved = 1.0 + momentum * velocity if training.nesterov else velocity
            distance += float(plan.lr[step, client]) * moved
        assert plan.travel[client] == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize(
    ("steps", "momentum", "expected"), [(5, 0.9, 13.1441), (50, 0.9, 410.4638), (3, 0.5, 4.25), (7, 0.0, 7.0)]
)
def test_the_momentum_divisor_is_that_of_the_card(steps, momentum, expected):
    """a = (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho)."""
    assert effective_steps(steps, Training(momentum=momentum)).sum() == pytest.approx(expected, abs=5e-5)


def test_adam_has_no_momentum_divisor():
    assert effective_steps(4, Training(optimizer="adam", momentum=0.9)).tolist() == [1.0] * 4


def test_the_cosine_starts_at_the_rate_and_ends_near_zero():
    plan = plan_for([1], Training(batch_size=1, steps=10_000, lr=1e-3, lr_schedule="cosine"))
    rates = plan.lr[:, 0].astype(np.float64)
    assert rates[0] == pytest.approx(1e-3, rel=1e-6)
    assert rates[1000] == pytest.approx(9.755283e-4, rel=1e-6)
    assert rates[5000] == pytest.approx(5e-4, rel=1e-6)
    assert 0 < rates[-1] < 1e-10
    assert (np.diff(rates) <= 0).all()


def test_each_client_has_the_cosine_of_its_own_steps():
    plan = plan_for([4, 12], Training(batch_size=4, epochs=2, lr=1.0, lr_schedule="cosine"))
    np.testing.assert_allclose(plan.lr[:2, 0], [1.0, 0.5], rtol=1e-6)
    wanted = [0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    np.testing.assert_allclose(plan.lr[:, 1], wanted, rtol=1e-6)
    assert not plan.shared_rate
    assert plan_for([4, 12], Training(batch_size=4)).shared_rate


def test_a_cyclic_rate_falls_along_a_line_and_starts_again():
    """FedBE: 1e-3 to 4e-4 in 25 steps; a snapshot every 25 steps is taken at the lowest rate."""
    plan = plan_for([1], Training(batch_size=1, steps=60, lr=1e-3, lr_schedule="cyclic", lr_cycle=25, lr_low=4e-4))
    rates = plan.lr[:, 0]
    np.testing.assert_allclose(rates[:25], np.linspace(1e-3, 4e-4, 25), rtol=1e-12)
    np.testing.assert_array_equal(rates[25:50], rates[:25])
    assert rates[24] == rates[49] == pytest.approx(4e-4)


@pytest.mark.parametrize(
    ("lr", "low", "cycle", "expected"), [(0.0, 0.0, 2, [0.0] * 4), (0.2, 0.2, 3, [0.2] * 4), (0.2, 0.1, 1, [0.2] * 4)]
)
def test_a_cycle_without_a_fall_is_a_constant_rate(lr, low, cycle, expected):
    training = Training(batch_size=1, steps=4, lr=lr, lr_schedule="cyclic", lr_cycle=cycle, lr_low=low)
    assert plan_for([1], training).lr[:, 0].tolist() == expected


def test_a_cycle_shrinks_with_the_rounds():
    training = Training(batch_size=1, steps=3, lr=0.4, lr_low=0.2, lr_schedule="cyclic", lr_cycle=3, lr_decay=0.5)
    np.testing.assert_allclose(plan_for([1], training, round=3).lr[:, 0], [0.1, 0.075, 0.05])


def test_rates_decay_by_round_and_by_local_epoch():
    training = Training(batch_size=4, epochs=3, lr=0.2, lr_decay=0.9, lr_epoch_decay=0.5)
    plan = plan_for([5, 3], training, round=4)
    base = 0.2 * 0.9**3
    np.testing.assert_allclose(plan.lr[:, 0], base * np.array([1, 1, 0.5, 0.5, 0.25, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(plan.lr[:3, 1], base * np.array([1, 0.5, 0.25]), rtol=1e-6)


@given(SIZES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_columns_of_a_plan_are_the_plans_of_those_clients(sizes, batch, shuffler):
    plan = plan_for(sizes, Training(batch_size=batch, epochs=2))
    order = shuffler.sample(range(len(sizes)), len(sizes))[: shuffler.randint(1, len(sizes))]
    part = plan.columns(order)
    longest = int(plan.steps[order].max())
    assert len(part.index) == longest or order == list(range(len(sizes)))
    for field in dataclasses.fields(Plan):
        whole, cut = getattr(plan, field.name), getattr(part, field.name)
        if field.name in ONE_OF_ALL:
            np.testing.assert_array_equal(cut[:longest], whole[:longest, order])
        else:
            np.testing.assert_array_equal(cut, whole[order])


@given(SIZES, st.integers(1, 8))
def test_a_sweep_shows_every_sample_once_in_order(sizes, batch):
    index, weight = sweep_plan(rows_of(sizes), np.asarray(sizes), batch)
    assert index.shape == weight.shape == (math.ceil(max(sizes) / batch), len(sizes), batch)
    for client, size in enumerate(sizes):
        shown = index[:, client].reshape(-1)[weight[:, client].reshape(-1) > 0]
        assert shown.tolist() == [100 * client + i for i in range(size)]


def test_nobody_with_data_is_an_empty_plan():
    plan = plan_for([0, 0], Training(batch_size=4))
    assert plan.index.shape == (0, 2, 4)
    assert plan.steps.tolist() == [0, 0]
    assert plan.travel.tolist() == [0.0, 0.0]


def test_a_number_of_steps_costs_what_is_taken_whatever_the_smallest_client_holds():
    sizes = [600] * 30 + [1]
    plan = plan_for(sizes, Training(batch_size=50, steps=60))
    assert (plan.steps == 60).all()
    client, *_ = _positions(np.asarray(sizes), np.arange(len(sizes), dtype=np.uint64), np.r_[np.full(30, 5), 60])
    assert len(client) == 30 * 600 * 5 + 60  # not 60 passes for everybody


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"lr": -1.0},
        {"optimizer": "foo"},
        {"momentum": 1.0},
        {"clip": 0.0},
        {"lr_schedule": "linear"},
        {"lr_cycle": 0},
        {"lr_low": -0.1},
        {"lr_low": 0.2, "lr_schedule": "cyclic", "lr": 0.1},
    ],
)
def test_impossible_training_is_refused_by_its_key(wrong):
    with pytest.raises(FedstillError, match=f"local.{next(iter(wrong))}"):
        check_training(Training(**wrong))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 1.5}, "a whole number"),
        ({"steps": 2.0}, "a whole number"),
        ({"batch_size": "50"}, "a whole number"),
        ({"epochs": None}, "a whole number"),
        ({"lr": "0.1"}, "a number"),
        ({"clip": "1"}, "a number"),
    ],
)
def test_numbers_of_another_kind_are_refused_by_their_key(wrong, words):
    ((key, value),) = wrong.items()
    with pytest.raises(FedstillError, match=f"local.{key} = {value!r} must be {words}"):
        check_training(Training(**wrong))


def test_numbers_of_numpy_are_numbers():
    check_training(Training(epochs=np.int64(2), steps=None, lr=np.float32(0.1), clip=1))
