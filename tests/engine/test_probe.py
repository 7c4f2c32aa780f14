"""How many clients are trained at once when nobody says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import assert_close, assert_same_bits, engine_for, federation, reads_images, train

from fedstill.core.tree import clone
from fedstill.core.types import Training
from fedstill.engine import group as probe_module
from fedstill.engine.group import chunk_budget
from fedstill.local.terms import cross_entropy

TRAINING = Training(batch_size=4, lr=0.05, momentum=0.9)


def runner_of(engine):
    """The program and runner that the engine built for its only objective."""
    ((program, runner),) = engine.programs.values()
    return program, runner


@pytest.mark.parametrize("net", ["mlp", "cnn", "convnorm"])
def test_the_trial_step_finds_the_cost_of_a_client_and_leaves_no_trace(net):
    engine = engine_for("batched", net, federation(images=reads_images(net)))
    start = engine.model.init(3)
    before = clone(start)
    train(engine, TRAINING, start=start)
    program, _ = runner_of(engine)
    weights = sum(leaf.numel() * 4 for leaf in start.params.values())
    assert program.memory >= 4 * weights
    assert set(program.layout) == {name for name, leaf in start.params.items() if leaf.ndim >= 1}
    for name, order in program.layout.items():
        assert sorted(order) == list(range(start.params[name].ndim))
    assert_same_bits(start, before)


def test_larger_batches_take_more_memory():
    needed = []
    for batch in (2, 8, 32):
        engine = engine_for("batched", "mlp", federation((40, 40)))
        train(engine, Training(batch_size=batch, lr=0.1))
        needed.append(runner_of(engine)[0].memory)
    assert needed[0] < needed[1] < needed[2]


def test_a_cohort_that_does_not_fit_is_cut_and_gives_the_same(monkeypatch):
    data = federation((3, 5, 8, 2, 7, 6, 4))
    whole = train(engine_for("batched", "norm", data), TRAINING).uploads.weights
    engine = engine_for("batched", "norm", data)
    monkeypatch.setattr("fedstill.engine.engine.chunk_budget", lambda device, program: int(2.5 * program.memory))
    cut = train(engine, TRAINING).uploads.weights
    assert runner_of(engine)[1].chunk == 2
    assert_close(cut, whole)


def test_a_chunk_that_is_asked_for_is_used_and_is_never_more_than_the_cohort():
    for asked, used in ((3, 3), (None, 5)):
        engine = engine_for("batched", "mlp", federation((4,) * 5), chunk=asked)
        train(engine, TRAINING)
        assert runner_of(engine)[1].chunk == used


def test_the_budget_of_a_cpu_holds_at_least_eight_clients_and_never_the_whole_machine(monkeypatch):
    engine = engine_for("batched", "mlp")
    train(engine, TRAINING)
    program = runner_of(engine)[0]
    cpu = torch.device("cpu")
    assert chunk_budget(cpu, program) == probe_module.CPU_CHUNK_BYTES
    program.memory = 100 << 20
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 24)  # 64 GiB
    assert chunk_budget(cpu, program) == 8 * program.memory
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 18)  # 1 GiB
    assert chunk_budget(cpu, program) == 256 << 20


def test_a_client_larger_than_the_budget_still_trains(monkeypatch):
    monkeypatch.setattr("fedstill.engine.engine.chunk_budget", lambda device, program: 0)
    engine = engine_for("batched", "mlp")
    uploads = train(engine, TRAINING, objective=cross_entropy(), ids=np.array([0, 1])).uploads
    assert runner_of(engine)[1].chunk == 1
    assert uploads.ids.tolist() == [0, 1]
