"""Time a round of FedAvg in fedstill, other libraries and a plain loop, by turns, and write docs/results/peers.json.

    python benchmarks/peers/run.py [--cases mlp-1000,cnn-10] [--only pfl,flower] [--settings 'one thread'] [--turns 3]

The first call makes an environment for each library in .venv-peers (five minutes, 5 GB). The plain loop
has the environment of this command. All begin at the same weights and take the same number of steps on the same rows.
The script first checks this, with one batch of all rows, in which no order matters: one round must give the weights of
the plain loop. Then it runs each library as a process of its own, in turn. A process plays a round that does not count
and some that do. What is named replaces what the record has of it. `python tools/make_peers_table.py` writes the table.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from work import CASES, MARK, processes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = ROOT / "docs" / "results" / "peers.json"
PEERS = {"pfl": "pfl", "fedlab": "fedlab", "flower": "flwr", "fluke": "fluke"}
PACKAGES = {"fedstill": "fedstill", "plain": "torch"} | PEERS
AS_IT_COMES, ONE, TWO = "as it comes", "one thread", "two processes"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS: dict[str, dict[str, dict[str, str]]] = {name: {AS_IT_COMES: {}, ONE: ONE_THREAD} for name in PACKAGES}
SETTINGS["pfl"][TWO] = ONE_THREAD
SETTINGS["flower"][ONE] = {**ONE_THREAD, "PEERS_CPUS": "1", "PEERS_ALL": "1"}
SETTINGS["flower"][TWO] = {**ONE_THREAD, "PEERS_CPUS": "1", "PEERS_ALL": "2"}
ROUNDS = {"mlp-50": 6, "mlp-1000": 3, "cnn-10": 3}  # the first does not count
CLOSE = 1e-5  # two models of one round: float32 sums in another order
IMPORTS = 3
SAMPLED = 0.5  # seconds between two looks at the memory


def set_up(name: str) -> None:
    """Make the environment of a library, unless it is there with these requirements."""
    if name not in PEERS:
        return
    folder, wanted = ROOT / ".venv-peers" / name, HERE / f"requirements-{name}.txt"
    done = folder / "made-from.txt"
    if done.exists() and done.read_text() == wanted.read_text():
        return
    print(f"setting up {name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--requirement", wanted], check=True)
    done.write_text(wanted.read_text())


def python(name: str) -> str:
    return sys.executable if name not in PEERS else str(ROOT / ".venv-peers" / name / "bin" / "python")


def environment(added: dict[str, str]) -> dict[str, str]:
    """Return this process's environment without a number of threads; Flower and Ray send no reports of use."""
    kept = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    kept |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT / "src")}
    return kept | added


def memory(mark: str) -> int:
    """Return the bytes that a run's processes hold; what they share counts once (the proportional set size)."""
    total = 0
    for folder in processes(mark):
        with contextlib.suppress(OSError, StopIteration):
            lines = (folder / "smaps_rollup").read_text().splitlines()
            total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


def play(name: str, setting: str, case: str, rounds: int, *flags: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Run a library in processes of its own; return what it measured and its last model."""
    script = [str(HERE / f"with_{name}.py")]
    if (name, setting) == ("pfl", TWO):
        script = [str(HERE / "two_processes.py"), *script]
    mark = f"{os.getpid()}-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log.txt"
        added = SETTINGS[name][setting] | {MARK: mark, "FEDSTILL_PEERS_BEGAN": str(time.time())}
        peak, ended = [0], threading.Event()

        def look() -> None:
            while not ended.wait(SAMPLED):
                peak[0] = max(peak[0], memory(mark))

        watcher = threading.Thread(target=look)
        with log.open("w") as file:
            process = subprocess.Popen(
                [python(name), *script, case, str(rounds), str(out), *flags],
                env=environment(added), stdout=file, stderr=subprocess.STDOUT, cwd=folder,
            )  # fmt: skip
            watcher.start()
            code = process.wait()
        ended.set()
        watcher.join()
        if code or not out.exists():
            sys.exit(f"{name} ({setting}, {case}) ended with {code}:\n{log.read_text()[-3000:]}")
        measured = json.loads(out.read_text())
        measured["memory"] = max(peak[0], measured.pop("rss"))
        return measured, torch.load(out.with_suffix(".pt"), weights_only=True)


def check(case: str, names: list[str]) -> dict[str, dict[str, float]]:
    """Compare what each library does in one round with the plain loop; stop where it is other work."""
    _, like = play("plain", ONE, case, 1, "--whole")
    checks = {}
    for name in names:
        _, last = play(name, ONE, case, 1, "--whole")
        apart = max(float((ours - theirs).abs().max()) for ours, theirs in zip(last, like, strict=True))
        counted, _ = play(name, ONE, case, 1, "--count")
        checks[name] = {"apart": apart, "steps": counted["steps"], "loss": counted["loss"]}
        if apart > CLOSE or counted["steps"] != CASES[case].steps:
            sys.exit(f"{name} does other work in {case}: {checks[name]}, and {CASES[case].steps} steps are wanted")
        print(f"{case:9s} {name:9s} {counted['steps']} steps, {apart:.1e} from the plain loop", flush=True)
    return checks


def import_seconds(name: str) -> float:
    """Return the seconds of importing a package, with files in the system's cache."""
    text = f"import time; t = time.perf_counter(); import {PACKAGES[name]}; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([python(name), "-c", text], env=environment({}), capture_output=True, check=True).stdout)
        for _ in range(IMPORTS)
    ]
    return statistics.median(times)


def version(name: str) -> str:
    package = {"flower": "flwr", "fluke": "fluke-fl", "plain": "torch"}.get(name, name)
    text = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python(name), "-c", text], env=environment({}), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{len(os.sched_getaffinity(0))} cores of an {model}"


def write(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only", default=",".join(PACKAGES))
    parser.add_argument("--settings", default=",".join((AS_IT_COMES, ONE, TWO)), help="of all but fedstill")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--unchecked", action="store_true", help="keep the record's checks of these cases")
    parser.add_argument("--unmeasured", action="store_true", help="check only")
    options = parser.parse_args()
    cases, names, settings = (given.split(",") for given in (options.cases, options.only, options.settings))
    for name in names:
        set_up(name)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"checks": {}, "import": {}, "runs": []}
    record |= {"machine": machine(), "python": platform.python_version(), "date": str(datetime.date.today())}
    record["versions"] = record.get("versions", {}) | {name: version(name) for name in names}
    for case in [] if options.unchecked else cases:
        record["checks"][case] = record["checks"].get(case, {}) | check(case, names)
        write(record)
    if options.unmeasured:
        return
    record["import"] |= {name: import_seconds(name) for name in names}
    chosen = [
        (name, setting) for name in names for setting in SETTINGS[name] if name == "fedstill" or setting in settings
    ]
    record["runs"] = [
        run for run in record["runs"] if run["case"] not in cases or (run["name"], run["setting"]) not in chosen
    ]
    for case, turn in itertools.product(cases, range(options.turns)):
        for name, setting in chosen:
            load = os.getloadavg()[0]
            facts, _ = play(name, setting, case, ROUNDS[case])
            del facts["steps"]
            record["runs"].append({"case": case, "name": name, "setting": setting, "turn": turn, "load": load, **facts})
            seconds = statistics.median(facts["seconds"][1:])
            print(f"{case:9s} {name:9s} {setting:14s} {seconds:8.3f} s a round", flush=True)
            write(record)


if __name__ == "__main__":
    main()
