"""Processes of this machine that train clients: they start, die, and share GPUs."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from crews import over
from elsewhere import RecipeOf
from killing import Kills
from method_rows import federation
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.loop import federate as loop
from fedstill.population import spawned
from fedstill.population.spawned import spawned_crew
from fedstill.population.worker import Kit, outline_of, rows_of

TWO = partial(spawned_crew, count=2)


@pytest.fixture
def no_processes(monkeypatch):
    """Crews whose workers are never started; yields what each would be started with."""
    begun = []
    monkeypatch.setattr(spawned.SpawnedCrew, "_start", lambda crew, worker: begun.append(crew.place_of(worker)))
    return begun


def start(device, count, **how):
    kit = Kit(RecipeOf("fedavg"), outline_of(federation()), device, 0, 1)
    with spawned_crew(kit, rows_of(federation()), count=count, **how):
        pass


def test_gpus_are_shared_out_in_turn(no_processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    start("auto", 3)
    assert no_processes == [("cuda", "0"), ("cuda", "1"), ("cuda", "0")]
    no_processes.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    start("cuda", 2)
    assert no_processes == [("cuda", "4"), ("cuda", "7")]


def test_a_device_that_is_named_is_the_device_of_all_workers(no_processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    start("cuda:1", 2)
    start("cpu", 1)
    start("auto", 1, use_gpus=False)
    assert no_processes == [("cuda:1", None), ("cuda:1", None), ("cpu", None), ("cpu", None)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixture", "head", "fedaux", "dp_fedavg-10.0-0.001"])
def test_processes_train_with_the_bits_of_one(case):
    """Noise that protects follows from a secret, so both runs have the same one."""
    recipe, secret = RecipeOf(case), bytes(32)
    here, spread = (replace(built, secret=secret) for built in (recipe.run(), over(recipe, TWO)))
    assert same_bits(loop.federate(spread).weights, loop.federate(here).weights)


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_in_every_round_has_the_bits_of_one(caplog):
    recipe, log = RecipeOf("scaffold", {"rounds": 8}), logging.getLogger("fedstill.run")
    plain, kills = loop.federate(recipe.run()), Kills(after=0.0, rounds=8)
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(kills)
    try:
        spread = loop.federate(over(recipe, TWO), callbacks=[kills])
    finally:
        log.removeHandler(kills)
    assert same_bits(spread.weights, plain.weights)
    assert len(kills.killed) >= 4
    assert all(row["accepted"] == row["cohort"] for row in spread.history.rows)


@pytest.mark.slow
def test_a_run_that_cannot_travel_is_refused_with_one_line():
    with pytest.raises(FedstillError, match=r"cannot go to another process .*FILE\.py:function"):
        loop.federate(over(RecipeOf("fedavg", {"guard": None, "evaluate": lambda *_: {}}), TWO))
