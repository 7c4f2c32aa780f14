"""Compare full training, adapters and heads only on a small BERT: accuracy, and bytes a client sends and receives.

    python benchmarks/parts.py TABLE.csv TEXTS.csv [--seeds 3] [--rounds 8] [--choose-rates]

TABLE.csv has columns `text` and `label`, TEXTS.csv has other texts; docs/scale.md has figures for AG News. First the
base: a BERT of 2 layers of 64 units is pre-trained on TEXTS.csv, which the server holds (next_token). Then, from this
base, 20 clients (LDA 0.5), 5 a round, train all of it, adapters of rank 4, or the head alone. The client's learning
rate of each comes from RATES; --choose-rates tries the neighbours on another seed and prints their accuracies.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import fedstill

BERT = {"layers": 2, "hidden": 64, "heads": 4, "inner": 256, "positions": 64, "pool": "mean"}
PARTS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"model": {"adapters": 4}},
    "head": {"local": {"part": "head"}},
}
RATES = {"full": 1e-3, "adapters": 1e-2, "head": 3e-2}
OTHER_SEED = 9  # of the tries for the rates


class Files(NamedTuple):
    table: str  # text and label
    texts: str  # without labels


def experiment(files: Files, seed: int, rounds: int, **sections: dict[str, Any]) -> fedstill.Experiment:
    """Return a run on the texts of a table. Its tokenizer is trained on the other texts, so all runs have one."""
    whole: dict[str, Any] = {
        "rounds": rounds, "cohort": 5, "seed": seed, "evaluate_every": max(1, rounds // 3),
        "data": {"source": files.table, "unlabeled": files.texts, "tokens": 48, "vocabulary": 4096, "label": "label"},
        "partition": {"scheme": "lda", "clients": 20, "alpha": 0.5},
        "model": {"name": "bert", **BERT},
        "local": {"batch_size": 16, "optimizer": "adamw", "lr": 1e-3},
    }  # fmt: skip
    return fedstill.Experiment.model_validate(
        {key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value for key, value in whole.items()}
        | {key: value for key, value in sections.items() if key not in whole}
    )


def make_base(files: Files, folder: Path, epochs: int) -> Path:
    """Pre-train the network; its one round moves no weight by more than rounding shows."""
    base = folder / "base"
    if not (base / "last").is_dir():
        method = {"name": "next_token", "training": {"epochs": epochs, "batch_size": 32}}
        run = experiment(files, 0, 1, method=method, local={"part": "head", "lr": 1e-12})
        fedstill.run(run, run_dir=str(base), pictures=False)
    return base


def play(files: Files, base: Path, part: str, *, seed: int, rounds: int, rate: float) -> dict[str, float]:
    """Return the accuracy in the end, and bytes and seconds of a round."""
    changes = {key: dict(value) for key, value in PARTS[part].items()}
    changes.setdefault("model", {})["start"] = str(base)
    changes.setdefault("local", {})["lr"] = rate
    began = time.perf_counter()
    rows = fedstill.run(experiment(files, seed, rounds, **changes), pictures=False).history.rows
    last = rows[-1]
    sent = {way: last[f"bytes_{way}"] / last["cohort"] for way in ("up", "down")}
    return {"accuracy": last["accuracy"], **sent, "seconds": (time.perf_counter() - began) / rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table")
    parser.add_argument("texts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6, help="of the pre-training")
    parser.add_argument("--only", default=",".join(RATES), help="of full, adapters and head")
    parser.add_argument("--choose-rates", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("parts"), help="where the base is kept")
    options = parser.parse_args()
    logging.getLogger("fedstill").setLevel(logging.ERROR)
    files = Files(options.table, options.texts)
    rates = {part: RATES[part] for part in options.only.split(",")}
    base = make_base(files, options.folder, options.epochs)
    if options.choose_rates:
        for part, middle in rates.items():
            for rate in (middle / 3, middle, middle * 3):
                result = play(files, base, part, seed=OTHER_SEED, rounds=options.rounds, rate=rate)
                print(f"{part:9} lr {rate:.1e}: {100 * result['accuracy']:.1f} %", flush=True)
        return
    print("| trained | accuracy | bytes up a client | bytes down a client | seconds a round |\n|---|--:|--:|--:|--:|")
    for part, rate in rates.items():
        runs = [play(files, base, part, seed=seed, rounds=options.rounds, rate=rate) for seed in range(options.seeds)]
        mean, spread = statistics.mean(run["accuracy"] for run in runs), [100 * run["accuracy"] for run in runs]
        shown = ", ".join(f"{value:.1f}" for value in spread)
        seconds = statistics.median(run["seconds"] for run in runs)
        sent = f"{runs[0]['up']:,.0f} | {runs[0]['down']:,.0f}"
        print(f"| {part} | {100 * mean:.1f} % ({shown}) | {sent} | {seconds:.2f} |", flush=True)
        print(json.dumps({part: runs}), file=open(options.folder / "runs.jsonl", "a"))  # noqa: SIM115


if __name__ == "__main__":
    main()
