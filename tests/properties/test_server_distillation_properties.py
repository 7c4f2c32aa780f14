"""What must hold of every server that distils: AvgLogit, AvgProb, FedDF in all its forms, FedBE."""

import math

import pytest
import students
import torch
from server_rounds import CLASSES, clients_models, federation, network, run, served, server_round
from students import form, student_of
from torch import nn
from toy import furthest, same_bits
from weighed import weighed

from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone
from fedstill.core.types import Dataset, Training, Weights
from fedstill.local.terms import cross_entropy
from fedstill.methods import avglogit, avgprob, fedavg, fedbe, feddf, fedlmd, scaffold
from fedstill.methods.lookup import build_method
from fedstill.models import from_module

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr_schedule": "constant", "reestimate": False, "sharpen": 1.0}
FORMS = [place for place in students.FORMS if place[0] in ("feddf", "fedbe")]
every_form = pytest.mark.parametrize(("name", "preset"), FORMS)

EXACT, ADAM = 1e-12, 3e-3  # Adam makes steps of up to its rate, 1e-3, out of rounding: it swings, it does not walk
AT_REST = {
    "avglogit": (avglogit(student=student_of(avglogit, steps=20)), ADAM),
    "avgprob": (avgprob(student=student_of(avgprob, steps=20, temperature=3.0)), ADAM),
    "feddf": (feddf(student=student_of(feddf, steps=20)), ADAM),
    "feddf, sgd": (feddf(student=student_of(feddf, steps=20, optimizer="sgd", lr=0.5)), EXACT),
    "feddf by epochs": (
        feddf(student=student_of(feddf, epochs=3, temperature=2.0, batch_size=8, optimizer="sgd", lr=0.5)),
        EXACT,
    ),
    "feddf by validation": (
        feddf(student=student_of(feddf, steps=20, optimizer="sgd"), teacher_weighting="validation"),
        EXACT,
    ),
    "fedbe": (form("fedbe", steps=20, lr=0.5, **PLAIN), EXACT),
    "fedbe, dirichlet": (form("fedbe", steps=20, lr=0.5, sampling="dirichlet", **PLAIN), EXACT),
    "fedbe, averaged": (form("fedbe", steps=20, lr=0.5, average_after=5, lr_cycle=5, **PLAIN), EXACT),
}
every_form_at_rest = pytest.mark.parametrize("form", AT_REST)


def round_of_models(models, net="mlp", **how):
    return server_round(models, network(net), validation=federation().validation, **how)


@every_form_at_rest
def test_identical_teachers_leave_the_student_where_it_is(form):
    (model,) = clients_models(network(), 1)
    this = round_of_models([model] * 3)
    method, swing = AT_REST[form]
    assert furthest(served(method, this), model) < swing
    assert this.metrics["distill_loss_before"] < 1e-10
    assert this.metrics["distill_loss_after"] < max(swing**2, 1e-10)
    assert this.metrics["teacher_agreement"] == 1.0


@every_form_at_rest
def test_one_client_without_batchnorm_comes_back_as_it_is(form):
    (model,) = clients_models(network(), 1)
    method, swing = AT_REST[form]
    assert furthest(served(method, round_of_models([model], sizes=[17.0])), model) < swing


@every_form_at_rest
def test_unlike_teachers_move_the_student(form):
    this = round_of_models(clients_models(network(), 3))
    method, swing = AT_REST[form]
    assert furthest(served(method, this), served(fedavg(), this)) > 1.5 * swing


def test_one_client_with_batchnorm_moves_since_the_student_normalises_by_the_batch():
    (model,) = clients_models(network("norm"), 1)
    moved = served(
        feddf(student=student_of(feddf, steps=20, optimizer="sgd", lr=0.5)), round_of_models([model], "norm")
    )
    assert furthest(moved.params, model.params) > 1e-3


def test_sharpened_targets_move_even_a_student_of_identical_teachers():
    (model,) = clients_models(network(), 1)
    assert (
        furthest(served(fedbe(student=student_of(fedbe, steps=20, lr=0.1)), round_of_models([model] * 3)), model) > 1e-3
    )


HEADS = {
    "avglogit": (avglogit(student=student_of(avglogit, steps=30)), ADAM),
    "feddf": (feddf(student=student_of(feddf, steps=30)), ADAM),
    "feddf, sgd": (feddf(student=student_of(feddf, steps=30, optimizer="sgd", lr=0.5)), EXACT),
}


@pytest.mark.parametrize("form", HEADS)
def test_heads_on_one_body_average_to_what_they_say_together(form):
    """Models that differ in their last affine layer only: head-only FedDF is head-only FedAvg."""
    this = round_of_models(clients_models(network(), 4, only="head."))
    method, swing = HEADS[form]
    assert furthest(served(method, this), served(weighed(fedavg(), "uniform"), this)) < swing
    assert this.metrics["distill_loss_before"] < 1e-10
    assert this.metrics["distill_loss_after"] < max(swing**2, 1e-10)


def test_heads_on_one_body_do_not_average_to_the_mean_of_their_probabilities():
    this = round_of_models(clients_models(network(), 4, only="head."))
    served(avgprob(student=student_of(avgprob, steps=1)), this)
    assert this.metrics["distill_loss_before"] > 1e-4


def test_bodies_that_differ_do_not_average_to_the_mean_of_their_logits():
    this = round_of_models(clients_models(network(), 4))
    served(avglogit(student=student_of(avglogit, steps=1)), this)
    assert this.metrics["distill_loss_before"] > 1e-4


@every_form
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_teachers_are_the_same_after_they_have_taught(name, preset, net):
    this = round_of_models(clients_models(network(net), 3), net, number=11)
    uploads, sent = clone(this.uploads.weights), clone(this.start)
    short = {"steps": 9} | ({"augment": []} if name == "feddf" else {})  # these are no images
    student = served(form(name, preset, batch_size=8, **short), this)
    assert same_bits(this.uploads.weights, uploads)
    assert same_bits(this.start, sent)
    assert all(bool(leaf.isfinite().all()) for leaf in student.params.values())


class TwoLogits(nn.Module):
    """weight x + bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, x):
        return self.head(x)


def biased(lead: float) -> Weights:
    """Class 1 is ahead of class 0 by `lead` - x."""
    weight, bias = torch.tensor([[0.5], [-0.5]]).double(), torch.tensor([-lead / 2, lead / 2]).double()
    return Weights({"head.weight": weight, "head.bias": bias}, {})


RATE, LEADS = 0.02, (12.0, -4.0)


def leads_by_hand(steps: int) -> list[float]:
    """The student's lead after each step of gradient descent from the mean lead towards the mean probability."""
    target = sum(1.0 / (1.0 + math.exp(-lead)) for lead in LEADS) / 2
    lead, path = sum(LEADS) / 2, []
    for _ in range(steps):
        lead += 2 * RATE * (target - 1.0 / (1.0 + math.exp(-lead)))
        path.append(lead)
    return path


def early_stopping(**options):
    """-> (the student's lead, the round). Unlabeled data are 0, so that only the bias learns and the lead falls.

    The first validation sample is of class 0 and right as soon as the lead is below its x: after the second look and
    before the third. The other one is right all the time.
    """
    path = leads_by_hand(300)
    x, y = torch.tensor([[(path[199] + path[299]) / 2], [-50.0]]), torch.tensor([0, 1])
    this = server_round(
        [biased(lead) for lead in LEADS],
        from_module(TwoLogits, input_shape=(1,), classes=2, check=False),
        unlabeled=torch.zeros(6, 1),
        validation=(x, y),
        train=Dataset("toy", x, y, ("a", "b")),
    )
    plain = {"optimizer": "sgd", "lr": RATE, "lr_schedule": "constant", "clip": None, "pool": "probabilities"}
    bias = served(form("feddf", **plain, **options), this).params["head.bias"]
    return float(bias[1] - bias[0]), this


def test_training_stops_a_thousand_steps_after_the_best_model_and_returns_it():
    lead, this = early_stopping(steps=10_000, patience=1000, look_every=100)
    assert this.metrics["distill_steps_kept"] == 300
    assert this.trainer.looks == list(range(100, 1301, 100))
    assert this.metrics["validation_accuracy"] == 1.0
    assert lead == pytest.approx(leads_by_hand(300)[-1], abs=1e-9)


def test_training_that_ends_before_the_first_look_returns_the_last_model():
    lead, this = early_stopping(steps=60, patience=1000, look_every=100)
    assert this.trainer.looks == []
    assert lead == pytest.approx(leads_by_hand(60)[-1], abs=1e-9)


def test_without_patience_nobody_looks_and_the_last_model_counts():
    lead, this = early_stopping(steps=500)
    assert this.trainer.looks == []
    assert lead == pytest.approx(leads_by_hand(500)[-1], abs=1e-9)


def test_fedbe_without_its_own_ideas_is_avgprob_bit_for_bit():
    """No samples, no average among the teachers, no snapshots, no sharpening, the usual scale of the loss."""
    bare = {**PLAIN, "samples": 0, "with_average": False, "average_after": None, "optimizer": "adam"}
    how = {"steps": 7, "batch_size": 8, "lr": 0.01}
    wanted = run(form("avgprob", **how)).weights
    assert same_bits(run(form("fedbe", **how, **bare)).weights, wanted)
    own = {"samples": 2}, {"with_average": True}, {"average_after": 0, "lr_cycle": 2}, {"sharpen": 0.5}
    for idea in own:
        assert not same_bits(run(form("fedbe", **{**how, **bare, **idea})).weights, wanted), idea


def test_avglogit_and_avgprob_are_feddf_without_its_schedule_and_clipping_bit_for_bit():
    how = {"steps": 7, "batch_size": 8, "lr": 0.01, "temperature": 2.0}
    for method, pool in (("avglogit", "logits"), ("avgprob", "probabilities")):
        same = {"pool": pool, "lr_schedule": "constant", "clip": None}
        assert same_bits(run(form(method, **how)).weights, run(weighed(form("feddf", **how, **same), "size")).weights)


@pytest.mark.parametrize(("rule", "threshold"), [("max", 0.45), ("mean", 0.37)])
def test_hard_label_feddf_is_d2c_fls_student_that_starts_at_the_average_and_is_not_mixed(rule, threshold):
    """alpha = 0, student from w_g, no rollback, teachers = clients; labels and training written out here."""
    models = clients_models(network(), 3)
    this = round_of_models(models, sizes=[3.0, 1.0, 2.0], number=11)
    how = {"rule": rule, "threshold": threshold, "batch_size": 8, "lr": 0.01}
    found = served(form("feddf", "d2cfl", **how), this)

    said = torch.stack([torch.softmax(this.trainer.outputs(model, this.unlabeled).logits, 1) for model in models])
    pairs = said.permute(1, 0, 2).flatten(1)  # (M, T K): teacher and class, the surest pair wins
    sure, label = said.mean(0).max(1) if rule == "mean" else pairs.max(1)
    kept = (sure >= threshold).nonzero().flatten()
    assert 3 < len(kept) < len(this.unlabeled)
    training = Training(epochs=5, batch_size=8, optimizer="adam", lr=0.01, lr_epoch_decay=0.95)
    average, seed = served(fedavg(), this), seed_for(this.seed, "distill")
    student = this.trainer.fit(
        Lesson(cross_entropy(), this.unlabeled, label % CLASSES, training, kept), average, seed
    ).weights
    assert furthest(found, student) < 1e-9
    assert furthest(found, average) > 1e-2


def test_no_label_that_is_sure_enough_leaves_fedavg_bit_for_bit():
    for name in ("feddf", "fedbe"):
        result = run(form(name, "d2cfl", warm_up=0, threshold=1.01))
        assert same_bits(result.weights, run(fedavg()).weights)
        assert [row["pseudo_labels"] for row in result.history.rows] == [0, 0, 0]


JOINED = [
    ("feddf(student.steps=5, student.batch_size=8)", fedlmd),
    ('feddf(labels="hard", threshold=0.5, student.epochs=5)+average', fedlmd),
    ("avgprob(student.steps=5, student.batch_size=8)", fedlmd),
    ("fedbe(student.epochs=3, student.batch_size=8, student.lr=0.1)+average(weighting='uniform')", scaffold),
]


@pytest.mark.parametrize(("server", "clients"), JOINED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_server_distils_whatever_the_clients_minimise(server, clients):
    both = run(build_method(f"{server}+{clients.__name__}"))
    assert not same_bits(both.weights, run(build_method(server)).weights)
    assert not same_bits(both.weights, run(clients()).weights)
    assert both.history.rows[0]["server/teacher_agreement"] > 0
    assert all(bool(leaf.isfinite().all()) for leaf in both.weights.params.values())
