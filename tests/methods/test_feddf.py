"""FedDF and FedBE in the forms of their papers, their code and the papers that compared with them.

Numbers are those of the method cards (server.md): section 0.2, cards 3-5 and 8, the table of FedDF in the seeds."""

import dataclasses
import math

import pytest
import students
import torch
from by_hand import blobs, federate_by_hand, linear, linear_model, number, round_of, uploads_of
from server_rounds import CLASSES, clients_models, federation, network, points, run, served, server_round
from students import form, student_of
from torch import nn
from toy import furthest, same_bits
from weighed import weighed
from whole_server import watched, whole

from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone
from fedstill.core.types import Dataset, Need, Training, Weights
from fedstill.engine.plan import make_plan
from fedstill.local.terms import cross_entropy
from fedstill.methods import avglogit, avgprob, fedavg, fedbe, feddf, fedlmd, scaffold
from fedstill.methods.lookup import build_method
from fedstill.models import build_model, from_module
from fedstill.server.distill.targets import targets_of

FORMS = [place for place in students.FORMS if place[0] in ("feddf", "fedbe")]
MANY = 10_000  # unlabeled samples, as in FedBE's experiments


def asked(method, *, net="mlp", number=11, **how):
    """What the student was trained with in one round of untrained clients."""
    this = server_round(clients_models(network(net), 2), network(net), number=number, **how)
    served(method, this)
    (training,) = this.trainer.trainings
    return training


class Refused(Exception):
    pass


def asked_at_once(method, *, samples=20):
    """The same without training: for forms of thousands of steps, and of images that these are not."""
    this = server_round(
        clients_models(network(), 2), network(), number=11, unlabeled=points(samples, "many")[0],
        validation=federation().validation,
    )  # fmt: skip
    seen = []

    def fit(lesson, start, seed, **how):
        seen.append(lesson.training)
        raise Refused

    this.trainer.fit = fit
    with pytest.raises(Refused):
        served(method, this)
    return seen[0]


ADAM = {"optimizer": "adam", "momentum": 0.0, "weight_decay": 0.0, "clip": None, "lr_epoch_decay": 1.0, "augment": ()}
PUBLISHED = {
    ("feddf", "correct"): {**ADAM, "lr": 1e-3, "lr_schedule": "cosine", "steps": 500, "batch_size": 128, "clip": 5.0},
    ("feddf", "paper"): {**ADAM, "lr": 1e-3, "lr_schedule": "cosine", "steps": 10_000, "batch_size": 128, "clip": 5.0},
    ("feddf", "released"): {
        **ADAM, "lr": 1e-3, "lr_schedule": "cosine", "steps": 10_000, "batch_size": 64, "clip": 5.0,
        "augment": ("crop", "flip"),
    },
    ("feddf", "mrtf"): {**ADAM, "lr": 3e-4, "lr_schedule": "constant", "steps": 500},
    ("feddf", "mrtf_released"): {
        **ADAM, "lr": 1e-3, "lr_schedule": "cosine", "steps": 500, "batch_size": 64, "clip": 100.0,
        "weight_decay": 1e-6,
    },
    ("feddf", "fedaux"): {**ADAM, "lr": 5e-5, "lr_schedule": "constant", "steps": None, "epochs": 1, "batch_size": 128},
    ("feddf", "fedaux_released"): {
        **ADAM, "lr": 5e-5, "lr_schedule": "constant", "steps": None, "epochs": 1, "keep_optimizer": True,
    },
    ("feddf", "d2cfl"): {
        **ADAM, "lr": 1e-3, "lr_schedule": "constant", "lr_epoch_decay": 0.95, "steps": None, "epochs": 5,
        "batch_size": 128,
    },
    ("fedbe", "correct"): {
        "optimizer": "sgd", "lr": 1e-3, "lr_schedule": "cyclic", "lr_low": 4e-4, "lr_cycle": 25, "momentum": 0.9,
    },
    ("fedbe", "released"): {
        "optimizer": "sgd", "lr": 1e-3, "lr_schedule": "constant", "momentum": 0.9, "weight_decay": 1e-5,
        "steps": None, "epochs": 20, "batch_size": 128,
    },
    ("fedbe", "d2cfl"): {
        "optimizer": "adam", "lr": 1e-3, "lr_schedule": "constant", "lr_epoch_decay": 0.95, "weight_decay": 0.0,
        "steps": None, "epochs": 5, "batch_size": 128, "clip": None,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "preset"), PUBLISHED)
def test_the_student_is_trained_as_published(name, preset):
    certain = {"threshold": 0.0} if preset == "d2cfl" else {}  # untrained clients are sure of nothing
    training = dataclasses.asdict(asked_at_once(form(name, preset, **certain)))
    wanted = PUBLISHED[name, preset]
    assert {key: training[key] for key in wanted} == wanted
    assert training["keep_optimizer"] == (preset == "fedaux_released")  # section 0.2: only FedAUX's code


@pytest.mark.parametrize(
    ("preset", "model", "statistics"),
    [
        ("paper", 2.0, 2.0),
        ("released", 2.0, 4.0),
        ("mrtf", 2.0, 2.0),
        ("mrtf_released", 2.0, 2.0),
        ("fedaux", 3.0, 3.0),
        ("fedaux_released", 2.0, 9.0),
        ("d2cfl", 3.0, 3.0),
    ],
)
def test_feddf_averages_as_each_of_them_does(preset, model, statistics):
    """Clients of 1 and 3 samples send 0 and 4: evenly 2, by size 3, of the last client 4; the server had 9."""
    start, first, last = (Weights({"w": number(x)}, {"bn.running_mean": number(x)}) for x in (9.0, 0.0, 4.0))
    found, _ = form("feddf", preset).aggregate.apply(start, {}, round_of(start, uploads_of([first, last], [1, 3])))
    assert (found.params["w"].item(), found.buffers["bn.running_mean"].item()) == (model, statistics)


@pytest.mark.parametrize(("name", "preset"), FORMS)
def test_only_forms_that_look_at_a_validation_set_need_one(name, preset):
    looks = {Need.VALIDATION} if preset in ("paper", "released") else set()
    own = {Need.ONE_ARCHITECTURE} if name == "fedbe" else looks
    assert needs_of(form(name, preset)) == {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS} | own


@pytest.mark.parametrize(
    "options", [{"patience": 5}, *({"teacher_weighting": w} for w in ("validation", "drop_worst"))]
)
def test_a_run_without_the_validation_set_it_needs_is_refused_in_one_line(options):
    bare = dataclasses.replace(federation(), validation=None)
    with pytest.raises(FedstillError, match=r"needs a few labeled samples on the server .*data\.validation"):
        run(form("feddf", steps=1, **options), federation=bare)
    assert Need.VALIDATION not in needs_of(feddf(student=student_of(feddf, look_every=7)))


def rates(training: Training, samples: int) -> list[float]:
    plan = make_plan(torch.arange(samples).numpy(), torch.tensor([samples]).numpy(), torch.zeros(1).long().numpy(),
                     training=training, round=1, seed=0)  # fmt: skip
    return plan.lr[:, 0].tolist()


def test_feddfs_rate_has_hardly_fallen_after_a_thousand_of_its_ten_thousand_steps():
    training = dataclasses.replace(asked_at_once(form("feddf", "paper")), batch_size=1)
    assert rates(training, 20)[1000] == pytest.approx(9.755283e-4, abs=1e-10)


def test_d2c_fls_rate_falls_by_a_twentieth_each_epoch_and_starts_anew_each_round():
    for number_of_round in (11, 12):
        method = form("feddf", "d2cfl", threshold=0.0)
        training = asked(method, number=number_of_round)
        assert rates(training, 20) == pytest.approx([1e-3, 9.5e-4, 9.025e-4, 8.57375e-4, 8.1450625e-4])


def test_fedbes_rate_falls_to_its_low_end_in_every_cycle():
    found = rates(asked_at_once(fedbe()), MANY)
    assert len(found) == 20 * 79
    for at in (0, 25, 1550):
        assert found[at] == pytest.approx(1e-3)
        assert found[at + 24] == pytest.approx(4e-4)


def test_mrtfs_code_teaches_softened_targets_and_fedbe_sharpened_ones():
    models = clients_models(network(), 3)

    def taught(method):
        this = server_round(models, network(), number=11)
        _, state = whole(method).apply(this.start, whole(method).init(this.start), this)
        return targets_of(state["distill"]).probabilities

    plain = taught(feddf(student=student_of(feddf, steps=1)))
    soft = plain**0.75 / (plain**0.75).sum(1, keepdim=True)
    assert furthest({"p": taught(form("feddf", "mrtf_released", steps=1))}, {"p": soft}) < 1e-12
    mean = taught(fedbe(student=student_of(fedbe, steps=1), sharpen=1.0, samples=0))
    sharp = mean**2 / (mean**2).sum(1, keepdim=True)
    assert furthest({"p": taught(fedbe(student=student_of(fedbe, steps=1), samples=0))}, {"p": sharp}) < 1e-12


@pytest.mark.parametrize("name", ["feddf", "fedbe"])
def test_a_student_of_hard_labels_is_measured_by_the_cross_entropy_with_them(name):
    this = server_round(clients_models(network(), 3), network(), number=11)
    method = form(name, "d2cfl", threshold=0.0)
    _, state = whole(method).apply(this.start, whole(method).init(this.start), this)
    labels = targets_of(state["distill"]).probabilities.argmax(1)
    logits = this.trainer.outputs(served(fedavg(), this), this.unlabeled).logits
    wanted = torch.nn.functional.cross_entropy(logits, labels).item()
    assert this.metrics["distill_loss_before"] == pytest.approx(wanted)
    assert this.metrics["distill_loss_after"] < wanted


@pytest.mark.parametrize(("name", "first"), [("feddf", 10), ("fedbe", 10)])
def test_d2c_fls_baselines_are_fedavg_for_ten_rounds(name, first):
    method = form(name, "d2cfl", threshold=0.5, lr=0.02)
    for rounds, equal in ((first, True), (first + 1, False)):
        assert same_bits(run(method, rounds=rounds).weights, run(fedavg(), rounds=rounds).weights) == equal


def test_without_feedback_clients_get_the_average_and_the_student_is_reported():
    short = student_of(feddf, steps=5, batch_size=8, lr=0.05)
    method, sent = feddf(feedback=False, student=short), []
    result = run(watched(method, lambda candidate, state, round: sent.append(clone(candidate))))
    plain = [run(weighed(fedavg(), "uniform"), rounds=rounds).weights for rounds in (1, 2, 3)]
    assert all(same_bits(found, wanted) for found, wanted in zip(sent, plain, strict=True))
    assert furthest(result.weights, plain[-1]) > 1e-2
    assert same_bits(run(method, rounds=1).weights, run(feddf(student=short), rounds=1).weights)


def test_teachers_in_train_mode_normalise_by_the_batch():
    models = clients_models(network("norm"), 3)

    def taught(method):
        this = server_round(models, network("norm"))
        _, state = whole(method).apply(this.start, whole(method).init(this.start), this)
        return targets_of(state["distill"]).probabilities

    unlabeled = federation().unlabeled
    plain = taught(form("feddf", "mrtf_released", steps=1, teacher_batch=10))
    for at in (0, 10):
        batch = unlabeled[at : at + 10].double()
        said = torch.stack([network("norm").apply(one, batch, training=True)[0].logits for one in models])
        torch.testing.assert_close(plain[at : at + 10], torch.softmax(0.75 * said.mean(0), 1))
    assert (plain - taught(feddf(exponent=0.75, student=student_of(feddf, steps=1)))).abs().max() > 1e-2


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 255, (count, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def on_images(method):
    model = build_model("mlp", input_shape=(1, 8, 8), classes=CLASSES, hidden=(5,), init="torch")
    train = Dataset("toy", images(6), torch.arange(6) % CLASSES, tuple("abc"))
    return served(method, server_round(clients_models(model, 2), model, unlabeled=images(12), train=train))


def test_augmentation_changes_the_students_batches_and_needs_images():
    plain, flipped = (
        on_images(feddf(student=student_of(feddf, steps=4, augment=augment))) for augment in ((), ("flip",))
    )
    assert furthest(plain, flipped) > 1e-5
    with pytest.raises(FedstillError, match=r"method\.augment: crop, flip need images, but samples have shape"):
        asked(form("feddf", "released", steps=4, patience=None))


MISTAKES = [
    ("feddf", {"student": {"epochs": -1}}, r"method\.student\.epochs = -1 must be a whole number, at least 0"),
    ("feddf", {"exponent": 0.0}, r"method\.exponent = 0\.0 must be a number from 0\.001 to 1000"),
    ("feddf", {"student": {"patience": 0}}, r"method\.student\.patience = 0 must be a whole number, at least 1"),
    ("feddf", {"student": {"look_every": 0}}, r"method\.student\.look_every = 0 must be"),
    ("feddf", {"student": {"stepz": 1}}, r"unknown key 'method\.student\.stepz' for feddf: did you mean 'steps'\?"),
    ("feddf", {"student": 20}, r"method\.student = 20 must be a section with its keys"),
    ("feddf", {"steps": 20}, r"unknown key 'method\.steps' for feddf: did you mean 'student\.steps'\?"),
    ("feddf", {"warm_up": -1}, r"method\.warm_up = -1 must be"),
    ("feddf", {"threshold": -0.1}, r"method\.threshold = -0\.1 must be a number, at least 0"),
    ("feddf", {"labels": "hard", "teacher_weighting": "size"}, r"method\.teacher_weighting = 'size' has no use"),
    (
        "feddf",
        {"student": {"keep_optimizer": True, "patience": 5}},
        r"method\.student\.keep_optimizer has no use with patience or average_after: set one of them back",
    ),
    (
        "avglogit",
        {"student": {"temperature": 0.0}},
        r"method\.student\.temperature = 0\.0 must be a number from 0\.001",
    ),
    ("avgprob", {"student": {"lr": 0.0}}, r"method\.student\.lr = 0\.0 must be a number above 0"),
    ("fedbe", {"samples": -1}, r"method\.samples = -1 must be"),
    ("fedbe", {"samples": 0, "with_average": False, "with_clients": False}, r"method\.samples = 0 leaves nobody"),
    ("fedbe", {"sampling": "normal"}, r'method\.sampling = "normal" is unknown'),
    ("fedbe", {"alpha": 0.0}, r"method\.alpha = 0\.0 must be a number above 0"),
    ("fedbe", {"student": {"lr": 1e-4}}, r"method\.student\.lr_low = 0\.0004 is above method\.student\.lr = 0\.0001"),
    ("fedbe", {"student": {"average_after": -1}}, r"method\.student\.average_after = -1 must be"),
    ("mrtf", {"student": {"keep_optimizer": True}}, r"method\.student\.keep_optimizer = true has no use here"),
]


@pytest.mark.parametrize(("name", "options", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key(name, options, message):
    with pytest.raises(FedstillError, match=message) as told:
        build_method(name, options)
    assert "\n" not in str(told.value)


# What must hold of every server that distils: AvgLogit, AvgProb, FedDF in all its forms, FedBE.


PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr_schedule": "constant", "reestimate": False, "sharpen": 1.0}
every_form = pytest.mark.parametrize(("name", "preset"), FORMS)

EXACT, WITHIN_ADAM = (
    1e-12,
    3e-3,
)  # Adam makes steps of up to its rate, 1e-3, out of rounding: it swings, it does not walk
AT_REST = {
    "avglogit": (avglogit(student=student_of(avglogit, steps=20)), WITHIN_ADAM),
    "avgprob": (avgprob(student=student_of(avgprob, steps=20, temperature=3.0)), WITHIN_ADAM),
    "feddf": (feddf(student=student_of(feddf, steps=20)), WITHIN_ADAM),
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


@every_form
def test_without_steps_every_form_is_fedavg_with_its_average_bit_for_bit(name, preset):
    method = form(name, preset, steps=0, **({"augment": []} if name == "feddf" else {}))  # these are no images
    plain = dataclasses.replace(fedavg(), aggregate=method.aggregate)
    assert same_bits(run(method, net="norm").weights, run(plain, net="norm").weights)


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
    "avglogit": (avglogit(student=student_of(avglogit, steps=30)), WITHIN_ADAM),
    "feddf": (feddf(student=student_of(feddf, steps=30)), WITHIN_ADAM),
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


def test_feddf_moves_the_average_towards_the_clients_joint_opinion():
    """Softmax regression on three clients that trained for long, in full batches."""
    data, start = [blobs(k, 8 + 6 * k) for k in range(3)], linear(3, 4, seed=2)
    method = feddf(student=student_of(feddf, steps=80, lr=0.5), pool="probabilities")
    how = {"rounds": 1, "steps": 40, "lr": 1.0, "unlabeled": blobs(9, 40).x}
    metrics = federate_by_hand(method, linear_model(), data, start, **how).metrics[0]
    assert metrics["distill_loss_after"] < 0.5 * metrics["distill_loss_before"]
