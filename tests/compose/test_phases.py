"""Optimisers that go on from round to round, on clients and on the server, and evaluation in train mode."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quick import EITHER_ENGINE
from server_rounds import CLIENTS, EACH, clients_models, federation, network, run, server_round
from students import form
from torch import nn
from toy import furthest, same_bits
from whole_server import whole

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import stack
from fedstill.core.types import Phase, Training
from fedstill.engine import build_engine
from fedstill.engine.plan import make_plan
from fedstill.engine.stack import first_memory
from fedstill.local.terms import cross_entropy
from fedstill.loop.round import draw_cohort
from fedstill.methods import fedavg
from fedstill.methods.lookup import build_method

ADAM = Training(batch_size=5, epochs=1, lr=0.01, optimizer="adam", keep_optimizer=True)
MOMENTUM = Training(batch_size=5, epochs=1, lr=0.05, momentum=0.9, keep_optimizer=True)
FRESH = {"adam": dataclasses.replace(ADAM, keep_optimizer=False)}
SEED = 3


def fedavg_in_torch(training: Training, rounds: int, *, cohort: int) -> dict[str, torch.Tensor]:
    """Plain modules and torch.optim, one optimiser a client for the whole run."""
    data, start = federation(), network().init(seed_for(SEED, "model"))
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    module.load_state_dict(dict(zip(module.state_dict(), start.params.values(), strict=True)))
    optimizers: dict[int, dict] = {}
    for round in range(1, rounds + 1):
        ids = draw_cohort(np.arange(CLIENTS), cohort, seed=SEED, round=round)
        rows = torch.cat([data.indices[k * EACH : (k + 1) * EACH] for k in ids]).numpy()
        plan = make_plan(rows, np.full(cohort, EACH), ids, training=training, round=round, seed=SEED)
        models = []
        for column, client in enumerate(ids):
            local = copy.deepcopy(module)
            optimizer = (
                torch.optim.Adam(local.parameters(), lr=training.lr)
                if training.optimizer == "adam"
                else torch.optim.SGD(local.parameters(), lr=training.lr, momentum=training.momentum)
            )
            if training.keep_optimizer and client in optimizers:
                optimizer.load_state_dict(optimizers[client])
            for index, weight in zip(plan.index[:, column], plan.weight[:, column], strict=True):
                batch = torch.from_numpy(index[weight > 0])
                optimizer.zero_grad()
                F.cross_entropy(local(data.train.x[batch]), data.train.y[batch]).backward()
                optimizer.step()
            optimizers[client] = copy.deepcopy(optimizer.state_dict())
            models.append(local.state_dict())
        module.load_state_dict({name: torch.stack([m[name] for m in models]).mean(0) for name in models[0]})
    return dict(zip(start.params, (leaf.detach() for leaf in module.parameters()), strict=True))


@pytest.mark.parametrize("training", [ADAM, MOMENTUM, FRESH["adam"]], ids=["adam", "momentum", "fresh adam"])
@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_clients_optimiser_goes_on_as_torchs_own_does(engine, training):
    """Cohorts differ, so that clients have taken different numbers of steps."""
    found = run(fedavg(), rounds=4, cohort=3, training=training, engine=engine).weights.params
    assert furthest(found, fedavg_in_torch(training, 4, cohort=3)) < 2e-6


def test_it_matters():
    found, fresh = (run(fedavg(), training=how).weights for how in (ADAM, FRESH["adam"]))
    assert furthest(found, fresh) > 1e-3


def test_the_first_round_is_that_of_a_fresh_optimiser_bit_for_bit():
    found, fresh = (run(fedavg(), rounds=1, training=how, engine="looped").weights for how in (ADAM, FRESH["adam"]))
    assert same_bits(found, fresh)


def test_an_optimiser_that_remembers_nothing_is_the_same_either_way():
    plain = Training(batch_size=5, lr=0.05)
    kept = dataclasses.replace(plain, keep_optimizer=True)
    assert same_bits(*(run(fedavg(), training=how, engine="looped").weights for how in (plain, kept)))


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "moon"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, method):
    how = {"training": MOMENTUM, "checkpoint_every": 1, "net": "norm"}
    whole = run(build_method(method)[0].method, rounds=4, run_dir=tmp_path / "whole", **how)
    run(build_method(method)[0].method, rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(build_method(method)[0].method, rounds=4, run_dir=tmp_path / "cut", resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)


def test_it_goes_on_through_phases():
    """Two phases of one method are that method."""
    phases = (Phase(build_method("feddyn")[0].method, until=2), Phase(build_method("feddyn")[0].method))
    found = run(phases, rounds=4, training=MOMENTUM).weights
    assert same_bits(found, run(build_method("feddyn")[0].method, rounds=4, training=MOMENTUM).weights)


def test_where_only_the_head_is_trained_its_moments_go_on():
    training = dataclasses.replace(ADAM, part="head")
    found = run(fedavg(), training=training, rounds=3, cohort=CLIENTS)
    fresh = run(fedavg(), training=dataclasses.replace(training, keep_optimizer=False), rounds=3, cohort=CLIENTS)
    name = network().head_names[0]
    assert not torch.allclose(found.weights.params[name], fresh.weights.params[name], atol=1e-4)


def test_every_client_counts_its_own_steps():
    engine, start = build_engine("looped", "cpu", model=network(), federation=federation()), network().init(0)
    memory = stack([first_memory(ADAM, start.params)] * 2)
    memory["count"][1] = 7.0
    trained = engine.train(LocalWork(cross_entropy(), ADAM, start), np.array([1, 0]), {"optimizer": memory})
    steps = -(-EACH // ADAM.batch_size)
    assert trained.states["optimizer"]["count"].tolist() == [steps, 7 + steps]
    assert memory["count"].tolist() == [0.0, 7.0], "what was lent is not changed"


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
def test_methods_that_read_the_gradient_off_the_move_refuse_a_momentum_that_they_cannot_see(method):
    with pytest.raises(FedstillError, match=r"local\.keep_optimizer = false"):
        run(build_method(method)[0].method, training=MOMENTUM)
    run(build_method(method)[0].method, rounds=1, training=dataclasses.replace(MOMENTUM, momentum=0.0))


STUDENT = {"steps": 5, "batch_size": 8, "lr": 1e-2, "lr_schedule": "constant", "clip": None}


@pytest.mark.parametrize("rows", [1.0, 0.5])
def test_a_students_optimiser_goes_on(rows):
    def step_of(keep):
        return build_method("feddf", {"student": {**STUDENT, "keep_optimizer": keep}, "distill_share": rows})[0].method

    kept, fresh = (run(step_of(keep), rounds=3).weights for keep in (True, False))
    assert furthest(kept, fresh) > 1e-4
    one, other = (run(step_of(keep), rounds=1).weights for keep in (True, False))
    assert same_bits(one, other)


def test_a_student_remembers_its_steps_and_moments():
    model = network()
    this = server_round(clients_models(model, 3), model, precision="float64")
    step = whole(build_method("feddf", {"student": {**STUDENT, "keep_optimizer": True}})[0].method)
    state = step.init(this.start)
    for rounds in (1, 2):
        _, state = step.apply(this.start, state, this)
        memory = state["distill"]["optimizer"]
        assert float(memory["count"]) == 5 * rounds
        assert memory["moments"].keys() == {"mean", "square"}
        assert all(float(leaf.abs().max()) > 0 for leaf in memory["moments"]["square"].values())


def test_the_released_preset_keeps_it():
    (step,) = form("feddf", "fedaux_released").server
    assert "optimizer" in step.init(network().init(0))
    assert "optimizer" not in form("feddf", "fedaux").server[0].init(network().init(0))


def test_it_is_refused_where_the_result_is_not_the_last_model():
    with pytest.raises(FedstillError, match=r"method\.student\.keep_optimizer has no use with patience"):
        build_method("feddf", {"student": {"keep_optimizer": True, "patience": 5}})
