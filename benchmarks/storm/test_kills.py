"""A small part of the storm of kills; `python benchmarks/storm/kills.py` plays all experiments."""

import pytest
from storm.kills import Runs, double_starts, kills

NAME = "hostile clients"  # its audit has lines


@pytest.mark.slow
def test_a_run_that_is_killed_and_a_run_that_is_started_twice_are_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runs = Runs(NAME, tmp_path)
    assert (runs.whole / "audit.jsonl").read_text()
    came = [*kills(runs, 2, seed=7), *double_starts(runs, 1, seed=7)]
    assert [fault for _, fault in came if fault] == []
    assert len(came) >= 2
