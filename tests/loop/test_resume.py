"""What a resume refuses: another training, and a checkpoint of an older version."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import killable
import pytest
import torch
from quick import first_quick
from run_helpers import LoopEngine, fedavg, linear_model, toy_federation
from running import federate
from torch import nn

from fedstill.about.toy import CLASSES, SHAPE, trial_federation
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.loop import resume
from fedstill.loop.callbacks import Callback
from fedstill.loop.checkpoint import list_checkpoints, load_newest, load_weights, save_checkpoint
from fedstill.loop.resume import SaveClock
from fedstill.methods.lookup import build_method
from fedstill.models import from_module

TRAINING = Training(batch_size=6, lr=0.2)


def run(folder, *, rounds, training=TRAINING, **settings):
    federation, model = toy_federation(), linear_model()
    return federate(
        method=fedavg(), model=model, federation=federation, engine=LoopEngine(model, federation), run_dir=folder,
        training=training, rounds=rounds, cohort=5, checkpoint_every=1, **settings,
    )  # fmt: skip


def test_a_refusal_names_the_keys_that_differ_and_no_others(tmp_path):
    run(tmp_path, rounds=1)
    other = dataclasses.replace(TRAINING, keep_optimizer=True, momentum=0.9)
    with pytest.raises(FedstillError) as refused:
        run(tmp_path, rounds=2, resume=True, training=other)
    assert ": training.momentum was 0.0 and is 0.9 now, training.keep_optimizer was False and is True now; use" in str(
        refused.value
    )


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path):
    run(tmp_path, rounds=1)
    state = load_newest(tmp_path / "checkpoints", LoopEngine.device)
    older = {key: value for key, value in state.identity.items() if key != "sampling"}
    save_checkpoint(dataclasses.replace(state, identity=older), tmp_path / "checkpoints")
    with pytest.raises(FedstillError, match=r"written by an older fedstill \(no sampling in its checkpoint\)"):
        run(tmp_path, rounds=2, resume=True)


# A resumed run with convolutions and frozen teachers, which a checkpoint must not change by the order of memory.

SHORT = "batch_size=4, generator.noise=3, student.steps=2"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def run_convolutions(text, **how):
    (phase,) = build_method(text)
    return federate(
        method=phase.method, model=from_module(Net, input_shape=SHAPE, classes=CLASSES, check=False),
        federation=trial_federation(), training=Training(batch_size=8, lr=0.05), cohort=2, checkpoint_every=1,
        engine="looped", device="cpu", **how,
    ).weights  # fmt: skip


@pytest.mark.parametrize(
    "text",
    first_quick(
        [
            f"moon+fedftg(iterations=2, {SHORT})",
            f"moon+feddf_gen(generator.steps=2, {SHORT})",
            f"fedntd+fedftg(iterations=2, {SHORT})",
            "moon+feddf(student.steps=2, student.batch_size=4)",
        ]
    ),
)
def test_it_equals_the_uninterrupted_one_bit_for_bit(text, tmp_path):
    whole = flatten(run_convolutions(text, rounds=4))
    run_convolutions(text, rounds=2, run_dir=tmp_path)
    resumed = flatten(run_convolutions(text, rounds=4, run_dir=tmp_path, resume=True))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


# Checkpoints that time asks for, beside those of `checkpoint_every`.


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


def run_nine_rounds(**settings):
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
        run_nine_rounds(checkpoint_every=100, run_dir=tmp_path, callbacks=[Slow(now, seconds)])
    assert [number for number, _ in list_checkpoints(tmp_path / "checkpoints")] == saved


def test_without_a_folder_there_is_nothing_to_save(now):
    with pytest.raises(KeyboardInterrupt):
        run_nine_rounds(callbacks=[Slow(now, 100.0)])


KILLS, ENDLESS = 25, 10**6


def run_and_kill(folder: Path, engine: str, moment: float, *, wait: bool) -> None:
    """Kill -9 `moment` seconds after the first round (or, without `wait`, after the start of the process)."""
    with start(folder, engine, ENDLESS) as process:
        if wait:
            assert process.stdout.readline() == "ready\n"
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def start(folder: Path, engine: str, rounds: int) -> subprocess.Popen:
    command = [sys.executable, killable.__file__, str(folder), engine, str(rounds)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)


def newest(folder: Path) -> int:
    return next((number for number, _ in list_checkpoints(folder / "checkpoints")), 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_twenty_five_kills_and_resumes_give_the_bits_of_an_uninterrupted_run(tmp_path, engine):
    generator = numpy_generator(int.from_bytes(engine.encode(), "little"))
    folder, reached = tmp_path / "killed", []
    for kill in range(KILLS):
        wait = kill % 5 > 0  # the others die while they start or read the checkpoint
        run_and_kill(folder, engine, generator.uniform(0.0, 0.1 if wait else 2.0), wait=wait)
        reached.append(newest(folder))
    assert sorted(reached) == reached
    assert len(set(reached)) > 3
    rounds = reached[-1] + 5
    with start(folder, engine, rounds) as process:
        process.communicate()
    assert process.returncode == 0
    whole = killable.run(tmp_path / "whole", engine, rounds)
    for kind, expected in (("last", whole.weights), ("best", whole.best_weights)):
        found, expected = flatten(load_weights(folder / kind)), flatten(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in whole.history.rows]
