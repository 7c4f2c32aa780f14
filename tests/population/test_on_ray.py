"""Ray actors that train clients: they are killed, machines are lost, clusters are too small or not there."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from functools import partial

import pytest
from crews import over
from elsewhere import RecipeOf
from killing import Kills
from on_ray import ROOM_FOR_TWO, STORE, local_ray, modules_of_tests
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.loop import federate as loop
from fedstill.loop.callbacks import Callback
from fedstill.population.on_ray import Share, connected, ray_crew, room_for

LOG = logging.getLogger("fedstill.run")
TWO = partial(ray_crew, count=2)


class Machines:
    """Stands in for the module ray: it knows the resources of machines."""

    def __init__(self, *resources):
        self.resources = resources

    def nodes(self):
        return [{"Alive": True, "Resources": each} for each in self.resources]


def test_gpus_are_divided_among_the_actors_if_nobody_says_otherwise():
    two = Machines({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0})
    assert room_for(two, 4, Share()) == (4, 1.0)
    assert room_for(two, 8, Share()) == (8, 0.5)
    assert room_for(two, 2, Share()) == (2, 1.0)
    assert room_for(Machines({"CPU": 2.0}), 2, Share()) == (2, 0.0)


def test_a_cluster_with_less_room_gets_fewer_actors_and_a_warning(caplog):
    caplog.set_level(logging.WARNING)
    assert room_for(Machines({"CPU": 2.0}, {"CPU": 3.0}), 4, Share(cpus=2)) == (2, 0.0)
    assert "cluster.actors = 4: the cluster has room for 2" in caplog.text


def test_an_actor_that_no_machine_can_hold_is_refused():
    with pytest.raises(FedstillError, match=r"room on no machine of the cluster \(4 CPUs and 1 GPUs in all\)"):
        room_for(Machines({"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}), 2, Share(cpus=4))


def test_without_ray_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FedstillError, match=r"pip install 'fedstill\[ray\]'"), connected("local"):
        pass


@pytest.mark.ray
def test_a_wrong_address_is_one_line():
    wrong = pytest.raises(FedstillError, match=r"cluster.address = '127\.0\.0\.1:1': no Ray cluster answers")
    with wrong as caught, connected("127.0.0.1:1"):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.ray
def test_a_run_whose_actors_are_killed_has_the_bits_of_one_process(caplog):
    recipe = RecipeOf("scaffold", {"rounds": 6})
    plain, kills = loop.federate(recipe.run()), Kills(after=0.0, rounds=6)
    caplog.set_level(logging.INFO, LOG.name)
    LOG.addHandler(kills)
    try:
        with local_ray(**ROOM_FOR_TWO):
            spread = loop.federate(over(recipe, TWO), callbacks=[kills])
    finally:
        LOG.removeHandler(kills)
    assert same_bits(spread.weights, plain.weights)
    assert len(kills.killed) >= 2
    assert all(row["accepted"] == row["cohort"] for row in spread.history.rows)


class KillsAMachine(Callback):
    """Kills the raylet of a machine in the middle of the third round."""

    def __init__(self, process):
        self.process = process

    def on_round(self, row):
        if row["round"] == 2:
            threading.Timer(0.02, os.kill, [self.process, signal.SIGKILL]).start()


@pytest.fixture
def two_machines():
    """A head and a second raylet of this machine, with room for one actor each; yields the process of the second."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        with modules_of_tests():
            cluster.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
            second = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        (raylet,) = second.all_processes["raylet"]
        with local_ray(address=cluster.address):
            yield raylet.process.pid
    finally:
        cluster.shutdown()


@pytest.mark.ray
def test_a_run_on_two_machines_of_which_one_dies_has_the_bits_of_one_process(two_machines):
    for case in ("mixture", "fedaux"):
        recipe = RecipeOf(case)
        assert same_bits(loop.federate(over(recipe, TWO)).weights, loop.federate(recipe.run()).weights)
    recipe = RecipeOf("scaffold", {"rounds": 6})
    began = time.perf_counter()
    spread = loop.federate(over(recipe, TWO), callbacks=[KillsAMachine(two_machines)])
    assert same_bits(spread.weights, loop.federate(recipe.run()).weights)
    assert all(row["accepted"] == row["cohort"] for row in spread.history.rows)
    print(time.perf_counter() - began, [round(row["seconds"], 2) for row in spread.history.rows])
