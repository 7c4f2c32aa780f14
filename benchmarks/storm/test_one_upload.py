"""A small part of one hostile upload; `python benchmarks/storm/one_upload.py` plays all kinds and methods."""

import pytest
from storm import one_upload

from fedstill.loop import guard

FOUR_TIMES = one_upload.slots(lambda slot: -4 * slot)  # short enough to pass all rules about lengths


@pytest.mark.parametrize(("seed", "kind"), [(0, one_upload.KINDS["slots x -15"]), (5, FOUR_TIMES)])
def test_one_slot_sent_several_times_backwards_costs_scaffold_less_than_two_points(monkeypatch, seed, kind):
    monkeypatch.setitem(one_upload.FEDERATION, "guard", {"outlier": 20.0})
    clean, struck = (one_upload.accuracy("scaffold", seed, one) for one in (None, kind))
    assert struck >= clean - 0.02
    if seed:
        return
    monkeypatch.setitem(one_upload.FEDERATION, "guard", {"outlier": 0.0})
    monkeypatch.setattr(guard, "_contradictions", lambda sent, implied: {})
    assert one_upload.accuracy("scaffold", 0, one_upload.KINDS["slots x -15"]) < clean - 0.02  # what it would cost
