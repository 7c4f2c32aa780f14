"""FedBE: which models teach, its snapshots and statistics, and AvgProb without its own ideas."""

import dataclasses

import pytest
import torch
from server_rounds import CLASSES, clients_models, network, points, run, served, server_round
from students import form, student_of
from toy import furthest, same_bits

from fedstill.core.tree import clone, rows, stack
from fedstill.methods import fedavg, fedbe
from fedstill.models import build_model
from fedstill.server.distill.student import Snapshots

MANY = 10_000  # unlabeled samples, as in FedBE's experiments


def test_fedbes_released_schedule_averages_43_snapshots(monkeypatch):
    counted = []
    result = Snapshots.result

    def counting(self, last):
        counted.append(self.count)
        return result(self, last)

    monkeypatch.setattr(Snapshots, "result", counting)
    model = build_model("mlp", input_shape=(4,), classes=CLASSES, hidden=(), init="torch")
    this = server_round(clients_models(model, 2), model, unlabeled=points(MANY, "many")[0])
    served(form("fedbe", "released"), this)
    assert counted == [43]


def teachers_of(method, models, seed=7):
    """The models that answered for the method, in order."""
    this, seen = dataclasses.replace(server_round(models, network(), number=11), seed=seed), []
    outputs = this.trainer.outputs

    def noted(weights, x, stacked=False, **how):
        if stacked:
            seen.append(clone(weights))
        return outputs(weights, x, stacked, **how)

    this.trainer.outputs = noted
    served(method, this)
    (found,) = seen
    return found, this


def drawing(sampling):
    how = {"preset": "released"} if sampling == "released" else {"sampling": sampling}
    return form("fedbe", steps=1, **how)


@pytest.mark.parametrize("sampling", ["gaussian", "dirichlet", "released"])
def test_the_average_ten_drawn_models_and_the_clients_teach_in_fedbe(sampling):
    models = clients_models(network(), 4)
    found, this = teachers_of(drawing(sampling), models)
    assert len(found.params["head.bias"]) == 1 + 10 + 4
    assert same_bits(rows(found, 0), served(fedavg(), this))
    assert same_bits(rows(found, slice(11, 15)), stack(models))
    drawn = rows(found, slice(1, 11))
    assert len(drawn.params["head.bias"].unique(dim=0)) == 10


def test_in_d2c_fls_fedbe_the_linear_combinations_alone_teach():
    models = clients_models(network(), 4)
    found, _ = teachers_of(form("fedbe", "d2cfl", threshold=0.0), models)
    assert len(found.params["head.bias"]) == 10
    span = torch.cat([leaf.flatten(1) for leaf in stack(models).params.values()], 1)
    drawn = torch.cat([leaf.flatten(1) for leaf in found.params.values()], 1)
    shares = torch.linalg.lstsq(span.T, drawn.T).solution.T
    torch.testing.assert_close(shares @ span, drawn)
    torch.testing.assert_close(shares.sum(1), torch.ones(10, dtype=torch.float64))
    assert bool((shares >= -1e-9).all())


def test_a_dirichlet_of_large_alpha_draws_the_average():
    method = fedbe(student=student_of(fedbe, steps=1), sampling="dirichlet", alpha=1e12, with_clients=False)
    found, this = teachers_of(method, clients_models(network(), 4))
    average = served(fedavg(), this)
    assert all(furthest(rows(found, one), average) < 1e-5 for one in range(11))


@pytest.mark.parametrize("sampling", ["gaussian", "dirichlet", "released"])
def test_every_round_draws_other_models(sampling):
    models = clients_models(network(), 3)
    first, again, later = (teachers_of(drawing(sampling), models, seed)[0] for seed in (7, 7, 8))
    assert same_bits(first, again)
    assert not same_bits(rows(later, 1), rows(first, 1))


def test_fedbe_takes_batchnorm_statistics_of_the_unlabeled_data():
    models = clients_models(network("norm"), 3)
    this = server_round(models, network("norm"))
    student = served(fedbe(student=student_of(fedbe, steps=3, batch_size=8)), this)
    before = this.unlabeled.double() @ student.params["body.0.weight"].T
    torch.testing.assert_close(student.buffers["body.1.running_mean"], before.mean(0))
    torch.testing.assert_close(student.buffers["body.1.running_var"], before.var(0))
    other = served(fedbe(student=student_of(fedbe, steps=3, batch_size=8, reestimate=False)), this)
    assert same_bits(other.params, student.params)
    assert furthest(other.buffers, student.buffers) > 1e-3


def test_the_released_scale_of_the_loss_divides_a_step_by_the_number_of_classes():
    models = clients_models(network(), 3)
    plain = {"steps": 1, "weight_decay": 0.0, "average_after": None, "lr_schedule": "constant"}
    this = server_round(models, network())
    start = served(fedavg(), this)
    part, whole = (
        served(form("fedbe", preset, sampling="dirichlet", **plain), this) for preset in ("released", "correct")
    )
    for name, leaf in start.params.items():
        torch.testing.assert_close(CLASSES * (part.params[name] - leaf), whole.params[name] - leaf)


# What must hold of every server that distils: AvgLogit, AvgProb, FedDF in all its forms, FedBE.


PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr_schedule": "constant", "reestimate": False, "sharpen": 1.0}


def test_fedbe_without_its_own_ideas_is_avgprob_bit_for_bit():
    """No samples, no average among the teachers, no snapshots, no sharpening, the usual scale of the loss."""
    bare = {**PLAIN, "samples": 0, "with_average": False, "average_after": None, "optimizer": "adam"}
    how = {"steps": 7, "batch_size": 8, "lr": 0.01}
    wanted = run(form("avgprob", **how)).weights
    assert same_bits(run(form("fedbe", **how, **bare)).weights, wanted)
    own = {"samples": 2}, {"with_average": True}, {"average_after": 0, "lr_cycle": 2}, {"sharpen": 0.5}
    for idea in own:
        assert not same_bits(run(form("fedbe", **{**how, **bare, **idea})).weights, wanted), idea
