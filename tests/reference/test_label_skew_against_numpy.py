"""The terms sample by sample, and the methods over rounds with clients away, against numpy from the equations."""

import numpy as np
import numpy_label_skew as reference
import pytest
import torch
from by_hand import blobs, federate_by_hand, local_view, number, scalar
from hypothesis import given
from hypothesis import strategies as st
from own_counts import counting
from weighed import weighed

from fedstill.core.types import Batch, Model, Output, Weights
from fedstill.local import (
    label_masked_distillation,
    not_true_distillation,
    plain_distillation,
    restricted_softmax,
    smoothed_cross_entropy,
)
from fedstill.methods import METHODS

TERMS = {
    "kd": lambda tau: plain_distillation(0.7, tau=tau),
    "fedntd": lambda tau: not_true_distillation(0.7, tau=tau),
    "fedntd_tf": lambda tau: not_true_distillation(0.7, tau=tau, teacher=False),
    "fedlmd": lambda tau: label_masked_distillation(0.7, tau=tau),
    "fedlmd_tf": lambda tau: label_masked_distillation(0.7, tau=tau, teacher=False),
}


@st.composite
def client_batches(draw):
    """(logits, teacher's logits, labels, label counts) with two to six classes; every label has a count."""
    classes, samples = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    row = st.lists(st.floats(-8, 8), min_size=classes, max_size=classes)
    z, teacher = (draw(st.lists(row, min_size=samples, max_size=samples)) for _ in range(2))
    y = draw(st.lists(st.integers(0, classes - 1), min_size=samples, max_size=samples))
    counts = draw(st.lists(st.integers(0, 5), min_size=classes, max_size=classes))
    return z, teacher, y, [max(count, int(i in y)) for i, count in enumerate(counts)]


def found(term, z, teacher, y, counts):
    """(loss, gradient) with two rows of padding behind the real ones."""
    real, classes = len(z), len(counts)
    logits = number([*z, [7e3] * classes, list(range(classes))]).requires_grad_()
    taught = number([*teacher, [-3.0] * classes, [4e3 * i for i in range(classes)]])
    batch = Batch(logits, torch.tensor([*y, classes - 1, 0]), number([1.0] * real + [0.0, 0.0]))
    view = local_view(scalar(0.0), frozen={"start": Output(taught, taught)}, label_counts=number(counts))
    loss = term.loss(Output(logits, logits), batch, view)
    (pull,) = torch.autograd.grad(loss, logits)
    assert pull[real:].abs().max() == 0.0
    return loss.item(), pull[:real].numpy()


def check(term, batch, loss_of, gradient_of, scale=1.0):
    z, teacher, y, counts = batch
    loss, pull = found(term, z, teacher, y, counts)
    samples = list(zip(z, teacher, y, strict=True))
    assert loss == pytest.approx(scale * np.mean([loss_of(*sample, counts) for sample in samples]), rel=1e-9, abs=1e-9)
    wanted = scale * np.array([gradient_of(*sample, counts) for sample in samples]) / len(samples)
    np.testing.assert_allclose(pull, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", TERMS)
@given(batch=client_batches(), tau=st.floats(0.5, 4.0))
def test_a_distillation_term_equals_its_equation(method, batch, tau):
    check(
        TERMS[method](tau),
        batch,
        lambda z, teacher, y, counts: reference.distillation(method, z, teacher, y, counts, tau),
        lambda z, teacher, y, counts: reference.distillation_gradient(method, z, teacher, y, counts, tau),
        scale=0.7,
    )


@pytest.mark.parametrize("rule", ["binary", "proportional"])
@given(batch=client_batches(), alpha=st.floats(0, 1))
def test_the_restricted_softmax_equals_its_equation(rule, batch, alpha):
    check(
        restricted_softmax(alpha, proportional=rule == "proportional"),
        batch,
        lambda z, _, y, counts: reference.restricted(z, y, counts, alpha, rule),
        lambda z, _, y, counts: reference.restricted_gradient(z, y, counts, alpha, rule),
    )


@given(batch=client_batches(), epsilon=st.floats(0, 0.99))
def test_smoothed_labels_equal_their_equation(batch, epsilon):
    check(
        smoothed_cross_entropy(epsilon),
        batch,
        lambda z, _, y, counts: reference.smoothed(z, y, epsilon),
        lambda z, _, y, counts: reference.smoothed_gradient(z, y, epsilon),
    )


SIZES, STEPS = [6, 13, 9, 20], [2, 5, 3, 7]
COHORTS = [[0, 1, 2], [3, 1], [2, 3, 0], [0, 1, 2, 3]]
DATA = [blobs(k, size, classes=4) for k, size in enumerate(SIZES)]
CLIENTS = [(batch.x.numpy(), batch.y.numpy(), steps) for batch, steps in zip(DATA, STEPS, strict=True)]
START = np.random.Generator(np.random.PCG64(3)).normal(size=(4, 4))
CASES = [
    ("kd", {"beta": 0.6, "tau": 2.0}),
    ("fedntd", {"weighting": "uniform"}),
    ("fedntd_tf", {"beta": 0.6, "tau": 2.0}),
    ("fedlmd", {"beta": 0.6, "tau": 2.0}),
    ("fedlmd", {"weighting": "uniform"}),
    ("fedlmd_tf", {"beta": 0.6, "tau": 2.0}),
    ("label_smoothing", {"epsilon": 0.2}),
    ("fedrs", {}),
    ("fedrs", {"alpha": 0.3, "rule": "proportional"}),
]


def without_bias() -> Model:
    def apply(weights, x, *, training=False, weight=None, seed=None):
        return Output(x @ weights.params["W"].T, x), {}

    return Model("matrix", init=lambda seed: Weights({"W": torch.zeros(4, 4)}, {}), apply=apply)


def test_the_clients_differ_in_what_they_lack_and_in_what_they_have_much_of():
    counts = [[int((y == i).sum()) for i in range(4)] for _, y, _ in CLIENTS]
    assert any(0 in row for row in counts)
    assert len({frozenset(reference.majority(row)) for row in counts}) > 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_the_method_equals_its_equations_in_numpy(name, options, momentum):
    expected = reference.federated(name, START, CLIENTS, COHORTS, lr=0.1, momentum=momentum, **options)
    own = {key: value for key, value in options.items() if key != "weighting"}
    method = weighed(METHODS[name](**own), options.get("weighting", "size"))
    history = federate_by_hand(
        counting(method),
        without_bias(),
        DATA,
        Weights({"W": torch.from_numpy(START)}, {}),
        rounds=len(COHORTS),
        steps=STEPS,
        lr=0.1,
        momentum=momentum,
        cohorts=COHORTS,
    )
    assert np.abs(expected - START).max() > 1e-2
    np.testing.assert_allclose(history.weights[-1].params["W"].numpy(), expected, rtol=1e-9, atol=1e-10)
