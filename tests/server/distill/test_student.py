import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from by_hand import blobs, linear, linear_model, local_view, number, round_of, scalar, uploads_of
from papers import released

from fedstill.core.errors import FedstillError
from fedstill.core.trainer import Fitted
from fedstill.core.types import Batch, Output, Targets, Training, Weights
from fedstill.server.distill.student import Snapshots, Student, divergence, learner, shown, soft_target_loss
from fedstill.server.distill.targets import entropy, pool_targets

TRAINING = Training(steps=6, lr=0.3)


def loss_and_pull(objective, z, p, weight=None):
    z = number(z).requires_grad_()
    batch = Batch(z, number(p), number(weight or [1.0] * len(p)))
    loss = objective.loss(Output(z, z), batch, local_view(scalar(0.0)))
    return loss.item(), torch.autograd.grad(loss, z)[0]


def test_the_loss_has_the_cards_value_and_gradient():
    loss, pull = loss_and_pull(soft_target_loss(), [[0.0, 0.0]], [[0.75, 0.25]])
    assert loss == pytest.approx(0.130812, abs=1e-6)
    assert pull[0].tolist() == pytest.approx([-0.25, 0.25])
    cross_entropy, of_target = math.log(2), entropy(number([0.75, 0.25])).item()
    assert (cross_entropy, of_target) == (pytest.approx(0.693147, abs=1e-6), pytest.approx(0.562335, abs=1e-6))
    assert loss == pytest.approx(cross_entropy - of_target)


def test_the_mean_over_classes_too_is_one_kth_of_it():
    z, p = [[1.0, 0.0, -2.0], [0.3, 0.1, 0.0]], [[0.2, 0.5, 0.3], [0.9, 0.1, 0.0]]
    whole, pull = loss_and_pull(soft_target_loss(2.0), z, p)
    part, small_pull = loss_and_pull(released("fedbe", "class_mean_loss")(2.0), z, p)
    assert part == pytest.approx(whole / 3)
    torch.testing.assert_close(small_pull, pull / 3)


def test_padding_cannot_change_the_student_loss():
    z, p = [[1.0, 0.0], [50.0, -9.0]], [[0.3, 0.7], [0.5, 0.5]]
    both, pull = loss_and_pull(soft_target_loss(), z, p, [1.0, 0.0])
    assert both == divergence(number(p[:1]), number(z[:1]))[0].item()
    assert pull[1].tolist() == [0.0, 0.0]


def test_a_hard_target_costs_the_cross_entropy():
    assert divergence(number([[1.0, 0.0]]), number([[0.0, 0.0]])).item() == pytest.approx(math.log(2))


def test_the_student_is_heated_like_the_targets():
    logits = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert divergence(pool_targets(logits, temperature=3.0), logits[0], 3.0).abs().max() < 1e-12


def some_targets(kept=None, samples=20, seed=0) -> Targets:
    logits = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[list(range(samples)) if kept is None else kept] = True
    return Targets(torch.softmax(2 * logits, 1), mask)


def this_round(samples=20, **changes):
    model = linear(3, 4, seed=1)
    this = round_of(model, uploads_of([model], [1]), model=linear_model(), unlabeled=blobs(9, samples).x)
    return model, replace(this, **changes)


def test_a_hard_lesson_is_the_most_probable_class_alone():
    targets = Targets(number([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]), torch.ones(2, dtype=torch.bool))
    assert shown(targets, hard=True).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert shown(targets, hard=False) is targets.probabilities


@pytest.mark.parametrize("hard", [False, True])
def test_the_student_learns_the_rows_that_are_kept_and_no_others(hard):
    kept = [0, 3, 4, 11, 19]
    candidate, round = this_round()
    targets = some_targets(kept)
    learnt = learner(Student(**vars(TRAINING)), hard=hard)(candidate, targets, round)
    _, only = this_round(unlabeled=round.unlabeled[kept])
    cut = Targets(targets.probabilities[kept], targets.kept[kept])
    alone = learner(Student(**vars(TRAINING)), hard=hard)(candidate, cut, only)
    torch.testing.assert_close(learnt.params, alone.params)
    with_all = learner(Student(**vars(TRAINING)), hard=hard)(candidate, some_targets(), round)
    assert not torch.allclose(learnt.params["weight"], with_all.params["weight"])


@pytest.mark.parametrize(
    ("training", "kept"),
    [(Training(steps=0), None), (Training(epochs=0), None), (TRAINING, [])],
    ids=["no steps", "no epochs", "nothing kept"],
)
def test_without_a_step_or_a_row_the_candidate_stays_and_nobody_is_asked(training, kept):
    candidate, round = this_round()
    student = Student(**vars(replace(training, lr_cycle=1)), reestimate=True, average_after=0)
    assert learner(student)(candidate, some_targets(kept), round) is candidate
    assert round.trainer.asked == []


def test_steps_count_before_epochs():
    assert not Student(**vars(Training(steps=3, epochs=0))).idle
    assert Student(**vars(Training(steps=0, epochs=3))).idle


@dataclass
class ScriptedTrainer:
    """Every step adds 1 to the one weight, in place; `scores` says how many of 10 validation samples it then gets."""

    scores: dict = field(default_factory=dict)
    steps_done: int = 0
    looked: list = field(default_factory=list)

    def fit(self, lesson, start, seed, *, optimizer=None, watch=None):
        now = Weights({"w": start.params["w"].clone()}, {"count": torch.tensor(0)})
        for done in range(1, lesson.training.steps + 1):
            now.params["w"] += 1
            now.buffers["count"] += 1
            self.steps_done = done
            if watch is not None and watch(done, now):
                break
        return Fitted(now, {}, torch.tensor(0.0))

    def outputs(self, weights, x, stacked=False, *, features=True, batch=None, seed=0):
        self.looked.append(int(weights.params["w"]))
        right = self.scores.get(self.looked[-1], 0)
        logits = torch.tensor([[0.0, 1.0]] * right + [[1.0, 0.0]] * (10 - right))
        return Output(logits, logits)

    def batch_statistics(self, weights, x, batch=128):
        return {"seen": torch.tensor(len(x)), "by": weights.params["w"].clone()}


def scripted(student: Student, scores=None, validation=True):
    trainer = ScriptedTrainer(scores or {})
    labels = torch.zeros(10, 1), torch.ones(10, dtype=torch.int64)
    _, round = this_round(trainer=trainer, validation=labels if validation else None)
    learnt = learner(student)(scalar(0.0), some_targets(), round)
    return learnt, trainer, round


def test_the_average_of_snapshots_is_their_mean_and_without_one_the_last_iterate():
    assert float(scripted(Student(**vars(Training(steps=3, lr_cycle=1)), average_after=0))[0].params["w"]) == 2.0
    assert float(scripted(Student(**vars(Training(steps=3, lr_cycle=1)), average_after=1))[0].params["w"]) == 2.5
    assert float(scripted(Student(**vars(Training(steps=3, lr_cycle=1)), average_after=3))[0].params["w"]) == 3.0
    assert float(scripted(Student(**vars(Training(steps=3, lr_cycle=5)), average_after=0))[0].params["w"]) == 3.0


def test_fedbes_schedule_takes_43_snapshots():
    """After step 500 of 1580, every 25 steps: 525, 550, ..., 1575, whose mean is 1050."""
    learnt, _, _ = scripted(Student(**vars(Training(steps=1580, lr_cycle=25)), average_after=500))
    assert float(learnt.params["w"]) == pytest.approx(1050.0)
    assert int(learnt.buffers["count"]) == 1575  # counters are not averaged
    snapshots = Snapshots(500, 25)
    for done in range(25, 1581, 25):
        snapshots.see(done, scalar(float(done)))
    assert snapshots.count == 43


def test_training_ends_when_the_best_model_is_as_old_as_the_patience_allows():
    """Best at step 300, patience 1000, a look every 100 steps: it stops at step 1300 and goes back to step 300."""
    scores = {100: 4, 200: 6, 300: 8, 400: 8, 900: 7}
    learnt, trainer, round = scripted(Student(**vars(Training(steps=10_000)), patience=1000, look_every=100), scores)
    assert trainer.steps_done == 1300
    assert trainer.looked == list(range(100, 1301, 100))
    assert float(learnt.params["w"]) == 300.0
    assert int(learnt.buffers["count"]) == 300
    assert round.metrics == {"distill_steps_kept": 300.0, "validation_accuracy": 0.8}


def test_a_new_best_model_starts_the_patience_anew():
    scores = {100: 1, 1000: 2, 1900: 3}
    learnt, trainer, _ = scripted(Student(**vars(Training(steps=10_000)), patience=1000, look_every=100), scores)
    assert trainer.steps_done == 2900
    assert float(learnt.params["w"]) == 1900.0


def test_a_student_that_never_gets_worse_uses_all_its_steps():
    learnt, trainer, _ = scripted(
        Student(**vars(Training(steps=7)), patience=2, look_every=1), {n: n for n in range(8)}
    )
    assert (trainer.steps_done, float(learnt.params["w"])) == (7, 7.0)


def test_fewer_steps_than_the_first_look_keep_the_last_model():
    learnt, trainer, round = scripted(Student(**vars(Training(steps=60)), patience=1000, look_every=100))
    assert float(learnt.params["w"]) == 60.0
    assert trainer.looked == []
    assert round.metrics == {}


def test_without_a_validation_set_nothing_stops_early():
    student = Student(**vars(Training(steps=400)), patience=100, look_every=100)
    assert float(scripted(student, validation=False)[0].params["w"]) == 400.0


def test_statistics_are_taken_anew_for_the_model_that_is_kept_over_all_unlabeled_data():
    student = Student(**vars(Training(steps=4, lr_cycle=1)), average_after=0, reestimate=True)
    learnt, _, round = scripted(student)
    assert float(learnt.params["w"]) == 2.5
    assert int(learnt.buffers["seen"]) == len(round.unlabeled)
    assert float(learnt.buffers["by"]) == 2.5


def test_a_training_in_the_place_of_a_student_is_told():
    with pytest.raises(FedstillError, match=r"student is a Training: give a Student, e.g. Student\(steps=500\)"):
        learner(TRAINING)


def test_a_value_outside_its_limits_is_told_as_the_students_and_not_as_the_clients():
    with pytest.raises(FedstillError, match=r"method.student.lr = -1.0: input should be greater than 0"):
        learner(Student(lr=-1.0))
