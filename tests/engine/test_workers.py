"""Workers train clients side by side, and nobody's bits depend on how many there are."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from method_rows import TRAINING, federation, network, row_of
from running import federate
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.trainer import LocalWork, given_threads, threads, threads_are_given
from fedstill.engine import build_engine
from fedstill.engine.workers import Workers
from fedstill.methods.lookup import build_method

CPU = torch.device("cpu")


def workers_of(count: int) -> Workers:
    with threads(count):
        return Workers(CPU)


def sent_by(name: str, net: str, engine: str, chunk: int | None = None, rounds: int = 2):
    """What a cohort sends and remembers after two rounds from two models."""
    data, model = federation(net), network(net)
    trains, ids = build_engine(engine, "cpu", model=model, federation=data, chunk=chunk), np.arange(data.population)
    method = row_of(name).build()
    states = torch.utils._pytree.tree_map(
        lambda leaf: leaf.expand(len(ids), *leaf.shape).clone(), method.objective.init(model.init(0))
    )
    for number in range(1, rounds + 1):
        work = LocalWork(method.objective, replace(TRAINING, lr=0.02), model.init(number), round=number)
        trained = trains.train(work, ids, states)
    weights = trained.uploads.weights
    return {**weights._asdict(), "extra": trained.uploads.extra, "states": trained.states}


@pytest.mark.parametrize(
    ("name", "net", "engine", "chunk"),
    [
        ("fedlmd", "cnn", "looped", None),
        ("moon", "mlp", "looped", None),
        ("fedlmd", "norm", "looped", None),
        ("fedlmd", "adapted", "batched", 2),
    ],
)
def test_bits_do_not_depend_on_the_number_of_workers(name, net, engine, chunk):
    sent = []
    for count in (1, 3):
        with threads(count):
            sent.append(sent_by(name, net, engine, chunk))
    one, three = sent
    assert same_bits(one, three)


def test_every_piece_is_taken_once_and_all_workers_work():
    taken, meet = [], threading.Barrier(3, timeout=10)

    def work(number, waiting):
        meet.wait()  # so all three are there before the pieces are gone
        taken.extend((piece, number) for piece in waiting)

    workers_of(3).do(range(100), work)
    assert sorted(piece for piece, _ in taken) == list(range(100))
    alone = []
    workers_of(3).do(range(1), lambda number, waiting: alone.append((number, list(waiting))))
    assert alone == [(0, [0])]


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_of_any_worker_is_raised_once_all_have_ended(fails):
    def work(number, waiting):
        next(waiting)
        gate.wait()  # so each has a piece
        if number == fails:
            raise FedstillError(f"worker {number}")
        ended.append(list(waiting))

    gate, ended = threading.Barrier(2, timeout=10), []
    with pytest.raises(FedstillError, match=f"worker {fails}"):
        workers_of(2).do(range(2), work)
    assert ended == [[]]


def test_torch_has_one_thread_meanwhile_and_as_many_as_before_afterwards():
    seen = []
    with threads(2):
        workers = Workers(CPU)
        workers.do(range(4), lambda number, waiting: seen.append((torch.get_num_threads(), list(waiting))))
        assert torch.get_num_threads() == 2
    assert {count for count, _ in seen} == {1}


def test_threads_that_somebody_gave_are_torchs_own_and_clients_train_in_turn():
    seen = []
    with given_threads(2):
        assert threads_are_given()
        workers = Workers(CPU)
        with workers.quiet():
            workers.do(range(4), lambda number, waiting: seen.append((number, torch.get_num_threads(), list(waiting))))
    assert seen == [(0, 2, [0, 1, 2, 3])]
    assert not threads_are_given()


@pytest.mark.parametrize("given", [None, 2])
def test_a_run_has_one_thread_of_torch_unless_somebody_gave_the_number(given):
    seen = []

    def look(weights, test, trainer):
        seen.append(torch.get_num_threads())
        return {"accuracy": 0.0}

    def play():
        federate(
            method=build_method("fedavg"), model=network(), federation=federation(), training=TRAINING, rounds=1,
            cohort=2, seed=0, engine="auto", device="cpu", evaluate=look,
        )  # fmt: skip

    if given is None:
        with threads(3):
            play()
    else:
        with given_threads(given):
            play()
    assert set(seen) == {given or 1}


def test_one_model_that_trains_alone_has_all_threads():
    with threads(2):
        workers = Workers(CPU)
    with workers.quiet():
        assert torch.get_num_threads() == 1
        with workers.loud():
            assert torch.get_num_threads() == 2
