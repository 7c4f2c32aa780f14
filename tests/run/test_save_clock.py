"""Checkpoints that time asks for, beside those of `checkpoint_every`."""

from __future__ import annotations

import pytest
from run_helpers import LoopEngine, fedavg, linear_model, toy_federation
from running import federate

from fedstill.core.types import Training
from fedstill.loop import resume
from fedstill.loop.callbacks import Callback
from fedstill.loop.checkpoint import list_checkpoints
from fedstill.loop.resume import SaveClock


@pytest.fixture
def now(monkeypatch):
    """What the clock shows, in seconds."""
    time = [100.0]
    monkeypatch.setattr(resume.time, "perf_counter", lambda: time[0])
    return time


def test_a_checkpoint_is_due_after_a_minute_without_one(now):
    clock = SaveClock()
    now[0] += 60
    assert not clock.is_due()
    now[0] += 1
    assert clock.is_due()
    with clock:
        now[0] += 1
    assert not clock.is_due()
    now[0] += 61
    assert clock.is_due()


def test_large_checkpoints_are_due_more_seldom(now):
    """Ten seconds to write are a twentieth of two hundred."""
    clock = SaveClock()
    with clock:
        now[0] += 10
    now[0] += 199
    assert not clock.is_due()
    now[0] += 2
    assert clock.is_due()


def run(**settings):
    model, federation = linear_model(), toy_federation()
    how = {"training": Training(batch_size=6), "rounds": 9, "cohort": 5, "engine": LoopEngine(model, federation)}
    federate(method=fedavg(), model=model, federation=federation, **how, **settings)


class Slow(Callback):
    """A round takes a while, and the fifth does not end."""

    def __init__(self, now, seconds):
        self.now, self.seconds = now, seconds

    def on_round(self, row):
        self.now[0] += self.seconds
        if row["round"] == 5:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("seconds", "saved"), [(100.0, [4, 3, 2]), (25.0, [3]), (1.0, [])])
def test_a_run_that_is_stopped_loses_a_minute_not_all_rounds_since_the_last_checkpoint(tmp_path, now, seconds, saved):
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint_every=100, run_dir=tmp_path, callbacks=[Slow(now, seconds)])
    assert [number for number, _ in list_checkpoints(tmp_path / "checkpoints")] == saved


def test_without_a_folder_there_is_nothing_to_save(now):
    with pytest.raises(KeyboardInterrupt):
        run(callbacks=[Slow(now, 100.0)])
