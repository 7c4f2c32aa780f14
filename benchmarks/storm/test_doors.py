"""A small part of the storm at the doors; `python benchmarks/storm/doors.py` plays all compositions."""

import pytest
from storm.doors import storm


@pytest.mark.parametrize("name", ["fedavg", "mixture fedaux", "mixture phases"])
def test_struck_messages_change_no_bit_of_a_run(name):
    runs = list(storm(30, seed=7, names=[name]))
    assert [failure for *_, failure in runs if failure] == []
    assert {way for _, way, *_ in runs} == {"over the wire", "in the process"}
