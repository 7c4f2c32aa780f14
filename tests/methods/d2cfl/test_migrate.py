"""D2C-FL's server step: whose answers count, what is mixed with what, and that nothing is computed twice."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import (
    DescentTrainer,
    blobs,
    linear,
    linear_model,
    number,
    round_of,
    scalar,
    scalar_model,
    train_client,
    uploads_of,
)
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Fitted
from fedstill.core.tree import stack
from fedstill.core.types import Need, Output, Training, Weights
from fedstill.local import cross_entropy
from fedstill.methods.d2cfl.migrate import (
    Migration,
    answer_of,
    append_answer,
    blend,
    migrate,
    pseudo_labels,
    share_of_average,
)
from fedstill.server import average, distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import hard_targets, maximum_rule, mean_rule

RULES = ("max", "mean")
either_rule = pytest.mark.parametrize("rule", RULES)


def collect(beliefs, rule, past=99):
    answers = {}
    for belief in beliefs:
        answers = append_answer(answers, answer_of(belief, rule), past)
    return answers


def labels_of(beliefs, rule, threshold):
    """[label, or None where it is not kept] of what teachers (T, M, K) said one after the other."""
    targets = pseudo_labels(collect(beliefs, rule), threshold, classes=beliefs.shape[-1])
    return [y if k else None for y, k in zip(targets.probabilities.argmax(1).tolist(), targets.kept, strict=True)]


TWO_TEACHERS = number([[[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]], [[0.1, 0.85, 0.05], [0.5, 0.3, 0.2]]])  # samples A, B


def test_the_surest_teacher_labels_a_and_nobody_b():
    targets = pseudo_labels(collect(TWO_TEACHERS, "max"), 0.75, classes=3)
    assert targets.kept.tolist() == [True, False]
    assert targets.probabilities.argmax(1).tolist() == [1, 0]
    assert targets.probabilities.max(1).values.tolist() == pytest.approx([0.85, 0.5])


def test_the_mean_of_both_teachers_is_sure_of_neither():
    targets = pseudo_labels(collect(TWO_TEACHERS, "mean"), 0.75, classes=3)
    assert targets.kept.tolist() == [False, False]
    assert targets.probabilities.argmax(1).tolist() == [1, 0]
    assert targets.probabilities.max(1).values.tolist() == pytest.approx([0.475, 0.45])


@st.composite
def teachers(draw, dtype=torch.float32):
    count, samples, classes = (draw(st.integers(1, n)) for n in (6, 5, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = draw(st.floats(0.0, 8.0)) * torch.randn(count, samples, classes, generator=generator)
    return torch.softmax(logits.to(dtype), -1)


@given(teachers(), st.floats(0.0, 1.1))
def test_what_the_mean_keeps_the_maximum_keeps(beliefs, threshold):
    kept = {rule: pseudo_labels(collect(beliefs, rule), threshold, classes=beliefs.shape[-1]).kept for rule in RULES}
    assert not bool((kept["mean"] & ~kept["max"]).any())


def test_ten_teachers_who_agree_are_no_surer_together_than_alone():
    """A mean of ten equal float32 numbers may round to more than each of them."""
    alone = torch.softmax(torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), -1)
    together = alone.expand(10, -1, -1)
    assert bool((together.mean(0) > alone).any())
    surest = mean_rule(together, 0.0).probabilities.max(1).values
    assert bool((surest <= alone.max(1).values).all())


@given(teachers(), st.floats(0.0, 1.0))
def test_another_teacher_never_lowers_what_the_maximum_keeps(beliefs, threshold):
    fewer, all_of_them = (maximum_rule(part, threshold).kept for part in (beliefs[: max(1, len(beliefs) - 1)], beliefs))
    assert not bool((fewer & ~all_of_them).any())


@given(teachers(), st.floats(0.0, 1.1))
def test_of_one_teacher_both_rules_say_the_same(beliefs, threshold):
    assert labels_of(beliefs[:1], "max", threshold) == labels_of(beliefs[:1], "mean", threshold)


@given(teachers(), st.floats(0.0, 1.1))
def test_answers_that_were_kept_say_what_the_whole_outputs_say(beliefs, threshold):
    for rule, whole in (("max", maximum_rule), ("mean", mean_rule)):
        found, wanted = (
            pseudo_labels(collect(beliefs, rule), threshold, classes=beliefs.shape[-1]),
            whole(beliefs, threshold),
        )
        assert torch.equal(found.probabilities, wanted.probabilities)
        assert torch.equal(found.kept, wanted.kept)


@either_rule
def test_threshold_zero_keeps_all_one_and_a_bit_none_and_the_threshold_itself_is_enough(rule):
    beliefs = torch.tensor([[[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]])
    assert None not in labels_of(beliefs, rule, 0.0)
    assert labels_of(beliefs, rule, 1.0 + 1e-6) == [None, None, None]
    assert labels_of(beliefs, rule, 0.75) == [0, None, 0]
    assert labels_of(torch.tensor([[[0.15, 0.85]]]), rule, 0.85) == [1]  # 0.85 is no float32


def test_ties_go_to_the_first_teacher_and_the_lowest_class():
    beliefs = number([[[0.2, 0.4, 0.4]], [[0.4, 0.2, 0.4]]])
    assert labels_of(beliefs, "max", 0.0) == [1]
    assert labels_of(beliefs.flip(0), "max", 0.0) == [0]
    assert labels_of(number([[[0.3, 0.35, 0.35]]]), "mean", 0.0) == [1]


@pytest.mark.parametrize("classes", [2, 3, 7, 10, 41, 100])
def test_a_label_stays_the_most_probable_class_of_an_even_guess(classes):
    even = torch.softmax(torch.zeros(classes, classes), -1)[:, 0]
    assert hard_targets(torch.arange(classes), even >= 0, classes, even).probabilities.argmax(1).tolist() == list(
        range(classes)
    )


@either_rule
def test_the_oldest_answer_leaves_first(rule):
    beliefs = torch.softmax(torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(1)), -1)
    for past in (1, 2, 5, 7, 9):
        kept, wanted = collect(beliefs, rule, past), collect(beliefs[-past:], rule)
        assert kept.keys() == wanted.keys()
        assert all(torch.equal(kept[name], leaf) for name, leaf in wanted.items())


STUDENT = Student(**vars(Training(epochs=3, lr=0.5)))


def printed(**options):
    """Algorithm 1 with the paper's values for the CNN on CIFAR-10."""
    paper = {"beta": 0.7, "threshold": 0.75, "rule": "max", "labels": "hard"}
    return Migration(**{**paper, "student_start": "carried", "student_share": "fixed", **options})


@dataclass
class Scripted:
    """Training always ends at w = 3; a model is sure of class 1 unless its weight is negative."""

    started: list = field(default_factory=list)
    passes: int = 0

    def fit(self, lesson, start, seed, **how):
        self.started.append(start.params["w"].item())
        return Fitted(scalar(3.0), {}, torch.tensor(0.0))

    def outputs(self, weights, x, **how):
        self.passes += 1
        sure = 9.0 if weights.params["w"].item() >= 0 else 0.0
        logits = number([[0.0, sure]]).expand(len(x), 2)
        return Output(logits, logits)


def scripted_rounds(averages, **options):
    """(teachers sent, students, trainer, rounds) when the average of each round is given and w_new is 0.5."""
    step, trainer = migrate(STUDENT, printed(past=1, **options)), Scripted()
    model = replace(scalar_model(), init=lambda seed: scalar(0.5))
    state, sent, students, seen = step.init(scalar(9.0)), [], [], []
    for r, w_g in enumerate(averages, 1):
        this = round_of(scalar(0.0), uploads_of([scalar(w_g)], [1]), model=model, unlabeled=torch.zeros(4, 1), number=r)
        this = replace(this, trainer=trainer)
        teacher, state = step.apply(scalar(w_g), state, this)
        sent.append(teacher.params["w"].item())
        students.append(state["student"].params["w"].item())
        seen.append(this)
    return sent, students, trainer, seen


@pytest.mark.parametrize(
    ("alpha", "beta", "teacher", "next_start"),
    [(0.2, 0.7, 2.6, 2.25), (0.0, 0.7, 3.0, 2.25), (1.0, 0.7, 1.0, 2.25), (0.2, 0.0, 2.6, 0.5), (0.2, 1.0, 2.6, 3.0)],
)
def test_teacher_and_student_roll_back_as_worked_by_hand(alpha, beta, teacher, next_start):
    sent, students, trainer, _ = scripted_rounds([1.0, 1.0, 1.0], mix_alpha=alpha, beta=beta)
    assert sent == pytest.approx([1.0, teacher, teacher])
    assert students == [1.0, 3.0, 3.0]
    assert trainer.started == pytest.approx([beta * 1.0 + (1 - beta) * 0.5, next_start])  # first from the average


def test_the_student_may_start_from_the_average_and_from_the_first_model():
    assert scripted_rounds([1.0, 2.0, 4.0], student_start="average")[2].started == pytest.approx(
        [0.7 * 2 + 0.3 * 0.5, 0.7 * 4 + 0.3 * 0.5]
    )
    assert scripted_rounds([1.0, 2.0, 4.0], rollback="fixed")[2].started == pytest.approx(
        [0.7 * 1 + 0.3 * 9, 0.7 * 3 + 0.3 * 9]
    )


def test_a_round_without_labels_is_fedavgs_and_the_student_starts_over_from_its_average():
    """The second teacher, 0.2 (-20) + 0.8 * 3, is below 0, hence sure of nothing."""
    sent, students, trainer, seen = scripted_rounds([1.0, -20.0, 5.0, 6.0])
    assert sent == pytest.approx([1.0, -1.6, 5.0, 0.2 * 6 + 0.8 * 3])
    assert students == [1.0, 3.0, 5.0, 3.0]
    assert trainer.started == pytest.approx([0.7 * 1 + 0.15, 0.7 * 5 + 0.15])
    assert [this.metrics["kept_share"] for this in seen] == [0.0, 1.0, 0.0, 1.0]
    assert ["student_loss" in this.metrics for this in seen] == [False, True, False, True]
    assert [sorted(this.models) for this in seen] == [[], *[["aggregated", "student"]] * 3]


@dataclass
class Names:
    """A model of weight w gives row i the logits `table[w][i]`; training ends at w = 3."""

    table: dict

    def fit(self, lesson, start, seed, **how):
        self.lesson = lesson
        return Fitted(scalar(3.0), {}, torch.tensor(0.0))

    def outputs(self, weights, x, **how):
        logits = number(self.table[round(weights.params["w"].item(), 6)])
        return Output(logits, logits)


def round_with(trainer, rows, w_g=1.0, r=2):
    this = round_of(scalar(0.0), uploads_of([scalar(w_g)], [1]), unlabeled=torch.zeros(rows, 1), number=r)
    return replace(this, trainer=trainer)


def test_the_student_s_share_as_worked_by_hand():
    """Four of ten rows have a label, and the average names three of these labels: c = 0.3, s = 0.8 c = 0.24."""
    named = [[0, 1], [1, 0], [1, 0], [0, 1], *[[0, 1]] * 6]
    labels = torch.tensor([1, 1, 0, 1, *[1] * 6])
    kept = torch.tensor([True] * 4 + [False] * 6)
    this = round_with(Names({1.0: named}), 10)
    targets = hard_targets(labels, kept, 2)
    assert share_of_average(scalar(1.0), targets, this, Migration(mix_alpha=0.2)) == pytest.approx(0.76)
    assert share_of_average(scalar(1.0), targets, this, Migration(mix_alpha=1.0)) == 1.0
    assert share_of_average(scalar(1.0), targets, this, printed(mix_alpha=0.2)) == 0.2


SURE, UNSURE = [0.0, 9.0], [0.0, 0.0]


@pytest.mark.parametrize(
    ("average_says", "sent"),
    [([9.0, 0.0], 1.0), (SURE, 1.0 + 0.8 * 3 / 100 * (3.0 - 1.0))],
    ids=["which it contradicts", "which it confirms"],
)
def test_three_labels_of_a_hundred_rows_cannot_take_over_the_model(average_says, sent):
    """The first teacher (w = 7) is sure of three rows. The average is 1 and the student 3; the paper sends 2.6."""
    some = [SURE] * 3 + [UNSURE] * 97
    found = {}
    for name, form in (("ours", Migration(past=1, threshold=0.75)), ("paper", printed(past=1))):
        trainer = Names({7.0: some, 3.0: some, 2.6: some, round(sent, 6): some, 1.0: [average_says] * 100})
        step = migrate(STUDENT, form)
        _, state = step.apply(scalar(7.0), step.init(scalar(9.0)), round_with(trainer, 100, 7.0, r=1))
        this = round_with(trainer, 100)
        teacher, state = step.apply(scalar(1.0), state, this)
        assert int(state["targets"]["kept"].sum()) == 3
        assert this.metrics["student_share"] == pytest.approx((teacher.params["w"].item() - 1.0) / 2.0)
        found[name] = teacher.params["w"].item()
    assert found == pytest.approx({"ours": sent, "paper": 2.6})


def test_soft_labels_are_the_whole_mean_of_the_teachers_and_hard_ones_its_class():
    answers = collect(TWO_TEACHERS, "mean")
    mean = [[0.45, 0.475, 0.075], [0.45, 0.325, 0.225]]  # of [.8, .1, .1] and [.1, .85, .05], and of sample B
    soft = pseudo_labels(answers, 0.46, classes=3, labels="soft")
    assert [row.tolist() for row in soft.probabilities] == [pytest.approx(row) for row in mean]
    assert soft.kept.tolist() == [True, False]
    trainer = Names({7.0: [SURE, UNSURE], 1.0: [SURE, UNSURE], 3.0: [SURE, UNSURE]})
    shown = {}
    for labels in ("soft", "hard"):
        step = migrate(STUDENT, Migration(past=1, labels=labels, student_share="fixed", mix_alpha=0.0))
        _, state = step.apply(scalar(7.0), step.init(scalar(9.0)), round_with(trainer, 2, 7.0, r=1))
        step.apply(scalar(1.0), state, round_with(trainer, 2))
        shown[labels] = trainer.lesson.y.tolist()
    sure = 1 / (1 + np.exp(-9.0))
    assert shown["soft"] == [pytest.approx([1 - sure, sure]), pytest.approx([0.5, 0.5])]
    assert shown["hard"] == [[0.0, 1.0], [1.0, 0.0]]


def test_a_teacher_answers_once():
    """One pass for each round's teacher and one for the loss of each student, whatever the number of teachers."""
    for past in (1, 3):
        step = migrate(STUDENT, printed(past=past))
        trainer, state = Scripted(), step.init(scalar(0.0))
        for r in range(1, 8):
            this = round_of(scalar(0.0), uploads_of([scalar(1.0)], [1]), unlabeled=torch.zeros(4, 1), number=r)
            _, state = step.apply(scalar(1.0), state, replace(this, trainer=trainer))
        assert trainer.passes == 7 + (7 - past)


def test_statistics_are_mixed_like_weights_and_counts_are_those_of_the_average():
    def normed(value, count):
        return Weights(
            {"w": number(value)}, {"running_mean": number(value), "num_batches_tracked": torch.tensor(count)}
        )

    a, b, average_model = normed(1.0, 3), normed(3.0, 8), normed(0.0, 5)
    for share, expected in ((0.2, 2.6), (0.0, 3.0), (1.0, 1.0)):
        mixed = blend(a, b, share, counts=average_model)
        assert mixed.params["w"].item() == pytest.approx(expected)
        assert mixed.buffers["running_mean"].item() == pytest.approx(expected)
        assert mixed.buffers["num_batches_tracked"].item() == 5


def test_only_unlabeled_data_are_needed_so_secure_aggregation_is_possible():
    assert migrate(STUDENT, Migration()).needs == {Need.UNLABELED, Need.ONE_ARCHITECTURE}


class EpochDescent(DescentTrainer):
    """Full-batch descent, a step an epoch."""

    def fit(self, lesson, start, seed, **how):
        training = replace(lesson.training, steps=lesson.training.epochs)
        return super().fit(lesson._replace(training=training), start, seed, **how)


DATA = [blobs(client, 12) for client in range(3)]
UNLABELED = blobs(9, 25).x
CLASSES, FEATURES = 3, 4


def random_model():
    return replace(linear_model(), init=lambda seed: linear(CLASSES, FEATURES, seed=seed % 1000))


def local_round(weights):
    """The cohort's models after three steps of gradient descent."""
    how = {"received": {}, "state": {}, "steps": 3, "lr": 0.4}
    return [train_client(cross_entropy(), random_model(), weights, batch, **how)[0] for batch in DATA]


def our_rounds(rounds, **options):
    step, model = migrate(STUDENT, printed(**options)), random_model()
    weights = linear(CLASSES, FEATURES, seed=3)
    state, history = step.init(weights), []
    for r in range(1, rounds + 1):
        uploads = uploads_of(local_round(weights), [1.0] * len(DATA))
        this = replace(
            round_of(weights, uploads, model=model, unlabeled=UNLABELED, number=r), trainer=EpochDescent(model)
        )
        w_g, _ = average().apply(weights, {}, this)
        weights, state = step.apply(w_g, state, this)
        history.append((weights, state, this))
    return history


def as_array(weights):
    return np.concatenate([weights.params["weight"].numpy(), weights.params["bias"].numpy()[:, None]], 1)


def from_array(table):
    table = torch.from_numpy(np.array(table))
    return Weights({"weight": table[:, :-1].contiguous(), "bias": table[:, -1].contiguous()}, {})


def softmax_of(table, x):
    scores = x @ table[:, :-1].T + table[:, -1]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def naive_rounds(rounds, *, mix_alpha, beta, past, threshold, rule):
    """Algorithm 1 as it is printed, in numpy: every teacher is kept, and asked anew in every round."""
    x = UNLABELED.numpy()
    w_new = as_array(random_model().init(seed_for(7, "rollback")))
    sent, students, teachers = as_array(linear(CLASSES, FEATURES, seed=3)), None, []
    for r in range(1, rounds + 1):
        w_g = np.mean([as_array(one) for one in local_round(from_array(sent))], 0)
        kept, labels = [], []
        for i in range(len(x)) if r > past else ():
            beliefs = np.array([softmax_of(teacher, x[i : i + 1])[0] for teacher in teachers[-past:]])
            belief = beliefs[beliefs.max(1).argmax()] if rule == "max" else beliefs.mean(0)
            if belief.max() >= threshold:
                kept.append(i)
                labels.append(int(belief.argmax()))
        if not kept:
            student = teacher = w_g
        else:
            student = students
            for _ in range(STUDENT.training.epochs):
                error = (softmax_of(student, x[kept]) - np.eye(CLASSES)[labels]) / len(kept)
                gradient = error.T @ np.concatenate([x[kept], np.ones((len(kept), 1))], 1)
                student = student - STUDENT.training.lr * gradient
            teacher = mix_alpha * w_g + (1 - mix_alpha) * student
        students = beta * student + (1 - beta) * w_new
        teachers.append(teacher)
        sent = teacher
        yield teacher, student, kept, labels


@either_rule
@pytest.mark.parametrize("past", [1, 3])
def test_the_algorithm_as_printed_gives_the_same_models_labels_and_ensemble(rule, past):
    options = {"mix_alpha": 0.2, "beta": 0.7, "past": past, "threshold": 0.6, "rule": rule}
    all_teachers, counts = [], []
    for r, ((weights, state, this), (teacher, student, kept, labels)) in enumerate(
        zip(our_rounds(8, **options), naive_rounds(8, **options), strict=True), 1
    ):
        np.testing.assert_allclose(as_array(weights), teacher, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(as_array(state["student"]), student, rtol=1e-9, atol=1e-9)
        assert state["targets"]["kept"].nonzero().flatten().tolist() == kept
        assert state["targets"]["probabilities"].argmax(1)[kept].tolist() == labels
        assert this.metrics["kept_share"] == len(kept) / len(UNLABELED)
        counts.append(len(kept))
        all_teachers.append(teacher)  # the ensemble is that of rounds r - T + 1 .. r
        wanted = [softmax_of(one, UNLABELED.numpy()) for one in all_teachers[max(0, r - past) :]]
        answers = state["past_probabilities" if rule == "mean" else "past_labels"]
        found = answers["probabilities"] if rule == "mean" else answers["sure"]
        np.testing.assert_allclose(found, wanted if rule == "mean" else np.max(wanted, 2), rtol=1e-9)
        if rule == "max":
            assert answers["label"].tolist() == np.argmax(wanted, 2).tolist()
    assert counts[:past] == [0] * past
    assert all(count > 0 for count in counts[past:])
    assert any(count < len(UNLABELED) for count in counts[past:])


@either_rule
def test_the_loss_told_is_the_cross_entropy_of_the_student_on_the_kept_labels(rule):
    _, state, this = our_rounds(4, past=2, threshold=0.6, rule=rule)[-1]
    targets, student = state["targets"], state["student"]
    x, y = UNLABELED[targets["kept"]], targets["probabilities"].argmax(1)[targets["kept"]]
    wanted = F.cross_entropy(x @ student.params["weight"].T + student.params["bias"], y)
    assert this.metrics["student_loss"] == pytest.approx(wanted.item())
    assert this.models["student"] is student


def test_without_rollbacks_it_is_hard_label_distillation_of_those_teachers():
    """FedDF of this paper: alpha = 0, the student starts from the average, no rollback; only who teaches differs."""
    ours = our_rounds(5, mix_alpha=0.0, beta=1.0, past=2, threshold=0.6, student_start="average")
    for r in (2, 3, 4):
        weights, _, this = ours[r]
        teachers = stack([ours[r - 2][0], ours[r - 1][0]])
        plain = distill(
            STUDENT,
            teachers=lambda candidate, round, teachers=teachers: teachers,
            pool=lambda logits: maximum_rule(torch.softmax(logits, -1), 0.6),
            hard=True,
        )
        found, _ = plain.apply(this.models["aggregated"], {}, this)
        assert all(torch.equal(found.params[name], leaf) for name, leaf in weights.params.items())
        assert not torch.equal(found.params["weight"], this.models["aggregated"].params["weight"])
