"""What one client may look at during a round, what it keeps, and what it sends besides its model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_cases import CLASSES, assert_close, engine_for, federation, network, train
from quick import EITHER_ENGINE

from fedstill.compose.combine import combine, weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.tree import rows
from fedstill.core.types import Model, Need, Objective, Training, Weights
from fedstill.engine import build_engine
from fedstill.engine.plan import make_plan
from fedstill.engine.step import Program
from fedstill.local.distillation import not_true_distillation, start_model
from fedstill.local.terms import cross_entropy
from fedstill.methods.lookup import build_method

ENGINES = ("batched", "looped")
SIZES = (5, 9, 1, 16)
TRAINING = Training(batch_size=4, epochs=2, lr=0.1, momentum=0.5, lr_decay=0.5)


def telling(**parts) -> Objective:
    """Uploads all that `finish` may look at."""

    def finish(local, measured):
        facts = {name: getattr(local, name) for name in ("size", "steps", "travel", "lr", "seed", "label_counts")}
        return {}, {**facts, "head": local.params["head.bias"], "start": local.start.params["head.bias"]}

    return dataclasses.replace(cross_entropy(), finish=finish, **parts)


def plan_of(data, training: Training = TRAINING, *, round: int = 1):
    sizes = data.offsets.diff().numpy()
    return make_plan(
        data.indices.numpy(), sizes, np.arange(len(sizes)), training=training, round=round, seed=7
    )  # fmt: skip


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_client_knows_its_size_steps_travel_rate_and_seed(engine):
    data = federation(SIZES)
    trained = train(engine_for(engine, data=data), TRAINING, objective=telling(), round=3)
    extra, plan = trained.uploads.extra, plan_of(data, round=3)
    assert extra["size"].tolist() == list(SIZES)
    assert extra["steps"].tolist() == plan.steps.tolist()
    np.testing.assert_allclose(extra["travel"].numpy(), plan.travel, rtol=1e-6)
    np.testing.assert_allclose(extra["lr"].numpy(), 0.1 * 0.5**2, rtol=1e-6)
    assert extra["seed"].tolist() == plan.finish_seeds.tolist()
    assert torch.equal(extra["head"], trained.uploads.weights.params["head.bias"])
    assert torch.equal(extra["start"][2], network().init(3).params["head.bias"])
    assert trained.states == {}


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_label_counts_are_nan_unless_they_are_declared(engine):
    data = federation(SIZES)
    hidden = train(engine_for(engine, data=data), TRAINING, objective=telling()).uploads.extra["label_counts"]
    assert bool(hidden.isnan().all())
    declared = telling(needs=frozenset({Need.LABEL_COUNTS}))
    shown = train(engine_for(engine, data=data), TRAINING, objective=declared, ids=[3, 0, 1, 2]).uploads
    for row, client in enumerate([3, 0, 1, 2]):
        labels = data.train.y[data.indices[data.offsets[client] : data.offsets[client + 1]]]
        assert shown.extra["label_counts"][row].tolist() == torch.bincount(labels, minlength=CLASSES).tolist()


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_declared_label_counts_are_there_in_every_step(engine):
    """A loss scaled by the share of the largest class: a wrong row of counts would scale another client's."""

    def scale(counts):
        return counts.max() / counts.sum()

    def loss(output, batch, local):
        return scale(local.label_counts) * cross_entropy().loss(output, batch, local)

    data, training = federation(SIZES), Training(batch_size=64, lr=0.1)
    start = network().init(3)
    plain = train(engine_for(engine, data=data), training).uploads.weights.params
    scaled = train(
        engine_for(engine, data=data), training, objective=Objective(loss, needs=frozenset({Need.LABEL_COUNTS}))
    ).uploads.weights.params
    for client in range(len(SIZES)):
        labels = data.train.y[data.indices[data.offsets[client] : data.offsets[client + 1]]]
        share = float(scale(torch.bincount(labels).float()))
        wanted = start.params["head.weight"] + share * (plain["head.weight"][client] - start.params["head.weight"])
        torch.testing.assert_close(scaled["head.weight"][client], wanted, rtol=0, atol=1e-6)


def remembering() -> Objective:
    """Pulls the head bias towards the client's own target, then moves the target and sends how far."""

    def loss(output, batch, local):
        return 0.5 * (local.params["head.bias"] - local.state["own"]["target"]).square().sum()

    def finish(local, measured):
        target = local.state["own"]["target"] + local.received["push"]
        return {"own": {"target": target, "rounds": local.state["own"]["rounds"] + 1}}, {
            "moved": local.received["push"]
        }

    def init(weights):
        return {"own": {"target": torch.zeros(CLASSES), "rounds": torch.tensor(0)}}

    return Objective(loss, init=init, finish=finish, needs=frozenset({Need.CLIENT_STATE}))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_every_client_has_its_own_state_and_all_the_same_broadcast(engine):
    ids = [2, 0, 3]
    targets = torch.arange(12.0).reshape(3, CLASSES)
    states = {"own": {"target": targets, "rounds": torch.tensor([5, 6, 7])}}
    training = Training(batch_size=64, epochs=1, lr=1.0)  # one exact step on a quadratic: the bias is the target
    trained = train(
        engine_for(engine, data=federation(SIZES)), training, objective=remembering(), ids=ids,
        states=states, received={"push": torch.full((CLASSES,), 0.5)},
    )  # fmt: skip
    torch.testing.assert_close(trained.uploads.weights.params["head.bias"], targets, rtol=0, atol=1e-5)
    assert torch.equal(trained.states["own"]["target"], targets + 0.5)
    assert trained.states["own"]["rounds"].tolist() == [6, 7, 8]
    assert trained.states["own"]["rounds"].dtype == torch.int64
    assert torch.equal(trained.uploads.extra["moved"], torch.full((3, CLASSES), 0.5))


def looking_at_all_data() -> Objective:
    def measure(model, batch, local):
        output, _ = model.apply(Weights(local.params, local.start.buffers), batch.x)
        return {
            "mean": torch.stack([weighted_mean(column, batch.weight) for column in batch.x.unbind(1)]),
            "loss": weighted_mean(
                torch.nn.functional.cross_entropy(output.logits, batch.y, reduction="none"), batch.weight
            ),
        }

    return dataclasses.replace(cross_entropy(), measure=measure, finish=lambda local, measured: ({}, measured))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_measure_sees_every_sample_once_with_the_trained_model(engine):
    data = federation((5, 0, 9, 1, 16))
    uploads = train(engine_for(engine, data=data), TRAINING, objective=looking_at_all_data()).uploads
    model = network()
    for client, size in enumerate((5, 0, 9, 1, 16)):
        own = data.indices[data.offsets[client] : data.offsets[client + 1]]
        if size == 0:
            continue
        x, y = data.train.x[own], data.train.y[own]
        logits = model.apply(rows(uploads.weights, client), x)[0].logits
        torch.testing.assert_close(uploads.extra["mean"][client], x.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            uploads.extra["loss"][client], torch.nn.functional.cross_entropy(logits, y), rtol=1e-5, atol=1e-6
        )


def counted(model: Model) -> tuple[Model, list[bool]]:
    """The model, and a list that grows by `training` with every call."""
    calls: list[bool] = []

    def apply(weights, x, *, training=False, **how):
        calls.append(training)
        return model.apply(weights, x, training=training, **how)

    return dataclasses.replace(model, apply=apply), calls


def start_in_every_step(local):
    """It looks at the step's seed, so it might be another model in every step."""
    params = {name: leaf + 0.0 * local.seed for name, leaf in local.start.params.items()}
    return Weights(params, local.start.buffers)


def kept(local):
    return Weights(local.state["past"], {})


def imitation(name: str, teacher) -> Objective:
    def loss(output, batch, local):
        gap = (output.logits - local.frozen[name].logits).square().sum(1)
        return weighted_mean(gap, batch.weight)

    return Objective(loss, frozen={name: teacher})


def run_counted(objective: Objective, training: Training, net: str = "mlp", **how) -> list[bool]:
    model, calls = counted(network(net))
    engine = build_engine("looped", "cpu", model=model, federation=federation((8,), images=net == "cnn"))
    train(engine, training, objective=objective, **how)
    return calls


def test_a_teacher_that_two_terms_name_runs_once_a_step():
    training = Training(batch_size=4, epochs=3, lr=0.01)
    imitate = imitation("noisy", start_in_every_step)
    alone, shared = run_counted(imitate, training), run_counted(combine(imitate, imitate), training)
    assert shared == alone == [False, True] * 6


def test_the_start_model_as_teacher_runs_once_a_round():
    calls = run_counted(combine(cross_entropy(), not_true_distillation()), Training(batch_size=4, epochs=3, lr=0.01))
    assert calls == [False] + [True] * 6


def test_a_teacher_from_the_clients_own_state_runs_once_a_round():
    states = {"past": {name: leaf.unsqueeze(0) for name, leaf in network("cnn").init(1).params.items()}}
    training = Training(batch_size=4, epochs=3, lr=0.01)
    assert run_counted(imitation("own", kept), training, "cnn", states=states) == [False] + [True] * 6


def test_a_teacher_sees_the_augmented_samples_that_the_student_sees():
    training = Training(batch_size=4, epochs=2, lr=0.01, augment=("crop", "flip"))
    assert run_counted(combine(cross_entropy(), not_true_distillation()), training, "cnn") == [False, True] * 4


def test_the_start_model_is_not_run_over_all_data_for_a_few_steps():
    calls = run_counted(combine(cross_entropy(), not_true_distillation()), Training(batch_size=4, steps=1, lr=0.01))
    assert calls == [False, True]


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_remembered_teacher_outputs_are_those_of_a_fresh_run(monkeypatch, engine):
    data, objective = federation(SIZES), combine(cross_entropy(), not_true_distillation(2.0))
    used = engine_for(engine, data=data)
    for round, start in enumerate((network().init(1), network().init(2)), 1):
        how = {"objective": objective, "start": start, "round": round, "ids": [0, 3, 1] if round == 1 else [3, 2]}
        cached = train(used, TRAINING, **how).uploads.weights
        with monkeypatch.context() as patch:
            patch.setattr(Program, "cacheable", lambda self, client: [])
            fresh = train(engine_for(engine, data=data), TRAINING, **how).uploads.weights
        assert_close(cached, fresh)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("shared", [False, True], ids=["rows of one owner", "rows of two owners"])
def test_remembered_outputs_of_each_clients_own_teacher_are_those_of_a_fresh_run(monkeypatch, engine, shared):
    """A row that two clients hold has two teachers, and one place to be remembered at."""
    data, objective = federation(SIZES, images=True), combine(cross_entropy(), imitation("own", kept))
    if shared:
        data = dataclasses.replace(data, indices=torch.cat([data.indices[:14], data.indices[:17]]))
    used, training = engine_for(engine, "cnn", data), dataclasses.replace(TRAINING, lr=0.01)
    for round, ids in enumerate(([0, 3, 1], [3, 2]), 1):
        pasts = [network("cnn").init(100 * round + client).params for client in ids]
        states = {"past": {name: torch.stack([past[name] for past in pasts]) for name in pasts[0]}}
        how = {"objective": objective, "round": round, "ids": ids, "states": states}
        cached = train(used, training, **how).uploads.weights
        with monkeypatch.context() as patch:
            patch.setattr(Program, "cacheable", lambda self, client: [])
            fresh = train(engine_for(engine, "cnn", data), training, **how).uploads.weights
        assert_close(cached, fresh)


def test_what_is_remembered_has_features_only_where_they_are_declared():
    def loss(output, batch, local):
        return weighted_mean((output.features - local.frozen["start"].features).square().sum(1), batch.weight)

    for engine in ENGINES:
        declared = Objective(loss, frozen={"start": start_model}, needs=frozenset({Need.FEATURES}))
        found = train(engine_for(engine), TRAINING, objective=combine(cross_entropy(), declared)).uploads.weights
        fresh = dataclasses.replace(declared, frozen={"start": start_in_every_step})
        again = train(engine_for(engine), TRAINING, objective=combine(cross_entropy(), fresh)).uploads.weights
        assert_close(found, again)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_teacher_may_come_from_the_clients_own_state(engine):
    """Imitating a teacher of one's own: the loss is zero at it, so a client that starts there stays."""
    model = network()
    start = model.init(3)
    objective = dataclasses.replace(
        imitation("own", kept),
        init=lambda weights: {"past": weights.params},
        finish=lambda local, measured: ({"past": local.params}, {}),
    )
    other = {name: leaf + 0.1 for name, leaf in start.params.items()}
    states = {"past": {name: torch.stack([start.params[name], other[name]]) for name in other}}
    trained = train(engine_for(engine), TRAINING, objective=objective, ids=[1, 0], states=states)
    assert_close(rows(trained.uploads.weights, 0), start)
    moved = trained.uploads.weights.params["head.bias"][1] - start.params["head.bias"]
    assert float(moved.abs().max()) > 0.01
    assert torch.equal(trained.states["past"]["head.bias"], trained.uploads.weights.params["head.bias"])


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_teachers_run_in_eval_mode(engine):
    """A dropout net that imitates itself in eval mode has a loss; in train mode with equal masks it would have none."""
    runner = engine_for(engine, "drop")
    uploads = train(runner, Training(batch_size=8, lr=0.0), objective=imitation("start", start_model)).uploads
    assert bool((uploads.loss > 1e-4).all())


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_features_that_nobody_declared_cannot_be_read_where_outputs_are_remembered(engine):
    """A term that reads them without saying so must not get something else that looks like them."""

    def loss(output, batch, local):
        return output.logits.sum() * 0.0 + local.frozen["start"].features.sum() * 0.0

    peeking = Objective(loss, frozen={"start": start_model})
    with pytest.raises(FedstillError, match=r"test_step.py, line \d+.*features.*Need.FEATURES"):
        train(engine_for(engine), TRAINING, objective=peeking, ids=[0, 1])
    honest = dataclasses.replace(peeking, needs=frozenset({Need.FEATURES}))
    assert bool((train(engine_for(engine), TRAINING, objective=honest, ids=[0, 1]).uploads.loss == 0).all())


@pytest.mark.parametrize("method", ["fedntd(beta=10.0)", "kd(beta=10.0)", "fedmmd(lam=1.0)"])
def test_under_bf16_a_remembered_teacher_is_as_precise_as_its_student(method):
    """At the received weights teacher and student agree to the bit, so the first step is FedAvg's."""
    one_step = Training(batch_size=64, lr=0.01)
    plain, found = (
        train(
            build_engine("looped", "cpu", model=network(), federation=federation(SIZES), precision="bf16"),
            one_step,
            objective=build_method(text)[0].method.objective,
            ids=[0, 1],
        ).uploads.weights
        for text in ("fedavg", method)
    )
    assert_close(found, plain)
