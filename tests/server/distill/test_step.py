import dataclasses
from dataclasses import replace
from functools import partial

import pytest
import torch
from by_hand import blobs, linear, linear_model, number, round_of, uploads_of
from server_rounds import clients_models, network, preparation_of, run, server_round
from students import student_of
from toy import furthest, same_bits

from fedstill.compose.combine import first_state, run_steps, targets
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.tree import clone, flatten, stack, unflatten
from fedstill.core.types import Method, Need, Targets, Training
from fedstill.local import cross_entropy
from fedstill.methods import feddf
from fedstill.methods.lookup import build_method
from fedstill.server import average, distill
from fedstill.server.distill.step import loss_of, rows_of, split_rows, spread
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import (
    TeacherShares,
    agreement,
    everything,
    keep_targets,
    maximum_rule,
    pool_targets,
    targets_of,
)

TRAINING = Training(steps=5, lr=0.5)


def test_agreement_is_the_share_of_teachers_who_name_the_pooled_class():
    logits = number([[[2.0, 0.0]], [[3.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    assert agreement(logits, pool_targets(logits)) == 0.75


def distilled(models, sizes=None, training=TRAINING, **options):
    uploads = uploads_of(models, sizes or [1.0] * len(models))
    this = round_of(models[0], uploads, model=linear_model(), unlabeled=blobs(9, 20).x)
    candidate, _ = average("uniform").apply(models[0], {}, this)
    student, state = distill(
        Student(**vars(training), temperature=options.get("temperature", 1.0)), pool=partial(pool_targets, **options)
    ).apply(candidate, {}, this)
    assert set(state) <= {"targets"}
    return candidate, student, this


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_identical_teachers_leave_a_student_at_the_teacher_fixed(pool):
    model = linear(3, 4, seed=1)
    _, student, this = distilled([model] * 3, pool=pool)
    torch.testing.assert_close(student.params, model.params, rtol=1e-12, atol=1e-12)
    assert this.metrics["distill_loss_before"] < 1e-10
    assert this.metrics["teacher_agreement"] == 1.0


def test_heads_on_shared_features_average_to_the_ensemble_of_logits():
    candidate, student, this = distilled([linear(3, 4, seed=s) for s in range(4)])
    assert this.metrics["distill_loss_before"] < 1e-10
    torch.testing.assert_close(student.params, candidate.params, rtol=1e-9, atol=1e-9)


def test_distillation_brings_the_student_to_the_pooled_probabilities():
    models = [linear(3, 4, seed=s) for s in range(4)]
    _, _, this = distilled(models, training=Training(steps=60, lr=1.0), pool="probabilities")
    assert this.metrics["distill_loss_before"] > 0.02
    assert this.metrics["distill_loss_after"] < 0.5 * this.metrics["distill_loss_before"]


def test_zero_steps_return_the_candidate_without_asking_anybody():
    models = [linear(3, 4, seed=s) for s in range(2)]
    candidate, student, this = distilled(models, training=Training(steps=0))
    assert student is candidate
    assert this.trainer.asked == []
    assert this.metrics == {}


def test_teachers_are_unchanged_after_distillation():
    models = [linear(3, 4, seed=s) for s in range(2)]
    uploads = uploads_of(models, [1, 1])
    before = clone(uploads.weights)
    this = round_of(models[0], uploads, model=linear_model(), unlabeled=blobs(9, 20).x)
    distill(Student(**vars(TRAINING)), pool=partial(pool_targets, pool="probabilities")).apply(models[0], {}, this)
    torch.testing.assert_close(uploads.weights, before, rtol=0, atol=0)


def test_the_student_is_trained_as_asked_from_the_rounds_own_seed():
    _, _, this = distilled([linear(3, 4, seed=s) for s in range(2)])
    assert this.trainer.asked == [(TRAINING, seed_for(this.seed, "distill"))]


def test_missing_unlabeled_data_is_one_line_with_its_cure():
    model = linear(3, 4)
    with pytest.raises(FedstillError, match=r"needs unlabeled data.*data\.unlabeled"):
        distill(Student(**vars(TRAINING))).apply(model, {}, round_of(model, uploads_of([model], [1])))


def test_distillation_declares_what_it_looks_at():
    plain = {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS}
    assert distill(Student(**vars(TRAINING))).needs == plain
    assert distill(Student(**vars(TRAINING), patience=100)).needs == plain | {Need.VALIDATION}
    shares = TeacherShares(lambda round, state: torch.ones(1), frozenset({Need.LABEL_COUNTS_UPLOADED}))
    assert distill(Student(**vars(TRAINING)), shares=shares).needs == plain | {Need.LABEL_COUNTS_UPLOADED}


def three_linear_models():
    models = [linear(3, 4, seed=s) for s in range(3)]
    this = round_of(models[0], uploads_of(models, [1.0, 1.0, 1.0]), model=linear_model(), unlabeled=blobs(9, 20).x)
    return models, this, torch.stack([this.unlabeled @ model.params["weight"].T for model in models])


def test_what_was_taught_is_kept_and_survives_a_checkpoint():
    models, this, logits = three_linear_models()
    method = Method(cross_entropy(), average("uniform"), (distill(Student(**vars(TRAINING))),))
    state = first_state(method, models[0])
    assert targets(method, state) is None
    _, state = run_steps(method, models[0], state, this)
    taught = targets(method, unflatten(flatten(state)))
    torch.testing.assert_close(taught.probabilities, torch.softmax(logits.mean(0), -1))
    assert taught.kept.tolist() == [True] * 20


def test_the_model_before_distillation_is_left_to_be_looked_at():
    candidate, student, this = distilled([linear(3, 4, seed=s) for s in range(3)], pool="probabilities")
    assert this.models == {"aggregated": candidate}
    assert not torch.equal(student.params["weight"], candidate.params["weight"])


def test_teachers_weigh_what_their_shares_say():
    models, this, logits = three_linear_models()
    shares = TeacherShares(lambda round, state: number([0.0, 1.0, 0.0]) * round.number)
    _, state = distill(Student(**vars(TRAINING)), shares=shares).apply(models[0], {}, this)
    torch.testing.assert_close(targets_of(state).probabilities, torch.softmax(logits[1], -1))


def test_other_teachers_than_the_uploads_may_answer():
    _, this, logits = three_linear_models()
    candidate = linear(3, 4, seed=8)
    _, state = distill(Student(**vars(TRAINING)), teachers=lambda w, round: stack([round.start, w])).apply(
        candidate, {}, this
    )
    both = torch.stack([logits[0], this.unlabeled @ candidate.params["weight"].T])
    torch.testing.assert_close(targets_of(state).probabilities, torch.softmax(both.mean(0), -1))


def hard_pool(logits, threshold):
    return maximum_rule(torch.softmax(logits, -1), threshold)


def test_a_pool_may_keep_some_rows_and_the_losses_are_over_these():
    _, this, logits = three_linear_models()
    candidate = linear(3, 4, seed=8)
    step = distill(Student(**vars(Training(steps=30, lr=0.5))), hard=True, pool=partial(hard_pool, threshold=0.9))
    learnt, state = step.apply(candidate, {}, this)
    kept, label = targets_of(state).kept, targets_of(state).probabilities.argmax(1)
    assert 0 < int(kept.sum()) < 20
    for name, weights in (("before", candidate), ("after", learnt)):
        answers = this.unlabeled @ weights.params["weight"].T + weights.params["bias"]
        wanted = torch.nn.functional.cross_entropy(answers[kept], label[kept])
        assert this.metrics[f"distill_loss_{name}"] == pytest.approx(wanted.item())
    assert this.metrics["distill_loss_after"] < this.metrics["distill_loss_before"]
    by_hand = torch.softmax(logits, -1).max(-1).values.max(0).values >= 0.9
    assert torch.equal(kept, by_hand)


def test_when_no_label_is_sure_enough_the_candidate_stays_and_the_loss_is_unknown():
    models, this, _ = three_linear_models()
    step = distill(Student(**vars(TRAINING)), hard=True, pool=partial(hard_pool, threshold=1.01))
    learnt, state = step.apply(models[0], {}, this)
    assert learnt is models[0]
    assert not targets_of(state).kept.any()
    assert this.metrics["distill_loss_after"] != this.metrics["distill_loss_after"]


def test_a_round_without_steps_leaves_the_targets_of_an_earlier_one():
    models, this, _ = three_linear_models()
    earlier = keep_targets({}, everything(torch.full((20, 3), 1 / 3)))
    assert distill(Student(**vars(Training(steps=0)))).apply(models[0], earlier, this) == (models[0], earlier)


def test_the_loss_of_a_model_is_its_divergence_from_the_targets_at_the_temperature():
    models, this, logits = three_linear_models()
    for temperature in (1.0, 3.0):
        targets = Targets(torch.softmax(logits[0] / temperature, -1), torch.ones(20, dtype=torch.bool))
        assert loss_of(models[0], targets, this, temperature) < 1e-12
        assert loss_of(models[1], targets, this, temperature) > 1e-2


def test_the_best_student_on_the_validation_set_is_the_one_that_is_kept():
    """Targets that lead away from the truth: every step is worse than the one before."""
    models, this, _ = three_linear_models()
    truth = (this.unlabeled @ models[1].params["weight"].T).argmax(1)
    this = replace(this, validation=(this.unlabeled, truth))
    student = Student(**vars(Training(steps=40, lr=2.0)), patience=3, look_every=1)
    learnt, _ = distill(student, pool=lambda logits: torch.softmax(-3 * logits[1], -1)).apply(models[1], {}, this)
    scores = (this.unlabeled @ learnt.params["weight"].T + learnt.params["bias"]).argmax(1) == truth
    assert scores.double().mean().item() == this.metrics["validation_accuracy"]
    assert this.metrics["distill_steps_kept"] == 1.0


# Distillation on a part of the unlabeled rows: who is asked about what, and what is left of the others.

STUDENT = Student(**vars(Training(steps=4, batch_size=8, lr=0.1)))

ROWS = split_rows(20, 0.8, seed=7)  # of the twenty of server_rounds, with the seed of its rounds


def this_round(**how):
    return server_round(clients_models(network(), 3), network(), **how)


def prepared(step, this):
    return step.prepare(this.start, step.init(this.start), preparation_of(this))[1]


def prepared_and_applied(step, this):
    """(the model after the step, its state)."""
    return step.apply(this.start, prepared(step, this), this)


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
    learnt, state = prepared_and_applied(step, this_round())
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
    prepared_and_applied(distill(STUDENT, distill_share=0.8), this)
    chosen, others = (part.nonzero().flatten().tolist() for part in (ROWS, ~ROWS))
    assert this.trainer.rows == [chosen, chosen, chosen, others]
    assert this.trainer.stacked == [True, False, False, False]


def test_where_nothing_was_taught_the_targets_are_the_students_own_answer():
    this = this_round()
    learnt, state = prepared_and_applied(distill(STUDENT, distill_share=0.8), this)
    answer = this.trainer.outputs(learnt, this.unlabeled).logits.softmax(1)
    assert furthest({"p": targets_of(state).probabilities[~ROWS]}, {"p": answer[~ROWS]}) < 1e-12


def test_the_losses_that_are_reported_are_those_of_these_rows():
    this, alone = this_round(), this_round()
    prepared_and_applied(distill(STUDENT, distill_share=0.8), this)
    whole = distill(STUDENT)
    whole.apply(alone.start, whole.init(alone.start), dataclasses.replace(alone, unlabeled=alone.unlabeled[ROWS]))
    for name in ("teacher_agreement", "distill_loss_before", "distill_loss_after"):
        assert this.metrics[name] == pytest.approx(alone.metrics[name], abs=1e-12)


def test_hard_labels_are_kept_where_they_are_sure_and_distilled_on():
    def pool(logits):
        return maximum_rule(logits.softmax(-1), threshold=0.5)

    _, state = prepared_and_applied(distill(STUDENT, pool=pool, distill_share=0.8), this_round())
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
    _, state = prepared_and_applied(step, this)
    second = this.trainer.outputs(clients_models(network(), 3)[1], this.unlabeled).logits.softmax(1)
    assert furthest({"p": targets_of(state).probabilities[ROWS]}, {"p": second[ROWS]}) < 1e-12


def test_all_rows_are_the_default_and_prepare_nothing():
    plain, whole = (
        run(feddf(student=student_of(feddf, steps=5, batch_size=8), **how)) for how in ({}, {"distill_share": 1.0})
    )
    assert same_bits(plain.weights, whole.weights)
    assert "seconds_prepared" not in whole.history.rows[0]
    assert "distilled" not in distill(STUDENT).init(network().init(0))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
@pytest.mark.parametrize("method", ["feddf", "fedbe"])
def test_an_impossible_part_is_refused_by_name(method, share):
    with pytest.raises(FedstillError, match=r"method\.distill_share = .* above 0 and at most 1"):
        build_method(method, {"distill_share": share})
