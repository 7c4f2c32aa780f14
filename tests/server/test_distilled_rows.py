"""Distillation on a part of the unlabeled rows: who is asked about what, and what is left of the others."""

import dataclasses

import pytest
import torch
from server_rounds import clients_models, furthest, network, preparation_of, run, same_bits, server_round

from fedstill.core.errors import FedstillError
from fedstill.core.types import Need, Targets, Training
from fedstill.methods import fedbe, feddf
from fedstill.server.distill.step import distill, rows_of, split_rows, spread
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import TeacherShares, maximum_rule, targets_of

STUDENT = Student(Training(steps=4, batch_size=8, lr=0.1))
ROWS = split_rows(20, 0.8, seed=7)  # of the twenty of server_rounds, with the seed of its rounds


def this_round(**how):
    return server_round(clients_models(network(), 3), network(), **how)


def prepared(step, this):
    return step.prepare(this.start, step.init(this.start), preparation_of(this))[1]


def distilled(step, this):
    learnt, state = step.apply(this.start, prepared(step, this), this)
    return learnt, state


class Asked:
    """An engine that notes which rows it was asked about, by how many models."""

    def __init__(self, engine):
        self.engine, self.rows, self.stacked = engine, [], []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def outputs(self, weights, x, stacked=False, *, rows=None, **how):
        self.stacked.append(stacked)
        self.rows.append(None if rows is None else rows.tolist())
        return self.engine.outputs(weights, x, stacked, rows=rows, **how)


def test_the_student_is_the_one_that_these_rows_alone_would_have_made():
    step, whole = distill(STUDENT, distill_share=0.8), distill(STUDENT)
    learnt, state = distilled(step, this_round())
    alone = this_round()
    wanted, other = whole.apply(
        alone.start, whole.init(alone.start), dataclasses.replace(alone, unlabeled=alone.unlabeled[ROWS])
    )
    found, alike = targets_of(state), targets_of(other)
    assert torch.equal(found.kept, ROWS)
    assert furthest({"p": found.probabilities[ROWS]}, {"p": alike.probabilities}) < 1e-12
    assert furthest(learnt, wanted) < 1e-12


def test_teachers_are_asked_about_these_rows_only_and_the_student_alone_about_the_others():
    this = this_round()
    this = dataclasses.replace(this, trainer=Asked(this.trainer))
    distilled(distill(STUDENT, distill_share=0.8), this)
    chosen, others = (part.nonzero().flatten().tolist() for part in (ROWS, ~ROWS))
    assert this.trainer.rows == [chosen, chosen, chosen, others]
    assert this.trainer.stacked == [True, False, False, False]


def test_where_nothing_was_taught_the_targets_are_the_students_own_answer():
    this = this_round()
    learnt, state = distilled(distill(STUDENT, distill_share=0.8), this)
    answer = this.trainer.outputs(learnt, this.unlabeled).logits.softmax(1)
    assert furthest({"p": targets_of(state).probabilities[~ROWS]}, {"p": answer[~ROWS]}) < 1e-12


def test_the_losses_that_are_reported_are_those_of_these_rows():
    this, alone = this_round(), this_round()
    distilled(distill(STUDENT, distill_share=0.8), this)
    whole = distill(STUDENT)
    whole.apply(alone.start, whole.init(alone.start), dataclasses.replace(alone, unlabeled=alone.unlabeled[ROWS]))
    for name in ("teacher_agreement", "distill_loss_before", "distill_loss_after"):
        assert this.metrics[name] == pytest.approx(alone.metrics[name], abs=1e-12)


def test_hard_labels_are_kept_where_they_are_sure_and_distilled_on():
    def pool(logits):
        return maximum_rule(logits.softmax(-1), threshold=0.5)

    _, state = distilled(distill(STUDENT, pool=pool, distill_share=0.8), this_round())
    found = targets_of(state)
    whole = distill(STUDENT, pool=pool)
    this = this_round()
    _, every = whole.apply(this.start, whole.init(this.start), this)
    assert torch.equal(found.kept, targets_of(every).kept & ROWS)
    assert 0 < int(found.kept.sum()) < 16


def test_targets_of_some_rows_say_nothing_about_the_others():
    some = Targets(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([True, False]))
    found = spread(some, torch.tensor([3, 0]), 4)
    assert found.probabilities.tolist() == [
        [pytest.approx(0.2), pytest.approx(0.8)],
        [0.5, 0.5],
        [0.5, 0.5],
        [pytest.approx(0.9), pytest.approx(0.1)],
    ]
    assert found.kept.tolist() == [False, False, False, True]


def test_a_step_that_was_not_prepared_says_so():
    step, this = distill(STUDENT, distill_share=0.8), this_round()
    with pytest.raises(FedstillError, match="was not prepared"):
        step.apply(this.start, step.init(this.start), this)
    assert rows_of(prepared(step, this)).tolist() == ROWS.nonzero().flatten().tolist()


def test_shares_may_keep_a_state_of_their_own_that_is_prepared_with_the_rows():
    def prepare(candidate, state, preparation):
        return candidate, {**state, "votes": state["distilled"].double()}

    def of(round, state):
        assert state["votes"].sum() == 16
        return torch.tensor([0.0, 1.0, 0.0])

    shares = TeacherShares(of, frozenset({Need.FEATURES}), lambda weights: {"votes": {}}, prepare)
    step, this = distill(STUDENT, shares=shares, distill_share=0.8), this_round()
    assert set(step.init(this.start)) == {"targets", "distilled", "votes"}
    assert Need.FEATURES in step.needs
    _, state = distilled(step, this)
    second = this.trainer.outputs(clients_models(network(), 3)[1], this.unlabeled).logits.softmax(1)
    assert furthest({"p": targets_of(state).probabilities[ROWS]}, {"p": second[ROWS]}) < 1e-12


def test_all_rows_are_the_default_and_prepare_nothing():
    plain, whole = (run(feddf(steps=5, batch_size=8, **how)) for how in ({}, {"distill_share": 1.0}))
    assert same_bits(plain.weights, whole.weights)
    assert "seconds_prepared" not in whole.history.rows[0]
    assert "distilled" not in distill(STUDENT).init(network().init(0))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
@pytest.mark.parametrize("method", [feddf, fedbe])
def test_an_impossible_part_is_refused_by_name(method, share):
    with pytest.raises(FedstillError, match=r"method\.distill_share = .* above 0 and at most 1"):
        method(distill_share=share)


def test_fedaux_compares_with_feddf_on_its_own_rows():
    for preset in ("fedaux", "fedaux_released"):
        assert feddf.presets[preset]["distill_share"] == 0.8
