from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.seeds import (
    bits,
    cohort_size,
    draw_cohort,
    normal,
    numpy_generator,
    seed_for,
    to_signed,
    torch_generator,
    torch_stream,
    uniform,
)

WORDS = st.integers(0, 2**64 - 1)
PARTS = st.one_of(WORDS, st.text(max_size=8))
DRAWS = 200_000


def tensor_seed(seed: int) -> torch.Tensor:
    return torch.tensor(to_signed(seed))


def test_bits_are_splitmix64():
    """The reference sequence of the authors' C code for seed 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert bits(1234567, np.arange(5)).tolist() == expected


@given(WORDS, st.permutations(range(12)))
def test_a_draw_depends_on_its_counter_not_on_the_order_of_drawing(seed, order):
    assert bits(seed, np.array(order)).tolist() == [int(bits(seed, place)) for place in order]


@given(WORDS, st.integers(1, 30), st.integers(0, 30))
def test_more_draws_do_not_change_the_first_ones(seed, count, more):
    assert torch.equal(uniform(tensor_seed(seed), (count + more,))[:count], uniform(tensor_seed(seed), (count,)))


@given(WORDS)
def test_numpy_and_torch_draw_the_same_numbers(seed):
    from_numpy = (bits(seed, np.arange(24)) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
    assert torch.equal(uniform(tensor_seed(seed), (4, 6)).flatten(), torch.from_numpy(from_numpy))


@given(WORDS)
def test_signed_and_unsigned_seeds_are_the_same_bits(seed):
    assert -(2**63) <= to_signed(seed) < 2**63
    assert to_signed(seed) % 2**64 == seed
    assert to_signed(np.array([seed], np.uint64)).tolist() == [to_signed(seed)]


@given(WORDS, st.lists(PARTS, max_size=3), st.lists(PARTS, max_size=3))
def test_a_path_may_be_walked_in_pieces(root, first, second):
    assert seed_for(root, *first, *second) == seed_for(seed_for(root, *first), *second)


@given(WORDS, st.lists(st.integers(0, 2**40), min_size=1, max_size=9), st.text(max_size=5))
def test_an_array_in_the_path_is_every_client_on_its_own(root, clients, use):
    together = seed_for(root, 3, np.array(clients), use)
    assert together.dtype == np.uint64
    assert together.tolist() == [seed_for(root, 3, client, use) for client in clients]


def test_no_two_uses_share_a_seed():
    seeds = [
        seed_for(root, round, np.arange(100), use)
        for root in range(3)
        for round in range(20)
        for use in ("batches", "augment", "steps", "finish")
    ]
    assert len(np.unique(np.concatenate(seeds))) == 3 * 20 * 4 * 100
    assert seed_for(0, 1, 2) != seed_for(0, 2, 1)
    assert len({seed_for(0), seed_for(0, 0), seed_for(0, 0, 0), seed_for(0, "")}) == 4


def test_numbers_of_any_kind_name_the_same_path():
    assert seed_for(5, np.int64(7), np.uint8(2)) == seed_for(5, 7, 2)
    assert seed_for(-1) == seed_for(2**64 - 1)


def test_uniform_numbers_are_uniform_and_never_one():
    values = uniform(tensor_seed(seed_for(0, "uniform")), (DRAWS,)).double()
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    counts = torch.histc(values, bins=20, min=0.0, max=1.0)
    expected = DRAWS / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 52.0  # chi-square, 19 degrees: 1 in 10,000 is 51.0
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(float(neighbours)) < 4.0 / DRAWS**0.5


def test_normal_numbers_have_the_moments_of_a_normal():
    """Four standard errors of mean, variance, skewness and kurtosis."""
    values = normal(tensor_seed(seed_for(0, "normal")), (DRAWS,)).double()
    moments = [float(values.pow(k).mean()) for k in (1, 2, 3, 4)]
    for found, wanted, variance in zip(moments, (0.0, 1.0, 0.0, 3.0), (1.0, 2.0, 15.0, 96.0), strict=True):
        assert abs(found - wanted) < 4.0 * (variance / DRAWS) ** 0.5
    assert bool(values.isfinite().all())


@pytest.mark.parametrize("draw", [uniform, normal])
def test_under_vmap_each_client_draws_what_it_draws_alone(draw):
    seeds = torch.from_numpy(to_signed(seed_for(0, np.arange(5), "noise")))
    together = torch.func.vmap(lambda seed: draw(seed, (3, 2)))(seeds)
    for i in range(5):
        torch.testing.assert_close(together[i], draw(seeds[i], (3, 2)), rtol=1e-6, atol=1e-7)
    assert len(together.reshape(5, -1).unique(dim=0)) == 5


@pytest.mark.parametrize("draw", [uniform, normal])
def test_an_empty_shape_is_one_number_and_a_zero_is_none(draw):
    assert draw(tensor_seed(3), ()).shape == ()
    assert draw(tensor_seed(3), (0, 4)).shape == (0, 4)


def test_generators_are_private_and_repeat():
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    for seed in (0, 2**64 - 1):
        assert numpy_generator(seed).random() == numpy_generator(seed).random()
        first, second = (torch.rand(3, generator=torch_generator(seed)) for _ in range(2))
        assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(), before[1])
    assert random.getstate() == before[2]


def test_the_global_stream_is_lent_and_given_back_even_after_an_error():
    before = torch.random.get_rng_state()
    drawn = []
    for _ in range(2):
        with torch_stream(2**64 - 5):
            drawn.append(torch.nn.Linear(3, 2).weight.detach().clone())
    with pytest.raises(KeyError), torch_stream(1):
        raise KeyError
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_share_of_the_population_is_rounded_to_the_nearest_count():
    """A quarter of 7 clients is 1.75 and of 5 is 1.25; a thousandth of 7 is still one client."""
    assert [cohort_size(0.25, 7), cohort_size(0.25, 5), cohort_size(0.001, 7)] == [2, 1, 1]


@pytest.mark.parametrize(("clients", "count"), [(12, 3), (10, 3), (7, 7), (5, 1)])
def test_clients_that_take_turns_come_equally_often_and_never_too_soon(clients, count):
    """Two turns of a client are at least floor(clients / count) rounds apart, also where a turn ends within a round."""
    ids = np.arange(clients) * 2
    cohorts = [draw_cohort(ids, count, seed=3, round=number, sampling="cyclic") for number in range(1, 41)]
    assert {len(set(cohort.tolist())) for cohort in cohorts} == {count}
    for client in ids:
        rounds = np.flatnonzero([client in cohort for cohort in cohorts])
        assert rounds.size in (40 * count // clients, -(-40 * count // clients))
        assert np.diff(rounds).min() >= clients // count
    assert clients == count or cohorts[0].tolist() != ids[:count].tolist()  # the order is drawn
