"""engine.compile: the server's own training by torch.compile is the same training."""

from functools import partial

import numpy as np
import pytest
import torch
from engine_cases import MODULES, assert_close, dataset, engine_for, network, reads_images

from fedstill import Experiment, run
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.local.terms import cross_entropy
from fedstill.server.contrastive import simclr_pretext

COUNT = 24
ADAM = Training(epochs=2, batch_size=8, optimizer="adam", lr=5e-3)
COMPILE = torch.compile


@pytest.fixture
def compiled(monkeypatch):
    """All that torch.compile is asked for, traced whole: with `fullgraph` a break in the graph is an error."""
    asked = []

    def traced(function, **how):
        asked.append(function)
        return partial(COMPILE, backend="aot_eager", fullgraph=True)(function, **how)

    monkeypatch.setattr(torch, "compile", traced)
    yield asked
    torch.compiler.reset()


def both(net, train):
    """What a plain engine and a compiling one make of it."""
    return train(engine_for("looped", net)), train(engine_for("looped", net, compile=True))


@pytest.mark.parametrize("net", sorted(MODULES))
def test_a_compiled_fit_is_the_same_training(net, compiled):
    data, start, objective = dataset(COUNT, images=reads_images(net)), network(net).init(0), cross_entropy()
    plain, other = both(net, lambda engine: engine.fit(objective, start, data.x, data.y, ADAM, 3))
    assert len(compiled) == 1
    assert_close(other, plain)
    moved = [(a - b).abs().max() for a, b in zip(flatten(plain).values(), flatten(start).values(), strict=True)]
    assert max(float(m) for m in moved) > 1e-3


def test_a_compiled_part_of_a_training_hands_on_the_same_optimiser(compiled):
    data, start, objective = dataset(COUNT, images=reads_images("norm")), network("norm").init(0), cross_entropy()
    parts = both("norm", lambda engine: engine.proceed(objective, start, data.x, data.y, ADAM, 3, optimizer={}))
    assert len(compiled) == 1
    assert_close(parts[1].optimizer, parts[0].optimizer)
    assert float(parts[1].loss) == pytest.approx(float(parts[0].loss), rel=1e-5)


def test_compiled_pre_training_with_two_views_is_the_same(compiled):
    pretext = simclr_pretext(Training(epochs=1, batch_size=8, optimizer="adam", lr=1e-3))
    x = torch.randint(0, 256, (16, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)

    def train(engine):
        model = pretext.model(engine.model)
        lent = engine.lend(model)
        return lent.proceed(
            pretext.objective, model.init(0), x, pretext.targets(x), pretext.training, 0, optimizer={}
        ).weights

    plain, other = both("convnorm", train)
    assert len(compiled) == 1
    assert_close(other, plain)


def test_clients_are_not_compiled(compiled):
    engine, start = engine_for("looped", "mlp", compile=True), network("mlp").init(0)
    engine.train(cross_entropy(), ADAM, start, received={}, states={}, ids=np.arange(2), round=1, seed=0)
    assert not compiled


def test_the_option_of_an_experiment_reaches_the_engine(compiled):
    """FedDF's student is trained by the server."""
    experiment = Experiment(
        rounds=1,
        cohort=2,
        data={"source": "digits", "unlabeled": 60},
        partition={"scheme": "iid", "clients": 3},
        model={"name": "mlp", "hidden": [8]},
        algorithm={"name": "feddf", "epochs": 1},
        engine={"compile": True, "device": "cpu"},
    )
    run(experiment)
    assert len(compiled) == 1
