import pytest
import torch
from by_hand import (
    blobs,
    federate_by_hand,
    linear,
    linear_model,
    quadratic_data,
    round_of,
    scalar,
    scalar_model,
    uploads_of,
    with_quadratic,
)
from students import student_of
from torch.nn.functional import cross_entropy
from whole_server import whole

from fedstill.local import proximal
from fedstill.methods import fedavg, feddf, fedntd, fedprox

DATA = [blobs(k, 8 + 6 * k) for k in range(3)]
START = linear(3, 4, seed=2)


def after(method, *, data=DATA, rounds=2, steps=3, lr=0.2, **how):
    return federate_by_hand(method, linear_model(), data, START, rounds=rounds, steps=steps, lr=lr, **how)


def test_one_client_one_full_step_is_centralised_gradient_descent():
    params = {name: leaf.clone().requires_grad_() for name, leaf in START.params.items()}
    loss = cross_entropy(DATA[0].x @ params["weight"].T + params["bias"], DATA[0].y)
    gradients = torch.autograd.grad(loss, list(params.values()))
    ours = after(fedavg(), data=DATA[:1], rounds=1, steps=1).weights[0].params
    for (name, leaf), gradient in zip(params.items(), gradients, strict=True):
        torch.testing.assert_close(ours[name], leaf.detach() - 0.2 * gradient, rtol=1e-14, atol=1e-15)


def test_one_step_by_size_is_a_step_on_the_pooled_data():
    pooled = type(DATA[0])(*(torch.cat(parts) for parts in zip(*DATA, strict=True)))
    ours, central = after(fedavg(), steps=1), after(fedavg(), data=[pooled], steps=1)
    torch.testing.assert_close(ours.weights[-1].params, central.weights[-1].params)


def test_rate_zero_changes_nothing():
    result = after(fedavg(), lr=0.0).weights[-1].params
    torch.testing.assert_close(result, START.params, rtol=1e-15, atol=0)


def test_an_infinite_pull_keeps_the_global_model_where_it_is():
    mu = 1e8
    held = after(fedprox(mu=mu), lr=1 / mu).weights[-1].params
    torch.testing.assert_close(held, START.params, rtol=0, atol=1e-6)


def test_a_proximal_client_solves_its_own_closed_form():
    method = with_quadratic(fedprox(), proximal(0.5))
    history = federate_by_hand(
        method, scalar_model(), [quadratic_data(3.0, 4.0)], scalar(1.0), rounds=1, steps=80, lr=0.25
    )
    assert history.weights[0].params["w"].item() == pytest.approx((3.0 * 4.0 + 0.5 * 1.0) / 3.5)


def test_fedntd_starts_like_fedavg_and_then_forgets_less():
    """At the start the student is the teacher; later the term holds the classes a client does not have."""
    only_class_0 = [DATA[0]._replace(y=torch.zeros_like(DATA[0].y))]
    first = [after(m, data=only_class_0, rounds=1, steps=1).weights[0].params for m in (fedavg(), fedntd(beta=5.0))]
    torch.testing.assert_close(first[0], first[1], rtol=1e-12, atol=1e-14)

    def drift_between_absent_classes(method):
        params = after(method, data=only_class_0, rounds=1, steps=30, lr=0.5).weights[0].params
        gap = (params["weight"][1] - params["weight"][2]) - (START.params["weight"][1] - START.params["weight"][2])
        return float((DATA[0].x @ gap).abs().mean())

    assert drift_between_absent_classes(fedntd(beta=5.0)) < 0.5 * drift_between_absent_classes(fedavg())


def test_feddf_with_one_client_returns_that_client():
    unlabeled = blobs(9, 15).x
    plain = after(fedavg(), data=DATA[:1], rounds=1).weights[0].params
    distilled = after(feddf(student=student_of(feddf, steps=5, lr=0.1)), data=DATA[:1], rounds=1, unlabeled=unlabeled)
    torch.testing.assert_close(distilled.weights[0].params, plain, rtol=1e-9, atol=1e-12)
    assert distilled.metrics[0]["distill_loss_before"] < 1e-10


def test_feddf_moves_the_average_towards_the_clients_joint_opinion():
    unlabeled = blobs(9, 40).x
    method = feddf(student=student_of(feddf, steps=80, lr=0.5), pool="probabilities")
    metrics = after(method, rounds=1, steps=40, lr=1.0, unlabeled=unlabeled).metrics[0]
    assert metrics["distill_loss_after"] < 0.5 * metrics["distill_loss_before"]


def test_feddf_asks_for_the_papers_student_training():
    this = round_of(START, uploads_of([START], [1]), model=linear_model(), unlabeled=blobs(9, 5).x)
    whole(feddf(student=student_of(feddf, steps=1))).apply(START, {}, this)
    ((training, _),) = this.trainer.asked
    assert (training.optimizer, training.lr, training.lr_schedule) == ("adam", 1e-3, "cosine")
    assert (training.clip, training.batch_size, training.steps) == (5.0, 128, 1)
