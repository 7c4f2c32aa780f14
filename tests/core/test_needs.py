from __future__ import annotations

import dataclasses

import pytest
import torch

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.needs import CURES, check_needs, check_phases, needs_of, unmet_needs
from fedstill.core.types import Dataset, Federation, Method, Model, Need, Objective, Phase, ServerStep, Training, Traits

CAN_BE_UNMET = {Need.UNLABELED, Need.VALIDATION, Need.FEATURES, Need.HEAD, Need.TOKENS, Need.PLAIN_SGD}


def method(*needs: Need, server: tuple[Need, ...] = ()) -> Method:
    objective = Objective(lambda output, batch, local: output.logits.sum(), needs=frozenset(needs))
    return Method(objective, ServerStep("needy", needs=frozenset(server)))


def setting(*, rich: bool) -> dict:
    data = Dataset("none", torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), ("a", "b"))
    unlabeled = torch.zeros(4, 3) if rich else None
    part = (lambda params, x: x) if rich else None
    validation = (torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)) if rich else None
    return {
        "model": Model("m", init=None, apply=None, head=part, traits=Traits(features=rich), tokens=part),
        "federation": Federation(data, data, torch.arange(2), torch.tensor([0, 2]), unlabeled, validation=validation),
        "training": Training(optimizer="sgd" if rich else "adam"),
    }


def test_the_needs_of_a_method_are_those_of_all_its_parts():
    parts = method(Need.CLIENT_STATE, Need.FEATURES, server=(Need.FEATURES, Need.UNLABELED))
    assert needs_of(parts) == {Need.CLIENT_STATE, Need.FEATURES, Need.UNLABELED}


def test_one_line_names_every_unmet_need_with_its_cure():
    with pytest.raises(FedstillError) as told:
        check_needs(method(*Need), **setting(rich=False), label="fedsomething")
    message = str(told.value)
    assert message.startswith("fedsomething needs ")
    assert "\n" not in message
    for need in Need:
        assert (need.value in message) == (need in CAN_BE_UNMET)
    for need in CAN_BE_UNMET:
        assert f"{need.value} ({CURES[need]})" in message


def test_with_everything_there_nothing_is_said():
    check_needs(method(*Need, server=tuple(Need)), **setting(rich=True))


@pytest.mark.parametrize("need", sorted(CAN_BE_UNMET, key=lambda need: need.name))
def test_only_what_is_needed_and_missing_is_told(need):
    assert unmet_needs({need}, **setting(rich=False)) == [need]
    assert unmet_needs(set(Need) - {need}, **setting(rich=False)) == sorted(
        CAN_BE_UNMET - {need}, key=lambda other: other.name
    )
    assert unmet_needs({need}, **setting(rich=True)) == []


def test_an_unlabeled_set_without_samples_is_none():
    poor = setting(rich=True)
    federation = poor["federation"]
    poor["federation"] = Federation(
        federation.train, federation.test, federation.indices, federation.offsets, torch.zeros(0, 3)
    )
    assert unmet_needs({Need.UNLABELED}, **poor) == [Need.UNLABELED]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("fedpox", "did you mean 'fedprox'?"),
        ("sca", "did you mean 'scaffold'?"),
        ("xyz", "choose one of: fedavg, fedprox, scaffold"),
        ("", "choose one of: fedavg, fedprox, scaffold"),
    ],
)
def test_the_nearest_word_is_suggested_or_all_are_listed(word, told):
    assert suggest(word, ["scaffold", "fedavg", "fedprox"]) == told


def test_every_method_is_shown_its_first_round_and_only_the_data_that_it_declares():
    seen = []

    def phase(until: int | None, *needs: Need) -> Phase:
        one = method(*needs)
        step = ServerStep("needy", needs=frozenset(needs), check=seen.append)
        return Phase(dataclasses.replace(one, aggregate=step), until)

    check_phases([phase(2, Need.UNLABELED), phase(7), phase(None)], **setting(rich=True))
    assert [look.round for look in seen] == [1, 3, 8]
    assert [look.unlabeled is not None for look in seen] == [True, False, False]
    with pytest.raises(FedstillError, match="unlabeled data"):
        check_phases([phase(2), phase(None, Need.UNLABELED)], **setting(rich=False))
