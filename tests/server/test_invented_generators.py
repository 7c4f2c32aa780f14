"""What steps with a generator share: who teaches, what is shown, and how a generator begins and goes on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from server_rounds import CLASSES, clients_models, network, preparation_of, same_bits, server_round

from fedstill.core.errors import FedstillError
from fedstill.core.types import Model, Outlook, Output, Weights
from fedstill.methods.data_free.generators import build_generator
from fedstill.methods.data_free.inventing import (
    AT_ONCE,
    prepared_generator,
    refuse_text_and_heads,
    shown_samples,
    teacher_shares,
    wanted_classes,
    with_samples,
)


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
