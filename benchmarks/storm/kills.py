"""Processes of `fedstill run` that die by kill -9 at random moments, and starts of two processes in one folder.

    python benchmarks/storm/kills.py --kills 50 --double-starts 20 --seed 1

A run is started, killed, resumed and killed again until it ends. It must then be the run that nobody disturbed: each
round has one line in metrics.jsonl, the lines of audit.jsonl are the same, and so is every bit of the last and the best
model. Of two processes that start in one folder, one is refused in one line, and the run of the other one is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from file_damage import rounds_of  # noqa: E402
from toy import same_bits  # noqa: E402

from fedstill import Experiment  # noqa: E402
from fedstill.experiment.overrides import attack_table  # noqa: E402
from fedstill.loop.checkpoint import load_weights  # noqa: E402

CLOCK = ("seconds", "time")  # how names begin of what a row says of the clock
EARLY = 0.2  # share of the kills that strike at some moment after the start of the process
REFUSED = 2  # the exit code of a user's mistake
PATIENCE = 300.0  # seconds in which a process must come to its first new round, or end

BASE: dict[str, Any] = {
    "rounds": 300, "cohort": 4, "evaluate_every": 5, "checkpoint_every": 7, "data": {"source": "digits"},
    "partition": {"scheme": "lda", "clients": 10, "alpha": 0.3}, "model": {"name": "mlp", "hidden": [16]},
    "engine": {"device": "cpu", "threads": 1},
}  # fmt: skip
SERVER_ROWS = {"source": "digits", "unlabeled": 200}
REFINED = "student.steps=5, student.batch_size=32"
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "memory of clients": {"method": "scaffold"},
    "data of the server": {"method": f"feddf({REFINED})", "data": SERVER_ROWS},
    "phases": {"method": f"feddyn until 150 then fedavgm+feddf({REFINED})", "data": SERVER_ROWS},
    "optimisers of clients": {"method": "fedlmd", "local": {"optimizer": "adam", "lr": 0.001, "keep_optimizer": True}},
    "hostile clients": {"method": "scaffold", "attack": attack_table("scale:1000:0.2")},
}


@dataclass
class Runs:
    """Starts processes of one experiment below `place`, and knows its run that nobody disturbed."""

    name: str
    place: Path

    def __post_init__(self) -> None:
        self.file = self.place / "experiment.toml"
        experiment = Experiment.model_validate({**BASE, **EXPERIMENTS[self.name]})
        self.rounds = experiment.rounds
        self.file.write_text(experiment.to_toml())
        self.whole = self.place / "whole"
        began = time.monotonic()
        with self.start(self.whole) as process:
            _, errors = process.communicate()
        if process.returncode:
            raise AssertionError(errors)
        rows = (self.whole / "metrics.jsonl").read_text().splitlines()
        self.seconds = sum(json.loads(row)["seconds"] for row in rows)
        self.seconds_before = time.monotonic() - began - self.seconds

    def start(self, folder: Path, *, resume: bool = False) -> subprocess.Popen[str]:
        words = ["resume", str(folder)] if resume else ["run", str(self.file), "--out", str(folder)]
        command = [sys.executable, "-m", "fedstill", *words, "--quiet"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def fault(self, folder: Path) -> str:
        """Return in what the run in `folder` differs from the undisturbed one; empty: in nothing."""
        if rounds_of(folder) != list(range(1, self.rounds + 1)):
            return f"lines of the rounds {rounds_of(folder)}"
        if _lines(folder / "metrics.jsonl") != _lines(self.whole / "metrics.jsonl"):
            return "other numbers in metrics.jsonl"
        if _lines(folder / "audit.jsonl") != _lines(self.whole / "audit.jsonl"):
            return "other lines in audit.jsonl"
        models = ("last", "best")
        same = all(same_bits(load_weights(folder / each), load_weights(self.whole / each)) for each in models)
        return "" if same else "other bits"


def _lines(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]


def kills(runs: Runs, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kill processes until `count` have died; yield what each run was, and its fault once it has ended."""
    draw, killed, turn = random.Random(f"{seed} {runs.name}"), 0, 0
    while killed < count:
        folder, resumed, reached = runs.place / f"killed-{turn}", 0, []
        while True:
            lines = _size(folder)
            with runs.start(folder, resume=(folder / "config.toml").exists()) as process:
                if killed < count and not _ends(process, folder, lines, draw, runs):
                    process.kill()
                _, errors = process.communicate()
            if process.returncode != -9:
                break
            killed, resumed = killed + 1, resumed + 1
            reached.append(len(rounds_of(folder)))
        fault = runs.fault(folder) if process.returncode == 0 else f"exit code {process.returncode}: {errors}"
        yield f"{runs.name}: killed in rounds {reached}", fault
        turn += 1


def _ends(process: subprocess.Popen[str], folder: Path, lines: int, draw: random.Random, runs: Runs) -> bool:
    """Wait for a random moment; return whether the process has ended before it."""
    if draw.random() < EARLY:
        return _ended(process, draw.uniform(0.0, runs.seconds_before))
    limit = time.monotonic() + PATIENCE
    while _size(folder) == lines and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    return _ended(process, draw.uniform(0.0, runs.seconds / 3))


def _ended(process: subprocess.Popen[str], within: float) -> bool:
    try:
        process.wait(within)
    except subprocess.TimeoutExpired:
        return False
    return True


def _size(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.stat().st_size if file.exists() else 0


def double_starts(runs: Runs, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Let two processes start in one folder; yield how, and what was wrong, if anything."""
    draw = random.Random(f"{seed} twice {runs.name}")
    for turn in range(count):
        folder, how = runs.place / f"twice-{turn}", draw.choice(["run and run", "run and resume", "resume and resume"])
        first, _, second = how.split()
        if first == "resume":  # something to go on with: a run that was killed in its middle
            with runs.start(folder) as process:
                while _size(folder) == 0 and process.poll() is None:
                    time.sleep(0.005)
                process.kill()
        later = draw.choice([0.0, draw.uniform(0.0, runs.seconds_before + runs.seconds / 2)])
        earlier = runs.start(folder, resume=first == "resume")
        time.sleep(later)
        other = runs.start(folder, resume=second == "resume")
        ends = [(process.communicate()[1].strip(), process.returncode) for process in (earlier, other)]
        refused = [errors for errors, code in ends if code == REFUSED]
        one_line = all(len(errors.splitlines()) == 1 for errors in refused)
        fine = {0} <= {code for _, code in ends} <= {0, REFUSED} and one_line
        outcome = "one refused" if refused else "one found the run finished"
        yield f"{runs.name}: {how}, {later:.2f} s apart, {outcome}", runs.fault(folder) if fine else f"{ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--double-starts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, help="an experiment; the numbers stay for all")
    options = parser.parse_args()
    failures = done = 0
    for name in options.only or EXPERIMENTS:
        with tempfile.TemporaryDirectory() as place:
            os.environ |= {"OMP_NUM_THREADS": "1", "FEDSTILL_STATE": f"{place}/state"}
            runs = Runs(name, Path(place))
            share = len(EXPERIMENTS)
            for tries in (
                kills(runs, -(-options.kills // share), options.seed),
                double_starts(runs, -(-options.double_starts // share), options.seed),
            ):
                for trial, fault in tries:
                    failures, done = failures + bool(fault), done + 1
                    print(f"{trial}: {fault or 'whole'}", flush=True)
    print(f"{done} runs, seed {options.seed}: {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
