"""A small part of one hostile upload; `python benchmarks/storm/one_upload.py` plays all kinds and methods."""

from storm import one_upload


def test_one_slot_sent_fifteen_times_backwards_costs_scaffold_less_than_two_points(monkeypatch):
    monkeypatch.setitem(one_upload.FEDERATION, "guard", {"outlier": 20.0})
    clean, struck = (one_upload.accuracy("scaffold", 0, kind) for kind in (None, one_upload.KINDS["slots x -15"]))
    assert struck >= clean - 0.02
    monkeypatch.setitem(one_upload.FEDERATION, "guard", {"outlier": 0.0})
    assert one_upload.accuracy("scaffold", 0, one_upload.KINDS["slots x -15"]) < clean - 0.02  # what it would cost
