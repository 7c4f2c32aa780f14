import math
from functools import partial

import pytest
import torch
from by_hand import blobs, linear, linear_model, local_view, number, round_of, scalar, uploads_of

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.tree import clone
from fedstill.core.types import Batch, Need, Output, Training
from fedstill.server import average, distill
from fedstill.server.distill import agreement
from fedstill.server.pools import pool_targets
from fedstill.server.student import Student, divergence, soft_target_loss

TRAINING = Training(steps=5, lr=0.5)


@pytest.mark.parametrize(
    ("pool", "expected"), [("logits", [0.268941, 0.731059]), ("probabilities", [0.449392, 0.550608])]
)
def test_two_teachers_pool_as_worked_by_hand(pool, expected):
    targets = pool_targets(number([[[2.0, 0.0]], [[0.0, 4.0]]]), pool)
    assert targets[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("logits", [0.989437, 0.009304, 0.001259]), ("probabilities", [0.363519, 0.606295, 0.030186])],
)
def test_one_loud_teacher_captures_averaged_logits_but_not_probabilities(pool, expected):
    logits = number([[[20.0, 0.0, 0.0]], [[0.0, 3.0, 0.0]], [[0.0, 3.0, 0.0]]])
    assert pool_targets(logits, pool)[0].tolist() == pytest.approx(expected, abs=1e-6)


def teachers(count=3, samples=5, classes=4):
    return torch.randn(count, samples, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_a_single_teacher_is_its_own_target(pool):
    (only,) = teachers(1)
    torch.testing.assert_close(pool_targets(only.unsqueeze(0), pool), torch.softmax(only, -1))


def test_averaged_logits_are_the_geometric_mean_of_probabilities():
    share = number([0.5, 0.2, 0.3])
    probabilities = torch.softmax(teachers(), -1)
    geometric = torch.exp((share.reshape(-1, 1, 1) * probabilities.log()).sum(0))
    expected = geometric / geometric.sum(-1, keepdim=True)
    torch.testing.assert_close(pool_targets(teachers(), share=share), expected)
    arithmetic = (share.reshape(-1, 1, 1) * probabilities).sum(0)
    torch.testing.assert_close(pool_targets(teachers(), "probabilities", share=share), arithmetic)


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_a_constant_on_a_teachers_logits_changes_nothing_but_a_scale_does(pool):
    shifted, scaled = teachers(), teachers()
    shifted[1] += torch.arange(5, dtype=torch.float64).unsqueeze(-1)
    scaled[1] *= 3.0
    torch.testing.assert_close(pool_targets(shifted, pool), pool_targets(teachers(), pool))
    assert not torch.allclose(pool_targets(scaled, pool), pool_targets(teachers(), pool), atol=1e-3)


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_temperature_divides_every_teacher(pool):
    torch.testing.assert_close(pool_targets(teachers(), pool, temperature=2.0), pool_targets(teachers() / 2.0, pool))


def test_the_loss_has_the_cards_value_and_gradient():
    z, p = number([[0.0, 0.0]]).requires_grad_(), number([[0.75, 0.25]])
    loss = soft_target_loss().loss(Output(z, z), Batch(z, p, number([1.0])), local_view(scalar(0.0)))
    assert loss.item() == pytest.approx(0.130812, abs=1e-6)
    assert torch.autograd.grad(loss, z)[0][0].tolist() == pytest.approx([-0.25, 0.25])


def test_padding_cannot_change_the_student_loss():
    z, p = number([[1.0, 0.0], [50.0, -9.0]]), number([[0.3, 0.7], [0.5, 0.5]])
    both = soft_target_loss().loss(Output(z, z), Batch(z, p, number([1.0, 0.0])), local_view(scalar(0.0)))
    assert both.item() == divergence(p[:1], z[:1])[0].item()


def test_a_hard_target_costs_the_cross_entropy():
    assert divergence(number([[1.0, 0.0]]), number([[0.0, 0.0]])).item() == pytest.approx(math.log(2))


def test_the_student_is_heated_like_the_targets():
    logits = teachers(1)
    targets = pool_targets(logits, temperature=3.0)
    assert divergence(targets, logits[0], 3.0).abs().max() < 1e-12


def test_agreement_is_the_share_of_teachers_who_name_the_pooled_class():
    logits = number([[[2.0, 0.0]], [[3.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    assert agreement(logits, pool_targets(logits)) == 0.75


def distilled(models, sizes=None, training=TRAINING, **options):
    uploads = uploads_of(models, sizes or [1.0] * len(models))
    this = round_of(models[0], uploads, model=linear_model(), unlabeled=blobs(9, 20).x)
    candidate, _ = average("uniform").apply(models[0], {}, this)
    student, state = distill(
        Student(training, options.get("temperature", 1.0)), pool=partial(pool_targets, **options)
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
    distill(Student(TRAINING), pool=partial(pool_targets, pool="probabilities")).apply(models[0], {}, this)
    torch.testing.assert_close(uploads.weights, before, rtol=0, atol=0)


def test_the_student_is_trained_as_asked_from_the_rounds_own_seed():
    _, _, this = distilled([linear(3, 4, seed=s) for s in range(2)])
    assert this.trainer.asked == [(TRAINING, seed_for(this.seed, "distill"))]


def test_missing_unlabeled_data_is_one_line_with_its_cure():
    model = linear(3, 4)
    with pytest.raises(FedstillError, match=r"needs unlabeled data.*data\.unlabeled"):
        distill(Student(TRAINING)).apply(model, {}, round_of(model, uploads_of([model], [1])))


def test_distillation_declares_what_it_looks_at():
    assert distill(Student(TRAINING)).needs == {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS}
