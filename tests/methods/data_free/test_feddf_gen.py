"""FedDF with a generator: the numbers of FedFTG's code, mistakes, and what it is made to be joined with."""

from __future__ import annotations

import inspect

import pytest
from server_rounds import run
from toy import furthest, same_bits

from fedstill.about.toy import trial_federation, trial_model
from fedstill.compose.join import join
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.types import Need
from fedstill.methods import fedavg, feddf_gen, scaffold
from fedstill.methods.data_free.inventing import Generator, InventedStudent
from fedstill.methods.lookup import build_method
from fedstill.privacy.plan import Privacy

SHORT = {
    "generator": Generator(steps=2, noise=5, weight_decay=1e-3),
    "student": InventedStudent(steps=2, batch_norm="restore"),
    "batch_size": 8,
}
WRITTEN = "feddf_gen(generator.steps=2, generator.noise=5, student.steps=2, batch_size=8)"
IDLE = InventedStudent(steps=0)


def test_the_defaults_are_those_of_fedftgs_code_but_for_batch_norm_and_feddfs_own_mean_of_logits():
    """Card 13.2 and 13.3; the weight of both terms of the generator's loss is 1."""
    found = {name: one.default for name, one in inspect.signature(feddf_gen).parameters.items()}
    assert found == {
        "generator": Generator("auto", 100, 50, 0.01, 0.998, 1e-3, lam_cls=1.0, lam_dis=1.0),
        "student": InventedStudent(20, 0.1, 0.998, 1e-3, batch_norm="restore"),
        "batch_size": 50,
        "pool": "logits",
        "labels": "quota",
        "ensemble": "uniform",
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"generator": {"steps": -1}}, r"method\.generator\.steps = -1 must be"),
        ({"student": {"steps": -1}}, r"method\.student\.steps"),
        ({"batch_size": 1}, r"method\.batch_size"),
        ({"generator": {"lam_dis": -0.5}}, r"method\.generator\.lam_dis"),
        ({"student": {"weight_decay": -1.0}}, r"method\.student\.weight_decay"),
        ({"pool": "mean"}, r'method\.pool = "mean" is unknown'),
        ({"labels": "quotas"}, "quota"),
        ({"student": {"batch_norm": "eval"}}, "frozen"),
    ],
)
def test_an_impossible_option_is_one_line_with_its_name(options, told):
    with pytest.raises(FedstillError, match=told):
        build_method("feddf_gen", options)


def test_an_unknown_generator_is_told_with_the_nearest_name():
    with pytest.raises(FedstillError, match=r"generator\.network = 'tabel' is unknown.*table"):
        feddf_gen(generator=Generator("tabel"))


def test_it_needs_no_data_on_the_server_and_label_counts_only_where_they_are_used():
    assert Need.UNLABELED not in needs_of(feddf_gen())
    assert Need.LABEL_COUNTS_UPLOADED in needs_of(feddf_gen())
    assert Need.LABEL_COUNTS_UPLOADED not in needs_of(feddf_gen(labels="uniform"))


def test_a_round_reports_both_losses_and_the_average_before():
    (row,) = run(feddf_gen(**SHORT), rounds=1).history.rows
    assert {"server/teaching_generator_loss", "server/distill_loss", "accuracy_aggregated"} <= set(row)
    (plain,) = run(fedavg(), rounds=1).history.rows
    assert row["accuracy_aggregated"] == plain["accuracy"]


def test_it_refines_what_another_method_has_made():
    """SCAFFOLD averages evenly; its first round is its own, refined, and its controls go on from the model sent."""
    both = build_method(f"scaffold+{WRITTEN}")[0].method
    alone = run(scaffold(), rounds=1)
    joined = run(both, rounds=1)
    assert joined.history.rows[0]["accuracy_aggregated"] == alone.history.rows[0]["accuracy"]
    assert 1e-4 < furthest(joined.weights, alone.weights) < 1.0
    off = join({"scaffold": scaffold(), "feddf_gen": feddf_gen(student=IDLE)})
    assert same_bits(run(off).weights, run(scaffold()).weights)


def test_where_the_student_takes_no_step_nothing_is_needed_or_refused():
    assert needs_of(feddf_gen(student=IDLE)) == set()
    text = {"model": trial_model(text=True), "federation": trial_federation(text=True), "rounds": 1}
    run(feddf_gen(student=IDLE), **text, privacy=Privacy(label_counts="none"))
    with pytest.raises(FedstillError, match="numbers, not words"):
        run(feddf_gen(**SHORT), **text)
