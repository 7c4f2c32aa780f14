"""Worker processes; tests of their jobs are in test_side_by_side.py and bench/test_workers.py."""

from fedstill.experiment import worker_pool
from fedstill.experiment.worker_pool import threads_for


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(worker_pool.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(worker_pool.torch, "get_num_threads", lambda: 8)
    assert [threads_for(at_once) for at_once in (1, 3, 20)] == [8, 2, 1]
