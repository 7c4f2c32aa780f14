"""What teachers say together: powers, hard labels and shares, with the numbers of the method cards."""

import dataclasses
import math

import pytest
import torch
from by_hand import number
from server_rounds import CLASSES, clients_models, network, points, server_round
from whole_server import whole

from fedstill.core.types import Need
from fedstill.methods import avglogit
from fedstill.server.distill.targets import (
    hard_belief,
    shares_by_accuracy,
    shares_without_worst,
    soft_belief,
    targets_of,
    teacher_shares,
)


def logits_of(probabilities):
    return number([[[math.log(p) for p in probabilities]]])


@pytest.mark.parametrize(
    ("before", "exponent", "after"),
    [
        ([0.8, 0.2], 0.75, [0.738796, 0.261204]),  # MrTF's code
        ([0.6, 0.4], 2.0, [0.692308, 0.307692]),  # FedBE, T = 0.5
        ([0.6, 0.4], 1.0, [0.6, 0.4]),
        ([0.5, 0.5], 7.0, [0.5, 0.5]),
    ],
)
@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_the_pooled_probabilities_are_raised_to_a_power_as_worked_by_hand(pool, before, exponent, after):
    assert soft_belief(pool, exponent=exponent)(logits_of(before))[0].tolist() == pytest.approx(after, abs=1e-6)


def test_hard_labels_are_kept_as_worked_by_hand():
    """Card 8: sample A [.8, .1, .1] and [.1, .85, .05], sample B [.4, .35, .25] and [.5, .3, .2], tau = .75."""
    said = number([[[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]], [[0.1, 0.85, 0.05], [0.5, 0.3, 0.2]]]).log()
    by_max, by_mean = hard_belief("max")(said), hard_belief("mean")(said)
    assert (by_max.probabilities.argmax(1).tolist(), by_max.kept.tolist()) == ([1, 0], [True, False])
    assert (by_mean.probabilities.argmax(1).tolist(), by_mean.kept.tolist()) == ([1, 0], [False, False])
    assert hard_belief("mean", threshold=0.46)(said).kept.tolist() == [True, False]


SHARES = [
    (shares_by_accuracy, [0.6, 0.2, 0.11], [0.75, 0.25, 0.0]),  # ten classes: below 0.12 is a guess
    (shares_by_accuracy, [0.6, 0.2, 0.12], [0.6 / 0.92, 0.2 / 0.92, 0.12 / 0.92]),
    (shares_by_accuracy, [0.1, 0.1], [0.5, 0.5]),  # nobody knows anything
    (shares_without_worst, [0.6, 0.2, 0.11], [0.5, 0.5, 0.0]),
    (shares_without_worst, [0.9, 0.5, 0.5, 0.5, 0.5, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2, 0.0]),  # .46 - 1.5 * .08 = .34
    (shares_without_worst, [0.9, 0.6, 0.4, 0.5], [0.25] * 4),  # .5 - 1.5 * .082 = .38
    (shares_without_worst, [0.3, 0.3, 0.3], [1 / 3] * 3),
    (shares_without_worst, [0.05], [1.0]),
]


@pytest.mark.parametrize(("judge", "accuracy", "shares"), SHARES)
def test_teachers_count_by_their_accuracy_as_worked_by_hand(judge, accuracy, shares):
    assert judge(number(accuracy), 10).tolist() == pytest.approx(shares)


def test_teachers_are_examined_on_the_validation_set():
    """Labels are what the first model says of 22 samples and the second of 18: each is right about its own."""
    first, second = clients_models(network(), 2)
    this = server_round([first, second], network())
    x, _ = points(40, "exam")
    known, other = (this.trainer.outputs(model, x).logits.argmax(1) for model in (first, second))
    y = torch.cat([known[:22], other[22:]])
    right = [(answer == y).double().mean().item() for answer in (known, other)]
    assert 1.2 / CLASSES < min(right) < max(right) < 1.0
    exam = dataclasses.replace(this, validation=(x, y))
    assert teacher_shares("validation").of(exam, {}).tolist() == pytest.approx([one / sum(right) for one in right])
    assert exam.metrics["teachers_kept"] == 2


def test_a_teacher_that_is_no_better_than_a_guess_is_dropped():
    first, second = clients_models(network(), 2)
    this = server_round([first, second], network())
    x, _ = points(40, "exam")
    known, other = (this.trainer.outputs(model, x).logits.argmax(1) for model in (first, second))
    differ = known != other
    exam = dataclasses.replace(this, validation=(x[differ], known[differ]))
    assert teacher_shares("drop_worst").of(exam, {}).tolist() == [1.0, 0.0]
    assert teacher_shares("validation").of(exam, {}).tolist() == [1.0, 0.0]
    assert exam.metrics["teachers_kept"] == 1


def test_teachers_that_count_alike_need_no_shares_and_sizes_need_no_exam():
    assert teacher_shares("uniform") is None
    assert teacher_shares("size").needs == frozenset()
    assert teacher_shares("validation").needs == teacher_shares("drop_worst").needs == {Need.VALIDATION}


def test_weighted_teachers_are_what_the_student_is_taught():
    models, sizes = clients_models(network(), 3), [5.0, 1.0, 2.0]
    this = server_round(models, network(), sizes=sizes)
    method = avglogit(steps=1, teacher_weighting="size")
    _, state = whole(method).apply(this.start, whole(method).init(this.start), this)
    said = [this.trainer.outputs(model, this.unlabeled).logits for model in models]
    mean = sum(share / 8.0 * logits for share, logits in zip(sizes, said, strict=True))
    torch.testing.assert_close(targets_of(state["distill"]).probabilities, torch.softmax(mean, 1))
