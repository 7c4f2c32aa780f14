"""Repeat `fedstill choose` on the quick start's data, and measure what it chose on seeds that nobody has used.

    python benchmarks/leaderboard/choose_again.py --jobs 10      run the repetitions that are not recorded yet
    python benchmarks/leaderboard/choose_again.py --show         print the table and the statistics of the records

A repetition is a tournament with its own seed, and then runs on the test rows with fresh seeds: of the chosen method,
of the best single methods of the leaderboard's quick start column (computed from docs/results/leaderboard.json) and of
FedAvg. They have the quick start's settings, and a run's figure is the mean accuracy of its last three rounds, as in
that column. No two repetitions share a seed, and the leaderboard and its trials have none of them.

Each repetition is a process with one thread. When it ends, it becomes a line of docs/results/choose.jsonl. It is run
again only if its settings change. A script that was killed goes on where it was: tournaments from their folders in
runs/choose_again, and the runs after them from the file beside the folder. Seconds add up over all starts, but for
those of the run that was killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fedstill import Experiment
from fedstill.experiment.choose import FRESH, choose
from fedstill.methods import METHODS
from fedstill.report.statistics import BASELINE, Difference, corrected_by_holm, difference, estimate
from fedstill.storage.files import lock, write_whole

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "docs" / "results" / "choose.jsonl"
FOLDER = ROOT / "runs" / "choose_again"
FEDERATION = "quickstart"
FIRST_SEED = 20_000  # of repetition 0; the leaderboard and the tournaments on docs/choose.md have seeds below 10,000
APART = 10  # between the seeds of two repetitions, more than a level, a final or a measurement has
MEASURED = 5_000  # added to a repetition's seed for the runs after its tournament; the final adds FRESH
THREADS = "1"
CHOSEN = "chosen"
ROUNDING = 1e-9
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What one repetition does. Records of another plan do not count."""

    budget: str
    fresh_seeds: int
    single: tuple[str, ...]  # the best single methods of the column, the best first
    rounds: int | None = None  # None: the quick start's

    def experiment(self, method: str, seed: int) -> Experiment:
        experiment: Experiment = leaderboard()["experiment_of"](FEDERATION, method, seed)
        return experiment if self.rounds is None else experiment.model_copy(update={"rounds": self.rounds})

    def settings(self, repetition: int) -> Record:
        """Return what a record must agree with: the plan, the seeds, and a digest of the quick start's file."""
        seed = FIRST_SEED + APART * repetition
        file = self.experiment(BASELINE, seed)
        return {
            "repetition": repetition,
            "seed": seed,
            "budget": self.budget,
            "rounds": file.rounds,
            "fresh_seeds": [seed + MEASURED + shift for shift in range(self.fresh_seeds)],
            "single": list(self.single),
            "key": leaderboard()["key_of"](file),
        }


@cache
def leaderboard() -> Mapping[str, Any]:
    """Return the names of the leaderboard's script, so that both have one experiment, one digest and one measure."""
    return MappingProxyType(runpy.run_path(str(HERE / "run.py")))


def best_single(records: Iterable[Record], count: int) -> tuple[str, ...]:
    """Return the quick start column's methods that are no composition and have all seeds, the best mean first."""
    values: dict[str, dict[int, float]] = {}
    for record in records:
        if record["federation"] == FEDERATION and record["method"] in METHODS and "last_rounds" in record:
            values.setdefault(record["method"], {})[record["seed"]] = record["last_rounds"]
    seeds = leaderboard()["SEEDS"]
    means = {
        method: statistics.fmean(of[seed] for seed in seeds) for method, of in values.items() if {*seeds} <= of.keys()
    }
    return tuple(sorted((name for name in means if name != BASELINE), key=lambda name: (-means[name], name))[:count])


# ---- One repetition -------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far a repetition is, in a file that is written again after each run."""

    file: Path
    started: float = field(default_factory=time.monotonic)
    starts: int = 0
    seconds: float = 0.0  # of all starts together
    seconds_to_choice: float | None = None  # when the levels were over and the final began
    seconds_of_choose: float | None = None  # with the final
    runs: list[Record] = field(default_factory=list)  # after the tournament

    def read(self) -> None:
        if self.file.exists():
            for name, value in json.loads(self.file.read_text(encoding="utf-8")).items():
                setattr(self, name, value)
        self.starts += 1
        self.tick()

    def tick(self) -> None:
        """Add the seconds since the last tick, and write the file."""
        now = time.monotonic()
        self.seconds, self.started = self.seconds + now - self.started, now
        table = {name: value for name, value in asdict(self).items() if name not in ("file", "started")}
        write_whole(self.file, json.dumps(table) + "\n")


def repeat(plan: Plan, repetition: int, folder: Path, results: Path, *, side_by_side: int) -> None:
    """Run one repetition, or what is missing of it, and record it."""
    logging.getLogger("fedstill").setLevel(logging.ERROR)  # advice on rates is for a run that somebody watches
    settings, parent = plan.settings(repetition), os.getppid()
    place = folder / f"{repetition}-{plan.budget}-{settings['rounds']}-{settings['key']}"
    with lock(place.with_name(f"{place.name}.lock"), wait=True):  # a killed script's repetition may need seconds to end
        progress = Progress(place.with_name(f"{place.name}.json"))
        progress.read()

        def step(line: str) -> None:
            progress.tick()
            if os.getppid() != parent:
                sys.exit("the script that started this repetition is gone: start it again, and it goes on from here")
            print(f"{repetition}: {progress.seconds:.0f} s: {line.strip()}", flush=True)

        def final(method: str, seed: int) -> tuple[()]:
            step(f"final: {method}, seed {seed}")
            progress.seconds_to_choice = progress.seconds_to_choice or progress.seconds
            return ()

        # the quick start as it stands, with the options that its [method] and [compare] give
        experiment = Experiment.quickstart().model_copy(update={"seed": settings["seed"], "rounds": settings["rounds"]})
        choice = choose(experiment, plan.budget, run_dir=place, tell=step, callbacks=final)
        progress.seconds_of_choose = progress.seconds_of_choose or progress.seconds
        step(f"chosen: {choice.method}")
        known = {(run["method"], run["seed"]) for run in progress.runs}
        for seed in settings["fresh_seeds"]:
            for method in dict.fromkeys((choice.method, *plan.single, BASELINE)):
                if (method, seed) in known:
                    continue
                with tempfile.TemporaryDirectory() as empty:
                    measured = leaderboard()["measure"](plan.experiment(method, seed), Path(empty))
                figures = {name: measured[name] for name in ("last_rounds", "last", "seconds", "bytes")}
                progress.runs.append({"method": method, "seed": seed, **figures})
                step(f"{method}, seed {seed}: {figures['last_rounds']}")
        record = {
            **settings,
            "chosen": choice.method,
            "finalists": choice.record["finalists"],
            "final": {name: mean_of(results) for name, results in choice.comparison.results.items()},
            "candidates": len({line["method"] for line in choice.record["played"]}),
            "spent": choice.record["spent"],
            "final_cost": choice.record["final_cost"],
            "seconds_to_choice": round(progress.seconds_to_choice or progress.seconds_of_choose, 1),
            "seconds_of_choose": round(progress.seconds_of_choose, 1),
            "seconds_in_all": round(progress.seconds, 1),
            "starts": progress.starts,
            "runs": progress.runs,
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "side_by_side": side_by_side,
            "fedstill": version(),
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        add(results, record)


def mean_of(results: Sequence[Any]) -> float:
    """Return the mean over seeds of the last three rounds' accuracy, in percent."""
    last = leaderboard()["LAST"]
    return round(100 * statistics.fmean(result.history.mean_last(last) for result in results), 3)


def version() -> str:
    """Return the version of fedstill that the repository has, because it runs without an installation, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def processor() -> str:
    """Return the processor's name as the system writes it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---- The records ----------------------------------------------------------------------------------------------------


def read_records(path: Path) -> list[Record]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def add(path: Path, record: Record) -> None:
    """Add a line to the records in place of an older one of the repetition; the file is whole at any time."""
    with lock(path.with_suffix(".lock"), wait=True):
        others = [old for old in read_records(path) if old["repetition"] != record["repetition"]]
        records = sorted([*others, record], key=lambda each: each["repetition"])
        write_whole(path, "".join(json.dumps(each) + "\n" for each in records))


def is_recorded(records: Iterable[Record], settings: Record) -> bool:
    return any(all(record.get(name) == value for name, value in settings.items()) for record in records)


# ---- All repetitions ------------------------------------------------------------------------------------------------


def repeat_side_by_side(missing: Sequence[int], arguments: Sequence[str], jobs: int) -> list[int]:
    """Run each repetition in a process of its own, `jobs` at a time, and return those that failed."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, THREADS)}
    waiting, running, failed = list(missing), dict[int, subprocess.Popen[bytes]](), list[int]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` ends the repetitions, too
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                repetition = waiting.pop(0)
                command = [sys.executable, str(Path(__file__)), *arguments, "--only", str(repetition)]
                running[repetition] = subprocess.Popen(command, env=environment)
            time.sleep(0.2)
            for repetition, process in list(running.items()):
                if process.poll() is not None:
                    del running[repetition]
                    failed += [repetition] if process.returncode else []
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


# ---- What the records say -------------------------------------------------------------------------------------------


def accuracies(record: Record, method: str) -> list[float]:
    """Return a method's accuracies, one for each fresh seed."""
    by_seed = {run["seed"]: run["last_rounds"] for run in record["runs"] if run["method"] == method}
    return [by_seed[seed] for seed in record["fresh_seeds"]]


def means(records: Sequence[Record], method: str) -> list[float]:
    """Return the mean over fresh seeds in each repetition; of the method "chosen", what the repetition chose."""
    return [
        statistics.fmean(accuracies(record, record["chosen"] if method == CHOSEN else method)) for record in records
    ]


def gains(records: Sequence[Record]) -> list[Difference]:
    """Compare the chosen methods with each fixed one: a repetition gives one pair, the means over its fresh seeds."""
    fixed = [*records[0]["single"], BASELINE]
    chosen = means(records, CHOSEN)
    return corrected_by_holm([difference(CHOSEN, chosen, method, means(records, method)) for method in fixed])


def gain_in_words(gain: Difference, records: Sequence[Record]) -> str:
    """Say how far the chosen methods are ahead of one method, how sure that is, and how often it was so."""
    gaps = np.subtract(means(records, CHOSEN), means(records, gain.reference))
    runs = np.subtract(
        [accuracies(record, record["chosen"]) for record in records],
        [accuracies(record, gain.reference) for record in records],
    )
    words = f"- chosen − `{gain.reference}`: {signed(gain.mean)} points on average"
    if gain.low is not None and gain.high is not None and gain.p is not None:
        words += f", 95 % interval over repetitions {signed(gain.low)} to {signed(gain.high)}"
        words += f", standard deviation {estimate(gaps.tolist()).std:.1f}, paired t-test p = {gain.p:.2g}"
        words += f" ({gain.p_holm:.2g} after Holm's correction)"
    if gain.p_ranks is not None:
        words += f", Wilcoxon's test p = {gain.p_ranks:.2g}"
    as_good, of = int((gaps >= -ROUNDING).sum()), int((runs >= -ROUNDING).sum())
    return (
        f"{words}. At least as good in {as_good} of {len(gaps)} repetitions and in {of} of {runs.size} pairs of runs."
    )


def show(records: Sequence[Record]) -> str:
    """Return the table of repetitions and the statistics in Markdown."""
    if not records:
        return "no repetition is recorded"
    first = records[0]
    alike = ("budget", "rounds", "single")
    others = [record for record in records if any(record[name] != first[name] for name in alike)]
    if others or len({len(record["fresh_seeds"]) for record in records}) > 1:
        raise SystemExit(
            "the records have several budgets, rounds, methods or numbers of seeds: run the older ones again"
        )
    fixed = [*first["single"], BASELINE]
    names = ["seed", "chosen", "chosen", *(f"`{method}`" for method in fixed), f"chosen − `{fixed[0]}`"]
    rows = [[*names, "s to the choice", "s of choose"], ["---"] * (len(names) + 2)]
    columns = [means(records, method) for method in (CHOSEN, *fixed)]
    for record, *values in zip(records, *columns, strict=True):
        seconds = [f"{record[name]:.0f}" for name in ("seconds_to_choice", "seconds_of_choose")]
        figures = [f"{value:.1f}" for value in values]
        rows.append([str(record["seed"]), f"`{record['chosen']}`", *figures, signed(values[0] - values[1]), *seconds])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(gain_in_words(gain, records) for gain in gains(records))]
    machines = {f"{each['processor']}, {each['cores']} cores, torch {each['torch']}" for each in records}
    longest, jobs = (max(record[name] for record in records) for name in ("seconds_of_choose", "side_by_side"))
    return "\n".join(
        [
            *lines,
            f"- Budget {first['budget']}, {first['rounds']} rounds a run, {len(first['fresh_seeds'])} fresh seeds a "
            f"repetition. The longest tournament took {longest:.0f} s with one thread, its final counted.",
            f"- {'; '.join(sorted(machines))}; at most {jobs} repetitions at a time.",
        ]
    )


def signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0 turns -0.0 into 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print what the records say, and run nothing")
    parser.add_argument("--repetitions", type=int, default=10, help="how many; default: 10")
    parser.add_argument("--jobs", type=int, default=1, help="repetitions at a time, each with one thread; default: 1")
    parser.add_argument("--budget", default="2400rounds", help="of a tournament; default: 2400rounds")
    parser.add_argument("--seeds", type=int, default=5, help="fresh seeds after each tournament; default: 5")
    parser.add_argument("--singles", type=int, default=2, help="how many of the best single methods; default: 2")
    parser.add_argument("--rounds", type=int, help="of a run, for a trial; default: the quick start's")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the tournaments; default: runs/choose_again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the records; default: docs/results/choose.jsonl")
    parser.add_argument("--only", type=int, metavar="R", help="run repetition R in this process")
    given = parser.parse_args()
    if given.show:
        print(show(read_records(given.out)))
        return
    if not 1 <= given.seeds <= APART:
        parser.error(f"--seeds: 1 to {APART}, because the seeds of two repetitions are {APART} apart")
    if not 1 <= given.repetitions <= FRESH // APART:
        parser.error(f"--repetitions: 1 to {FRESH // APART}, because more would share seeds")
    single = best_single(leaderboard()["read_records"](leaderboard()["RESULTS"]), given.singles)
    plan = Plan(given.budget, given.seeds, single, given.rounds)
    if given.only is not None:
        repeat(plan, given.only, given.folder, given.out, side_by_side=given.jobs)
        return
    records = read_records(given.out)
    missing = [place for place in range(given.repetitions) if not is_recorded(records, plan.settings(place))]
    print(f"{len(missing)} repetitions are missing; the best single methods: {', '.join(single)}", flush=True)
    failed = repeat_side_by_side(missing, sys.argv[1:], given.jobs)
    print(show(read_records(given.out)))
    if failed:
        sys.exit(f"repetitions that failed: {', '.join(map(str, failed))}; start the script again, and they go on")


if __name__ == "__main__":
    main()
