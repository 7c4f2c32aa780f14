"""Label counts of client-side methods never leave the client: looked at on the wire and in what the server gets.

A trained model depends on the data it was trained on, and so does its training loss. Nothing else that is sent may:
two federations whose clients differ in their labels alone send the same but for these two.
"""

from __future__ import annotations

import dataclasses

import pytest
import safetensors.torch
import torch
from method_rows import CLASSES, ROWS, SIZES, distance, federation, form_of, network, run
from quick import EITHER_ENGINE
from running import changed_on_the_way
from toy import same_bits
from whole_server import watched

from fedstill.core.needs import needs_of
from fedstill.core.tree import as_tree
from fedstill.core.types import Need, Uploads
from fedstill.engine import engine as engine_module
from fedstill.loop.evaluate import label_counts
from fedstill.methods import fedavg

COUNTING = [
    row
    for row in ROWS
    if Need.LABEL_COUNTS in (needs := needs_of(row.build())) and Need.LABEL_COUNTS_UPLOADED not in needs
]
every_counting_row = pytest.mark.parametrize("row", COUNTING, ids=lambda row: row.id)
every_engine = pytest.mark.parametrize("engine", EITHER_ENGINE)
EVERYBODY = {"cohort": len(SIZES), "rounds": 1}


def other_labels():
    """The same samples on the same clients, whose labels are those of somebody else."""
    data = federation()
    y = torch.empty_like(data.train.y)
    y[data.indices] = data.train.y[data.indices].flip(0)
    return dataclasses.replace(data, train=dataclasses.replace(data.train, y=y))


def sent(method, **how) -> list[Uploads]:
    """What is on its way to the server, round by round."""
    seen = []

    def look(uploads, start, seed):
        seen.append(uploads)
        return uploads

    run(changed_on_the_way(method, look), **how)
    return seen


def served(method, **how) -> list[Uploads]:
    """What the server's step gets to see, round by round."""
    seen: list[Uploads] = []
    run(watched(method, lambda candidate, state, round: seen.append(round.uploads)), **how)
    return seen


def test_the_methods_that_look_at_label_counts_are_known():
    assert {row.name for row in COUNTING} == {"fedlmd", "fedlmd_tf", "fedrs"}


def test_the_two_federations_differ_in_the_label_counts_of_every_client_and_in_no_size():
    ours, theirs = federation(), other_labels()
    assert torch.equal(ours.offsets, theirs.offsets)
    assert (label_counts(ours) != label_counts(theirs)).any(dim=1).all()


@every_counting_row
@every_engine
def test_an_upload_has_the_form_of_fedavgs(row, engine):
    """No label counts, no extra slot: the same names, shapes and dtypes as in FedAvg, on the way and at the server."""
    for watch in (sent, served):
        found, plain = (watch(method, engine=engine) for method in (row.build(), fedavg()))
        assert len(found) == len(plain) == 3
        for ours, theirs in zip(found, plain, strict=True):
            assert ours.label_counts is None
            assert ours.extra == {}
            assert form_of(as_tree(ours)) == form_of(as_tree(theirs))


@every_counting_row
@every_engine
def test_other_labels_change_nothing_that_is_sent_but_the_model_and_its_loss(row, engine):
    ours, theirs = (
        sent(row.build(), engine=engine, federation=data, **EVERYBODY)[0] for data in (federation(), other_labels())
    )
    assert distance(ours.weights, theirs.weights) > 1e-3
    for field in set(Uploads._fields) - {"weights", "loss", "extra", "label_counts"}:
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field


@every_counting_row
def test_the_message_of_a_client_holds_its_model_and_four_numbers(row):
    messages, numbers = [], {"size", "steps", "travel", "loss"}

    def overhear(round, client, message):
        messages.append(safetensors.torch.load(message))
        return message

    run(row.build(), tamper=overhear, **EVERYBODY)
    model = {f"params/{name}" for name in network().init(0).params}
    assert len(messages) == len(SIZES)
    for message in messages:
        assert set(message) == model | numbers
        assert all(message[name].numel() == 1 for name in numbers)


def wrong_counts(self, objective, rows, sizes):
    """Every client is told that it has nothing of class 0 and much of the last one."""
    return torch.arange(CLASSES, dtype=self.dtype).repeat(len(sizes), 1) ** 3


@every_counting_row
@every_engine
def test_with_its_knob_off_label_counts_change_no_bit_of_an_upload(monkeypatch, row, engine):
    off, on = row.build(**row.is_fedavg_with), row.build()
    before = [sent(method, engine=engine, **EVERYBODY)[0] for method in (off, on)]
    monkeypatch.setattr(engine_module.Engine, "_label_counts", wrong_counts)
    after = [sent(method, engine=engine, **EVERYBODY)[0] for method in (off, on)]
    assert same_bits(as_tree(after[0]), as_tree(before[0]))
    assert not same_bits(after[1].weights, before[1].weights), "with its knob on it looks at them"
