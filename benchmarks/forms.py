"""MrTF, D2C-FL and FedAUX: their defaults beside the forms of the papers and FedAvg, in small federations on a CPU.

    python benchmarks/forms.py [--papers mrtf,d2cfl,fedaux] [--data digits,fashion-mini] [--records FILE]
    python benchmarks/forms.py --tables

Both data sets are embedded: 20 clients, a network of 64 hidden units. Every form of a paper has the splits, cohorts and
first models of FedAvg, so that differences are paired by seed. A run that is on record is not run again. --tables
prints the tables of docs/methods/ from the records, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fedstill
from fedstill.experiment.build import build_federation
from fedstill.storage.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "results" / "forms.json"
LAST = 5  # rounds whose mean counts
SGD = {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9}
PLAIN_SGD = {"epochs": 1, "batch_size": 32, "lr": 0.05}
ADAM = {"epochs": 1, "batch_size": 32, "lr": 1e-3, "optimizer": "adam"}


class Study(NamedTuple):
    """The forms of one method, and the federations in which they are compared."""

    rounds: int
    cohort: int
    splits: tuple[str, ...]  # alpha of the LDA split, or "iid"
    seeds: dict[str, int]  # data set -> number of seeds
    unlabeled: dict[str, int | str]  # data set -> data.unlabeled
    forms: dict[str, str]  # the first is FedAvg
    local: dict[str, dict[str, Any]]  # name -> [local]
    counted: str = "last_five"  # the figure of a run that the tables show: the mean of the last five rounds, or "last"


STUDIES = {
    "mrtf": Study(
        rounds=10,
        cohort=5,
        splits=("0.05", "0.1", "0.3", "1", "10"),
        seeds={"digits": 5, "fashion-mini": 3},
        unlabeled={"digits": "test", "fashion-mini": "test"},
        forms={
            "FedAvg": 'fedavg+average(weighting="uniform")',
            "the paper's refinery": (
                'mrtf(refine_sharpness=4.0, refine_share="all", student.lr_schedule="constant", every=5)'
            ),
            "sharp refinery": 'mrtf(refine_share="all", every=5)',
            "no refinery": "mrtf(refine=false, every=5)",
            "default": "mrtf(every=5)",
        },
        local={"sgd": SGD},
        counted="last",
    ),
    "d2cfl": Study(
        rounds=20,
        cohort=5,
        splits=("iid", "0.3", "0.1"),
        seeds={"digits": 5, "fashion-mini": 5},
        unlabeled={"digits": 300, "fashion-mini": 1000},
        forms={
            "FedAvg": "fedavg",
            "the paper's form": (
                'd2cfl(rule="max", labels="hard", threshold=0.75, beta=0.7, student_start="carried", '
                'student_share="fixed", feedback=true, student.lr=1e-3, student.lr_schedule="constant", '
                "student.lr_epoch_decay=0.95)"
            ),
            "default, sent": "d2cfl(feedback=true)",
            "default": "d2cfl",
        },
        local={"sgd": SGD},
    ),
    "fedaux": Study(
        rounds=30,
        cohort=8,
        splits=("0.05", "0.3", "10"),
        seeds={"fashion-mini": 5},
        unlabeled={"fashion-mini": 1500},
        forms={
            "FedAvg": "fedavg",
            "default": "fedaux(student.steps=100)",
            "probabilities": 'fedaux(pool="probabilities", student.steps=100)',
        },
        local={"sgd": PLAIN_SGD, "adam": ADAM},
    ),
}


def place(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a record that name its run."""
    return tuple(run[key] for key in ("paper", "data", "split", "local", "method", "seed"))


def setting(study: Study, data: str, split: str, local: str, seed: int) -> fedstill.Experiment:
    skew = {"scheme": "iid"} if split == "iid" else {"scheme": "lda", "alpha": float(split), "min_size": 5}
    return fedstill.Experiment(
        rounds=study.rounds,
        cohort=study.cohort,
        seed=seed,
        data={"source": data, "unlabeled": study.unlabeled[data]},
        partition={**skew, "clients": 20},
        model={"name": "mlp", "hidden": [64], "init": "torch"},
        local=study.local[local],
        engine={"device": "cpu", "threads": 1},
    )


def places(papers: list[str], sets: list[str]) -> Iterator[tuple[str, str, str, str, int]]:
    for paper in papers:
        study = STUDIES[paper]
        for data, seeds in study.seeds.items():
            for split in study.splits if data in sets else ():
                yield from ((paper, data, split, local, seed) for local in study.local for seed in range(seeds))


def measure(papers: list[str], sets: list[str], file: Path) -> None:
    """Run the runs that are not on record, and write the records after each."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    known = {place(run) for run in runs}
    for paper, data, split, local, seed in places(papers, sets):
        study = STUDIES[paper]
        federation = None
        for method in study.forms.values():
            run: dict[str, Any] = {"paper": paper, "data": data, "split": split, "local": local}
            run |= {"method": method, "seed": seed}
            if place(run) in known:
                continue
            experiment = setting(study, data, split, local, seed).replace(method=method)
            federation = build_federation(experiment) if federation is None else federation
            rows = fedstill.run(experiment, federation=federation).history.rows
            accuracy = [round(100 * float(row["accuracy"]), 2) for row in rows]
            run |= {"rounds": study.rounds, "last": accuracy[-1], "best": max(accuracy)}
            run |= {"last_five": round(statistics.mean(accuracy[-LAST:]), 2), "fedstill": fedstill.__version__}
            runs.append(run)
            lines = ",\n".join(json.dumps(run) for run in runs)
            write_whole(file, f'{{"command": "python benchmarks/forms.py", "runs": [\n{lines}\n]}}\n')
            print(paper, data, split, local, seed, method.partition("(")[0], run["last_five"], flush=True)


def paired(runs: list[dict[str, Any]], where: tuple[str, str, str, str], method: str, key: str) -> list[float]:
    """Return the values of a form, by seed; where: paper, data, split and local."""
    chosen = [run for run in runs if place(run)[:5] == (*where, method)]
    return [run[key] for run in sorted(chosen, key=lambda run: run["seed"])]


def with_error(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {error:.1f}"


def gain(values: list[float], beside: list[float]) -> str:
    """Return the mean difference to FedAvg with its standard error over the seeds."""
    text = with_error([value - baseline for value, baseline in zip(values, beside, strict=True)])
    return text if text.startswith("-") else f"+{text}"


def table(paper: str, runs: list[dict[str, Any]]) -> str:
    """Return a paper's table in Markdown: FedAvg's accuracy, then what each form adds to it."""
    study = STUDIES[paper]
    lines = [f"| federation | {' | '.join(study.forms)} |", "|---|" + "--:|" * len(study.forms)]
    for data, seeds in study.seeds.items():
        for local in study.local:
            for split in study.splits:
                where = (paper, data, split, local)
                values = [paired(runs, where, method, study.counted) for method in study.forms.values()]
                if min(map(len, values)) < seeds:
                    continue
                base, *forms = values
                named = f"{data}, {split if split == 'iid' else f'LDA {split}'}"
                named += f", {local.upper() if local == 'sgd' else 'Adam'}" if len(study.local) > 1 else ""
                cells = [gain(form, base) for form in forms]
                lines.append(f"| {named} | {with_error(base)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", default=",".join(STUDIES), help="of the studies (all)")
    parser.add_argument("--data", default="digits,fashion-mini", help="embedded data sets (both)")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the records (docs/results/forms.json)")
    parser.add_argument("--tables", action="store_true", help="print the tables from the records, and run nothing")
    options = parser.parse_args()
    papers = options.papers.split(",")
    if unknown := set(papers) - STUDIES.keys():
        parser.error(f"unknown papers: {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    if not options.tables:
        measure(papers, options.data.split(","), options.records)
    runs = json.loads(options.records.read_text(encoding="utf-8"))["runs"]
    for paper in papers:
        print(f"\n{paper}\n\n{table(paper, runs)}", file=sys.stdout)


if __name__ == "__main__":
    main()
