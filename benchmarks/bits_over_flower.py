"""Play runs over Flower and in one process, and note which end at the same bits.

    PATH=$PWD/.venv-flower/bin:$PATH OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/bits_over_flower.py
    PYTHONPATH=tests/support python benchmarks/bits_over_flower.py --write      write the lists of docs/flower.md

One SuperLink with TLS and node authentication behind the proxy, and three SuperNodes, stay up for all runs. Each run
has new processes of three sites, which have no memory, and a new ServerApp. It is in docs/results/over_flower.json as
soon as it has ended. Without --all, runs that the record has are not played again. --only 'NAME; NAME' plays these.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from over_flower import BERT, MIXED, MLP, NAMES, differences, network, table_of, write_deployment

from fedstill.cli.deploy import site_command
from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.files import server_folder
from fedstill.deploy.flower.run import run_deployment
from fedstill.methods import METHODS
from fedstill.storage.files import write_whole

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs" / "results" / "over_flower.json", ROOT / "docs" / "flower.md"
BEGIN, END = "<!-- lists of benchmarks/bits_over_flower.py --write -->\n", "<!-- end of the lists -->"
ROUNDS = 2
REFINED = "student.steps=5, student.batch_size=8"
INVENTED = "generator.steps=3, generator.noise=6, student.steps=3, batch_size=8"
HARD_SAMPLES = "iterations=2, student.steps=2, batch_size=8, generator.noise=6"
PRETRAINED = "training.epochs=2, training.batch_size=8"
NOISE = "its sites draw their noise from secrets of their own"
OPTIONS = {  # of methods whose defaults take long, or that need another network and other rows
    **dict.fromkeys(("avglogit", "avgprob", "feddf", "fedbe", "mrtf", "fedaux"), REFINED),
    "d2cfl": "threshold=0.4, student.epochs=2, student.batch_size=4",
    "feddf_gen": INVENTED,
    "fedftg": HARD_SAMPLES,
    "fedgen": "gen_batch=5, generator.steps=4, generator.batch_size=8, generator.noise=6",
    "simclr": f"{PRETRAINED}, projection=4, hidden=8",
    **dict.fromkeys(("masked_lm", "next_token"), PRETRAINED),
    "dp_fedavg": "trust='nobody', clip=1.0, noise_multiplier=1.0",
}


@dataclass(frozen=True)
class Run:
    """A run of three sites: an experiment's method, [local], [model] and data, and why it must end at other bits."""

    method: str
    local: str = ""
    model: str = MLP
    data: str = "csv"
    differs: str = ""


RUNS = {name: Run(f"{name}({OPTIONS[name]})" if name in OPTIONS else name) for name in METHODS} | {
    "simclr": Run(f"simclr({OPTIONS['simclr']})", data="npz"),
    "masked_lm": Run(f"masked_lm({PRETRAINED})", model=BERT, data="texts"),
    "next_token": Run(f"next_token({PRETRAINED})", model=BERT, data="texts"),
    "update_noise": Run("update_noise(clip=1.0, sigma=0.1)", differs=NOISE),
    "dp_fedavg": Run(f"dp_fedavg({OPTIONS['dp_fedavg']})", differs=NOISE),
    "fedlmd+scaffold+mrtf": Run(f"fedlmd+scaffold+mrtf({REFINED})"),
    "scaffold until 1 then fedaux": Run(f"scaffold until 1 then fedaux({REFINED})"),
    "scaffold+fedftg": Run(f"scaffold+fedftg({HARD_SAMPLES})"),
    "scaffold, the head alone": Run("scaffold", 'part = "head"'),
    "fedlmd, kept optimisers": Run("fedlmd", 'keep_optimizer = true\noptimizer = "adam"'),
    "scaffold, two networks": Run("scaffold", model=MIXED),
    "feddf, two networks": Run(f"feddf({REFINED})", model=MIXED),
    "fedaux, two networks": Run(f"fedaux({REFINED})", model=MIXED),
    "fedavg, texts": Run("fedavg", model=BERT, data="texts"),
    "scaffold, pictures": Run("scaffold", model='name = "cnn"', data="npz"),
}


@contextmanager
def sites(folder: Path) -> Iterator[None]:
    """Have a process of `fedstill site` for each site; all come from one that has loaded torch already."""
    made = multiprocessing.get_context("forkserver")
    started = [made.Process(target=serve, args=(folder / "sites" / name,), daemon=True) for name in NAMES]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.terminate()
            process.join(15)


def serve(site: Path) -> None:
    with (site / "site.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    site_command(site, yes=True, check=False)


def play(folder: Path, run: Run) -> dict[str, Any]:
    """Play a run over the network of processes and in this process; return what the record says of it."""
    shutil.rmtree(folder / "server" / "run", ignore_errors=True)
    (server_folder(folder) / "outcome.json").unlink(missing_ok=True)
    for name in NAMES:
        shutil.rmtree(folder / "sites" / name / "memory", ignore_errors=True)
    write_deployment(folder, run.method, rounds=ROUNDS, deadline=240, local=run.local, model=run.model, data=run.data)
    began = time.monotonic()
    with sites(folder):
        run_deployment(folder, lambda line: None)
    seconds = time.monotonic() - began
    texts = {"method": run.method, "local": run.local, "model": run.model, "data": run.data}
    different = differences(folder)
    return {
        **{key: text for key, text in texts.items() if text and (key, text) not in {("model", MLP), ("data", "csv")}},
        "accepted": [row["accepted"] for row in table_of(folder)],
        "different": list(different),
        "seconds": round(seconds, 1),
    }


def play_all(names: list[str], about: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "deployment"
        write_deployment(folder, "fedavg")
        with network(folder) as net:
            for part in ("superlink", "proxy"):
                net.start(part, ["sh", str(server_folder(folder) / f"{part}.sh")])
            for name in NAMES:
                net.supernode(name)
            for name in names:
                try:
                    facts = play(folder, RUNS[name])
                except FedstillError as error:
                    print(f"{name}: {error}", flush=True)
                    continue
                runs = {**recorded(), name: facts}  # read again, because another process may play the other half
                runs = {known: runs[known] for known in RUNS if known in runs}
                write_whole(RECORD, json.dumps({**about, "runs": runs}, indent=1) + "\n")
                print(f"{name}: {len(facts['different'])} different, {facts['seconds']:.0f} s", flush=True)


def recorded() -> dict[str, Any]:
    """Return the runs of the record."""
    runs: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))["runs"] if RECORD.exists() else {}
    return runs


def written(page: str, runs: dict[str, Any]) -> str:
    """Return the page with the lists of the record's runs."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + lists(runs) + END + after


def lists(runs: dict[str, Any]) -> str:
    """Return what the page says of the runs: which are equal, which are not, and which were not played."""
    equal = [name for name, run in runs.items() if not run["different"]]
    methods, mixtures = [name for name in equal if name in METHODS], [name for name in equal if name not in METHODS]
    noisy = [name for name in runs if name not in equal and RUNS[name].differs]
    lines = [
        (f"Equal, bit for bit, are {len(methods)} methods: ", methods, ""),
        (f"Equal are {len(mixtures)} other runs: ", mixtures, ""),
        ("Different on purpose: ", noisy, f", because {NOISE}"),
        ("Different, and should be equal: ", [name for name in runs if name not in [*equal, *noisy]], ""),
        ("Not played: ", [name for name in RUNS if name not in runs], ""),
    ]
    return "".join(f"- {begins}{listed(names)}{ends}.\n" for begins, names, ends in lines if names)


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the lists of the page")
    parser.add_argument("--all", action="store_true", help="play runs again that the record has")
    parser.add_argument("--only", default="", help="names of runs, separated by ';'")
    parser.add_argument("--most", type=int, default=len(RUNS), help="stop after so many")
    chosen = parser.parse_args()
    if chosen.write:
        write_whole(PAGE, written(PAGE.read_text("utf-8"), recorded()))
        return
    names = [name.strip() for name in chosen.only.split(";") if name.strip()] or list(RUNS)
    names = [name for name in names if chosen.all or chosen.only or name not in recorded()][: chosen.most]
    packages = {name: version(name) for name in ("flwr", "torch")}
    about = {"script": "benchmarks/bits_over_flower.py", "machine": platform.machine(), "rounds": ROUNDS, "sites": 3}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that no process stays
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fedstill.cli.deploy", "over_flower"])
    play_all(names, {**about, **packages, "date": time.strftime("%Y-%m-%d")})


if __name__ == "__main__":
    main()
