"""`explain`: generated from the recipe, its docstring and one tiny round."""

import dataclasses

import pytest
import torch

from fedstill.about.explain import explain, parts_of, traffic
from fedstill.cli.info import explain_text
from fedstill.compose.combine import combine
from fedstill.core.errors import FedstillError
from fedstill.core.types import Method, Need, Objective, ServerStep
from fedstill.local.terms import cross_entropy
from fedstill.methods import METHODS
from fedstill.methods.lookup import build_method
from fedstill.server.aggregate import AGGREGATES, average, median


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_explained(name):
    facts = explain(name)
    assert facts["summary"]
    assert facts["equation"]
    assert facts["reference"]
    assert facts["differs_from_the_paper"]
    assert all(option["meaning"] for option in facts["options"])
    assert {part["where"] for part in facts["parts"]} >= {"client", "server"}
    text = explain_text(facts)
    assert all(line in text for line in ("Leaves a client each round", "Needs", "Reference"))


def test_scaffold_sends_and_keeps_a_control_of_the_models_size():
    facts = explain("scaffold")
    assert any("control" in item and "as large as the model" in item for item in facts["leaves_a_client"])
    assert any("control" in item and "as large as the model" in item for item in facts["stays_on_a_client"])
    assert any("control" in item for item in facts["sent_to_a_client"])


def test_fedavg_sends_nothing_beside_the_model_and_its_numbers():
    facts = explain("fedavg")
    assert len(facts["leaves_a_client"]) == 2
    assert facts["stays_on_a_client"] == ["its data"]
    assert facts["needs"] == []


def test_feddf_needs_unlabeled_data_and_single_models():
    needs = explain("feddf")["needs"]
    assert Need.UNLABELED.value in needs
    assert Need.INDIVIDUAL_UPLOADS.value in needs


def test_what_a_new_term_uploads_is_seen_without_being_declared():
    base = build_method("fedavg", {})[0].method
    spy = Objective(
        loss=lambda output, batch, local: output.logits.sum() * 0.0,
        finish=lambda local, measured: ({}, {"secret": torch.zeros(7)}),
        needs=frozenset({Need.LABEL_COUNTS_UPLOADED}),
    )
    found = traffic(dataclasses.replace(base, objective=combine(cross_entropy(), spy)))
    assert any(item.startswith("secret:") for item in found["leaves_a_client"])
    assert any("each class" in item for item in found["leaves_a_client"])


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("fedftg", ["average", "hard_samples"]),
        ("mrtf", ["average", "rectified_distillation"]),
        ("fednova", ["normalized_average"]),
        ("simclr", ["average", "pretrain"]),
        ("fedadam", ["average", "adaptive"]),
        ("scaffold", ["average", "update_control"]),
        ("scaffold(global_lr=0.5)", ["average", "sgd", "update_control"]),
        ("fedgen", ["average", "train_generator"]),
    ],
)
def test_the_servers_parts_are_named_in_the_order_in_which_they_run(method, parts):
    assert [part["part"] for part in explain(method)["parts"] if part["where"] == "server"] == parts


def test_what_leaves_once_is_told_apart_from_what_leaves_each_round_and_by_what_it_grows_with():
    facts = explain("fedaux")
    assert facts["leaves_a_client_once"] == ["w: one number for each feature"]
    assert facts["leaves_a_client"] == explain("fedavg")["leaves_a_client"]
    assert "Leaves a client once, before the first round\n  w: one number for each feature\n" in explain_text(facts)
    assert "before the first round" not in explain_text(explain("fedavg"))


def test_a_count_that_is_none_of_the_trials_sizes_is_told_with_them():
    """Four fifths of the 25 unlabeled rows are distilled on."""
    (told,) = explain('fedaux(scorer="kde")')["leaves_a_client_once"]
    assert told.endswith(": 20 numbers in a trial with 16 features, 25 unlabeled rows, 3 classes")


def test_noise_by_each_client_keeps_sizes_and_losses_at_home_and_a_trusted_party_is_named():
    told = "its number of samples and of steps, and its mean training loss"
    alone, trusting = explain('dp_fedavg(trust="nobody")'), explain("dp_fedavg")
    assert told not in alone["leaves_a_client"]
    assert told in alone["stays_on_a_client"]
    assert told in trusting["leaves_a_client"]
    assert any("a trusted party clips the moves" in item for item in trusting["leaves_a_client"])
    assert not any("trusted" in item for item in alone["leaves_a_client"])


def test_an_aggregate_is_explained_alone_and_as_a_part_of_a_method():
    facts = explain("trimmed_mean(share=0.2)")
    assert facts["summary"].startswith("w = the mean over the cohort without the largest")
    assert [option["name"] for option in facts["options"]] == ["share"]
    assert [part["part"] for part in explain("fedlmd+median")["parts"]][-1] == "median"
    parts = explain("scaffold+krum")["parts"]
    assert [part["part"] for part in parts if part["where"] == "server"] == ["krum", "update_control"]


def test_beside_a_method_an_aggregate_is_explained_too(monkeypatch):
    def midmean() -> ServerStep:
        """w = the mean of the middle half."""
        return dataclasses.replace(median(), name="midmean")

    monkeypatch.setitem(AGGREGATES, "midmean", midmean)
    facts = explain("fedavg+midmean")
    assert "FedAvg: clients train" in facts["equation"]
    assert facts["equation"].endswith("w = the mean of the middle half.")
    assert "midmean" not in facts["differs_from_the_paper"]


def test_an_unknown_part_is_told_with_aggregates_among_the_names():
    with pytest.raises(FedstillError, match=r"'medain' is unknown: did you mean 'median'\?"):
        explain("fedavg+medain")


def a_method_with_its_step_inside() -> Method:
    """A method: its step is no function of its own module."""

    def apply(candidate, state, round):
        return candidate, state

    return Method(cross_entropy(), average(), (ServerStep("part_way", apply),))


def test_a_step_that_is_written_inside_its_method_has_its_own_name():
    parts = parts_of(a_method_with_its_step_inside())
    assert [part["part"] for part in parts] == ["cross_entropy", "average", "part_way"]
