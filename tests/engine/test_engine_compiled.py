"""engine.compile: the server's own training by torch.compile is the same training."""

import importlib.util
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from engine_cases import MODULES, assert_close, dataset, engine_for, network, reads_images

from fedstill import Experiment, run
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import Lesson, LocalWork
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.engine import check_compiler
from fedstill.local.terms import cross_entropy
from fedstill.methods.pretraining.contrastive import simclr_pretext

COUNT = 24
ADAM = Training(epochs=2, batch_size=8, optimizer="adam", lr=5e-3)
COMPILE = torch.compile
STEPS = 6  # two epochs of three batches


@pytest.fixture
def traces(monkeypatch):
    """A list that gets one entry for every call of a traced step. `fullgraph`: a break in a trace is an error."""
    calls = []

    def backend(graph, examples):
        def counted(*given):
            calls.append(graph)
            return graph(*given)

        return counted

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend, fullgraph=True))
    torch.compiler.reset()
    return calls


def both(net, train):
    """What a plain engine and a compiling one make of it."""
    return train(engine_for("looped", net)), train(engine_for("looped", net, compile=True))


@pytest.mark.slow
@pytest.mark.parametrize("net", sorted(MODULES))
def test_a_compiled_fit_is_the_same_training(net, traces):
    data, start, objective = dataset(COUNT, images=reads_images(net)), network(net).init(0), cross_entropy()
    plain, other = both(net, lambda engine: engine.fit(Lesson(objective, data.x, data.y, ADAM), start, 3).weights)
    assert len(traces) == STEPS
    assert_close(other, plain)
    moved = [(a - b).abs().max() for a, b in zip(flatten(plain).values(), flatten(start).values(), strict=True)]
    assert max(float(m) for m in moved) > 1e-3


@pytest.mark.slow
def test_a_compiled_part_of_a_training_hands_on_the_same_optimiser(traces):
    data, start, objective = dataset(COUNT, images=reads_images("norm")), network("norm").init(0), cross_entropy()
    parts = both("norm", lambda engine: engine.fit(Lesson(objective, data.x, data.y, ADAM), start, 3, optimizer={}))
    assert len(traces) == STEPS
    assert_close(parts[1].optimizer, parts[0].optimizer)
    assert float(parts[1].loss) == pytest.approx(float(parts[0].loss), rel=1e-5)


@pytest.mark.slow
def test_compiled_pre_training_with_two_views_is_the_same(traces):
    pretext = simclr_pretext(Training(epochs=1, batch_size=8, optimizer="adam", lr=1e-3))
    x = torch.randint(0, 256, (16, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)

    def train(engine):
        model = pretext.model(engine.model)
        lent = engine.lend(model)
        return lent.fit(
            Lesson(pretext.objective, x, pretext.targets(x), pretext.training), model.init(0), 0, optimizer={}
        ).weights

    plain, other = both("convnorm", train)
    assert len(traces) == 2  # 16 images in batches of 8
    assert_close(other, plain)


def test_clients_on_a_cpu_are_not_compiled(traces):
    engine, start = engine_for("looped", "mlp", compile=True), network("mlp").init(0)
    engine.train(LocalWork(cross_entropy(), ADAM, start), np.arange(2), {})
    assert not traces


@pytest.mark.slow
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_sets_of_many_sizes_take_two_traces_and_give_the_same(net, traces):
    """Rows that a threshold keeps differ from round to round: a batch that is not full stays padded."""
    data, start, objective = dataset(COUNT, images=False), network(net).init(0), cross_entropy()

    def train(engine):
        sets = [torch.arange(rows) for rows in range(9, COUNT)]
        return [engine.fit(Lesson(objective, data.x, data.y, ADAM, rows), start, 3).weights for rows in sets]

    plain, other = both(net, train)
    assert_close(dict(enumerate(other)), dict(enumerate(plain)))
    assert len({id(graph) for graph in traces}) <= 2


@pytest.mark.slow
def test_trainings_do_not_share_the_number_of_traces_that_torch_allows(traces):
    """Eight for one code object: the ninth of a process would quietly run as it is."""
    data, start, objective = dataset(COUNT, images=False), network("mlp").init(0), cross_entropy()
    engine = engine_for("looped", "mlp", compile=True)
    for size in (1, 2, 3, 4, 6, 8, 12, 24, 23, 22, 21):
        before = len(traces)
        engine.fit(Lesson(objective, data.x, data.y, replace(ADAM, batch_size=size)), start, 3)
        assert len(traces) == before + 2 * math.ceil(COUNT / size)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", "C++ compiler"), ("cuda", "triton")])
def test_a_compiler_that_is_missing_is_told_before_the_first_round(device, wanted, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FedstillError, match=f"engine.compile: torch.compile needs .*{re.escape(wanted)}"):
        check_compiler(torch.device(device))


@pytest.mark.slow
def test_the_option_of_an_experiment_reaches_the_engine(traces):
    """FedDF's student is trained by the server."""
    experiment = Experiment(
        rounds=1,
        cohort=2,
        data={"source": "digits", "unlabeled": 60},
        partition={"scheme": "iid", "clients": 3},
        model={"name": "mlp", "hidden": [8]},
        method={"name": "feddf", "student": {"epochs": 1, "batch_size": 32}},
        engine={"compile": True, "device": "cpu"},
    )
    run(experiment)
    assert len(traces) == 2  # 60 samples in batches of 32
