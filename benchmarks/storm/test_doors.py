"""A small part of the storm at the doors; `python benchmarks/storm/doors.py` plays all compositions."""

import pytest
from on_ray import ROOM_FOR_TWO, local_ray
from quick import first_quick
from storm.doors import ON_RAY, SPAWNED, storm


@pytest.mark.parametrize("name", first_quick(["mixture fedaux", "fedavg", "mixture phases"]))
def test_struck_messages_change_no_bit_of_a_run(name):
    runs = list(storm(30, seed=7, names=[name]))
    assert [failure for *_, failure in runs if failure] == []
    assert {way for _, way, *_ in runs} == {"over the wire", "in the process"}


@pytest.mark.slow
def test_struck_clients_of_spawned_workers_change_no_bit_of_a_run():
    ((*_, counts, failure),) = storm(10, seed=7, names=["mixture fedaux"], ways=[SPAWNED])
    assert failure == ""
    assert counts.total() >= 10


@pytest.mark.ray
def test_struck_clients_of_actors_change_no_bit_of_a_run():
    with local_ray(**ROOM_FOR_TWO):
        ((*_, counts, failure),) = storm(10, seed=7, names=["mixture fedaux"], ways=[ON_RAY])
    assert failure == ""
    assert counts.total() >= 10
