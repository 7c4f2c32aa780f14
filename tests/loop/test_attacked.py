"""Runs some of whose clients are hostile: who is, what the guard and the methods see, and what is measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedstill import Experiment, FedstillError, run
from fedstill.experiment.build import build
from fedstill.loop.federate import federate

SMALL = Experiment(
    rounds=3,
    cohort=6,
    evaluate_every=3,
    data={"source": "digits", "test_limit": 100, "unlabeled": 50},
    partition={"scheme": "iid", "clients": 6},
    model={"name": "mlp", "hidden": [16]},
    local={"epochs": 2, "batch_size": 20, "lr": 0.1},
    engine={"device": "cpu"},
)


def attacked(name, method="fedavg", share=0.2, **changes):
    return run(SMALL.replace(attack={"name": name, "share": share}, method=method, **changes))


def test_without_an_attack_nothing_changes():
    plain = federate(build(SMALL))
    assert build(SMALL).attack is None
    assert "backdoor_success" not in plain.history.last


def test_hostile_clients_are_the_same_every_round_and_a_run_repeats():
    results = [attacked("sign(factor=3.0)") for _ in range(2)]
    for a, b in zip(*(result.weights.params.values() for result in results), strict=True):
        assert torch.equal(a, b)
    assert results[0].history.last["accuracy"] < run(SMALL).history.last["accuracy"]


def test_a_move_beyond_the_guard_is_refused_every_round_and_always_of_the_same_client():
    result = attacked("scale(factor=1000.0)")
    assert [record["round"] for record in result.audit] == [1, 2, 3]
    assert len({record["client"] for record in result.audit}) == 1


def test_a_backdoor_opens_and_its_success_stands_in_the_row():
    result = attacked("backdoor(target=3, factor=3.0)", share=0.5, rounds=6, evaluate_every=6)
    assert result.history.last["backdoor_success"] > 0.8
    assert attacked("backdoor(target=3, factor=1e-6)", rounds=1).history.last["backdoor_success"] < 0.6


def test_label_counts_of_a_client_with_wrong_labels_are_those_of_its_labels():
    """Else the guard would refuse it for counts that do not fit, or the method would learn the true ones."""
    result = attacked("label_flip", method="fedrs")
    assert result.audit == []
    assert attacked("label_flip", method="fedftg(iterations=1)").audit == []


def test_fedaux_hears_that_hostile_clients_are_sure_of_everything():
    honest = run(SMALL.replace(method='fedaux(score="odds", student.steps=1)')).history.rows[0]
    lied = attacked("sure", method='fedaux(score="odds", student.steps=1)').history.rows[0]
    bounded = attacked("sure", method='fedaux(score="odds", student.steps=1, largest_share=2.0)').history.rows[0]
    assert lied["prepare/largest_share"] > honest["prepare/largest_share"]
    assert max(lied["teacher_weights"].values()) > 2 / 6
    assert max(bounded["teacher_weights"].values()) <= 2 / 6 + 1e-6


def test_clients_that_live_elsewhere_are_not_attacked():
    built = build(SMALL.replace(attack={"name": "sign"}))
    with pytest.raises(FedstillError, match=r"attack.name: these clients live elsewhere"):
        dataclasses.replace(built, population=lambda *_, **__: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("signs", "attack.name = 'signs' is unknown: did you mean 'sign'"),
        ("sign(factor=0)", "attack.factor"),
        ("sign(share=0.1)", "unknown key 'attack.share' for sign"),
        ("sign until 3 then scale", "lasts the whole run"),
    ],
)
def test_a_mistake_is_told_before_the_run(name, message):
    with pytest.raises(FedstillError, match="attack") as error:
        SMALL.replace(attack={"name": name})
    assert message in str(error.value)
