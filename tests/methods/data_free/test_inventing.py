"""What methods with a generator share, against the worked numbers of the cards."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server_rounds import CLASSES, clients_models, network, preparation_of, server_round
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.types import Model, Outlook, Output, Weights
from fedstill.methods.data_free.generators import build_generator
from fedstill.methods.data_free.inventing import (
    AT_ONCE,
    asked_for,
    class_shares,
    diversity,
    gaussian_noise,
    label_counts,
    prepared_generator,
    quota_labels,
    refuse_text_and_heads,
    shown_samples,
    teacher_shares,
    wanted_classes,
    with_samples,
)


def counted(labels, classes):
    return torch.bincount(labels, minlength=classes).tolist()


@pytest.mark.parametrize(
    ("total", "counts", "wanted"), [(10, [1, 1, 1], [3, 3, 4]), (500, [300, 0, 200], [300, 0, 200])]
)
def test_labels_come_in_exact_proportions(total, counts, wanted):
    """Card 14.2, step 2."""
    assert counted(quota_labels(torch.tensor(counts, dtype=torch.float64), total, 1), 3) == wanted


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 300), st.integers(0, 99))
def test_every_quota_is_within_one_of_its_share_and_absent_classes_are_never_asked_for(counts, total, seed):
    share = np.array(counts) / sum(counts) * total
    found = np.array(counted(quota_labels(torch.tensor(counts, dtype=torch.float64), total, seed), len(counts)))
    assert found.sum() == total
    assert (np.abs(found - share) < 1 + 1e-6).all()
    assert (found[np.array(counts) == 0] == 0).all()


def test_labels_are_shuffled_by_the_seed():
    counts = torch.ones(4, dtype=torch.float64)
    first, again, other = (quota_labels(counts, 40, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert first != sorted(first)


def test_without_any_count_all_classes_are_asked_for_alike():
    assert counted(quota_labels(torch.zeros(4), 8, 0), 4) == [2, 2, 2, 2]


def test_counts_near_the_largest_float32_give_labels_and_shares():
    """What a guard without a cap lets through: their sum is no float32."""
    model = network()
    this = server_round([model.init(0), model.init(1)], model)
    told = torch.tensor([[3e38, 0.0, 1.0], [3e38, 3e38, 0.0]])
    counts = label_counts(dataclasses.replace(this, uploads=this.uploads._replace(label_counts=told)))
    assert counted(quota_labels(counts.sum(0), 12, 1), 3) == [8, 4, 0]
    torch.testing.assert_close(class_shares(counts)[:, 0], torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_class_shares_are_those_of_the_card():
    """Card 14.7: counts [[30, 10, 0], [10, 10, 0]]."""
    found = class_shares(torch.tensor([[30.0, 10.0, 0.0], [10.0, 10.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(
        found, torch.tensor([[0.75, 0.5, 0.0], [0.25, 0.5, 0.0]], dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_diversity_is_that_of_the_card():
    """Card 14.7: z = (0, 0), (1, 1), x = 0000, 2222 give e^-1; the printed 2-norms would give 0.059106."""
    z, x = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0] * 4, [2.0] * 4])
    assert float(diversity(x, z)) == pytest.approx(math.exp(-1))
    assert float(diversity(torch.ones(3, 2, 2), torch.rand(3, 4))) == 1.0


def test_diversity_of_images_does_not_vanish():
    """Card 14.2: 50 images of unit variance, 100 noise values; 2-norms underflow to 0.

    E d_z = 2, E d_x = 2 / sqrt(pi), and one pair in 50 is of a sample with itself. (The card drew 0.113.)
    """
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(50, 3, 32, 32, generator=generator), torch.randn(50, 100, generator=generator)
    assert float(diversity(x, z)) == pytest.approx(math.exp(-0.98 * 2 * 2 / math.sqrt(math.pi)), abs=0.01)


def test_what_a_generator_reads_is_noise_beside_a_one_hot_class():
    assert asked_for(torch.tensor([[0.5, -1.0]]), torch.tensor([2]), 3).tolist() == [[0.5, -1.0, 0.0, 0.0, 1.0]]


def test_noise_is_normal_and_a_function_of_the_seed():
    like = torch.zeros((), dtype=torch.float64)
    drawn = gaussian_noise(3, (200, 100), like)
    assert torch.equal(drawn, gaussian_noise(3, (200, 100), like))
    assert not torch.equal(drawn, gaussian_noise(4, (200, 100), like))
    assert abs(float(drawn.mean())) < 0.03
    assert abs(float(drawn.var()) - 1) < 0.05


# What steps with a generator share: who teaches, what is shown, and how a generator begins and goes on.


def round_with(counts, sizes=None):
    model = network()
    this = server_round(clients_models(model, len(counts)), model, sizes=sizes)
    told = torch.tensor(counts, dtype=torch.float64)
    return dataclasses.replace(this, uploads=this.uploads._replace(label_counts=told))


def test_for_a_class_that_nobody_holds_all_teachers_count_alike():
    this = round_with([[30.0, 10.0, 0.0], [10.0, 10.0, 0.0]])
    wanted = torch.tensor([[0.75, 0.5, 0.5], [0.25, 0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(teacher_shares(this, by_class=True), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(teacher_shares(this, by_class=False), torch.full((2, 3), 0.5, dtype=torch.float64))
    assert wanted_classes(this, quota=True).tolist() == [40.0, 20.0, 0.0]
    assert wanted_classes(this, quota=False).tolist() == [1.0] * 3


def test_a_client_without_samples_is_as_if_it_had_not_come():
    this = round_with([[1.0, 2.0, 0.0], [9.0, 9.0, 9.0], [0.0, 2.0, 0.0]], sizes=[3.0, 0.0, 2.0])
    left = with_samples(this)
    assert left.uploads.ids.tolist() == [this.uploads.ids[0], this.uploads.ids[2]]
    assert left.uploads.label_counts.tolist() == [[1.0, 2.0, 0.0], [0.0, 2.0, 0.0]]
    assert torch.equal(left.uploads.weights.params["head.bias"], this.uploads.weights.params["head.bias"][[0, 2]])
    assert left.metrics is this.metrics
    assert with_samples(left) is left


def echo(asked: list[int]) -> Model:
    """A generator of one value, the sum of what it reads; it notes how much it was asked for at once."""

    def apply(weights, x, **how):
        assert not how["training"]
        asked.append(len(x))
        return Output(x.sum(1, keepdim=True) * weights.params["scale"], x[:, :0]), {}

    return Model("echo", lambda seed: Weights({"scale": torch.ones(())}, {}), apply)


@pytest.mark.parametrize(
    ("classes", "shown", "each"), [(3, 3, 10), (10, 10, 10), (11, 11, 9), (60, 60, 1), (100, 100, 1), (250, 100, 1)]
)
def test_at_most_a_hundred_samples_are_shown_some_at_a_time(classes, shown, each):
    asked: list[int] = []
    model = dataclasses.replace(network(), classes=classes, input_shape=(1,))
    found = shown_samples(echo(asked), Weights({"scale": torch.ones(())}, {}), model, 4)
    assert found["y"].tolist() == [one for one in range(shown) for _ in range(each)]
    assert found["x"].shape == (shown * each, 1)
    assert max(asked) <= AT_ONCE == 50


def test_a_generator_goes_on_if_it_fits_and_every_slot_has_another_first_one():
    this, made = round_with([[1.0] * 3]), build_generator("dense", shape=(4,), classes=CLASSES, noise=2)
    look = preparation_of(this)

    def prepared(slot, state):
        return prepared_generator(lambda _: made, slot, this.start, state, look)

    first, other = prepared("one", {}), prepared("two", {})
    assert not same_bits(first["params"], other["params"])
    assert {leaf.dtype for leaf in first["params"].values()} == {torch.float64}
    assert prepared("one", {"one": other}) is other
    single = {"params": {name: leaf.float() for name, leaf in first["params"].items()}, "buffers": first["buffers"]}
    for unfit in ({}, single, {"params": {"w": torch.zeros(2)}}):
        assert same_bits(prepared("one", {"one": unfit}), first)


def test_a_student_of_samples_refuses_clients_that_train_heads_alone():
    refuse_text_and_heads(Outlook(1, None))
    with pytest.raises(FedstillError, match=r"local\.part = 'head' .* use fedftg\(input='feature'\)"):
        refuse_text_and_heads(Outlook(1, None, part="head"))
