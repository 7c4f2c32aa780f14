from __future__ import annotations

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

from fedstill.core.seeds import numpy_generator
from fedstill.core.tree import flatten
from fedstill.loop.checkpoint import list_checkpoints, load_weights

KILLS, ENDLESS = 20, 10**6


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
def test_twenty_kills_and_resumes_give_the_bits_of_an_uninterrupted_run(tmp_path, engine):
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
