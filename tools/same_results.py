"""Prove that a change of the code changes no number that fedstill computes.

    python tools/same_results.py record FOLDER              run every case, write weights and rows to FOLDER
    python tools/same_results.py check FOLDER               run every case again and compare with FOLDER
    python tools/same_results.py check FOLDER --only scaf   only the cases whose name contains "scaf"

A case is a small experiment of three rounds on one CPU thread; tools/same_results.toml lists them. Two runs are equal
if every tensor has the same name, type, shape and values, without any tolerance, and every round the same accuracy,
loss, accepted uploads and bytes. The exit code is 1 if a case differs or fails. PYTHONPATH decides which fedstill runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # read by the next imports

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedstill

ROOT = Path(__file__).resolve().parents[1]
TENSORS_FILE, SUMMARY_FILE = "weights.safetensors", "summary.json"
ROW_KEYS = ("accuracy", "train_loss", "accepted", "bytes_up", "bytes_down", "bytes_prepared", "bytes_prepared_down")
Table = dict[str, Any]


class Outcome(NamedTuple):
    """All numbers of one run that are compared."""

    tensors: dict[str, Tensor]
    summary: Table


# ---- The cases ------------------------------------------------------------------------------------------------------


def read_cases(sources: Path) -> dict[str, Table]:
    """Return the experiment of every case by its name, in the words of the fedstill that is imported."""
    text = (ROOT / "tools" / "same_results.toml").read_text(encoding="utf-8")
    file = tomllib.loads(text.replace("{benchmarks}", f"{ROOT}/benchmarks").replace("{sources}", str(sources)))
    cases: dict[str, Table] = {}
    for name, table in file["cases"].items():
        like = table.pop("like", None)
        cases[name] = laid_over(laid_over(file["standard"], file["cases"][like] if like else {}), table)
    if "algorithm" in fedstill.Experiment.model_fields:
        for name, table in cases.items():
            words = file["old"].get(name, {})
            table = laid_over(table, {"method": words} if isinstance(words, str) else words)
            cases[name] = {"algorithm": table.pop("method"), **table}
    return cases


def laid_over(below: Table, above: Table) -> Table:
    """Return `below` with the keys of `above`, as the head of tools/same_results.toml says."""
    table = dict(below)
    for key, value in above.items():
        if value == "none":
            table.pop(key, None)
        elif isinstance(value, dict) and key in table and key not in ("model", "partition"):
            table[key] = laid_over(table[key], value)
        else:
            table[key] = value
    return table


def write_sources(folder: Path) -> None:
    """Write the three small tables that some cases read: measurements, plays and news."""
    draw = random.Random(11)
    kinds = ("low", "middle", "high")
    measures = [
        (f"owner{draw.randrange(8)}", *(f"{draw.gauss(kinds.index(kind), 1):.4f}" for _ in range(3)), kind)
        for kind in draw.choices(kinds, k=320)
    ]
    words = ["the", "king", "and", "queen", "of", "night", "shall", "never", "sleep", "while", "winds", "do", "blow"]
    plays = [(f"user{user}", " ".join(draw.choices(words, k=24))) for user in range(8)]
    topics = {"sport": "the team won the final match", "money": "the bank raised its interest rates"}
    news = [
        (f"user{number % 4}", f"{topics[topic]} {draw.choice(words)} again {number}", topic)
        for number, topic in enumerate(draw.choices(list(topics), k=120))
    ]
    for name, rows in (
        ("measures.csv", [("owner", "width", "height", "depth", "kind"), *measures]),
        ("plays.csv", [("user", "text"), *plays]),
        ("news.csv", [("user", "text", "label"), *news]),
    ):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


# ---- Running --------------------------------------------------------------------------------------------------------


def run_cases(only: str = "") -> Iterator[tuple[str, Outcome | None]]:
    """Run the cases whose names contain `only`; a case that fails gives None and prints its error on stderr."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    fix_noise_seed()
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        for name, table in read_cases(Path(folder)).items():
            if only not in name:
                continue
            try:
                outcome = run_case(table)
            except Exception:
                print(f"{name} FAILED\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
                yield name, None
            else:
                yield name, outcome


def fix_noise_seed() -> None:
    """Let protecting noise depend on the run's seed alone.

    In a real run it also depends on the names of all options, because two different runs must not share their noise.
    Two trees that are compared may name an option differently.
    """
    fedstill.run  # noqa: B018 (a lazy name: the look-up imports the loop)
    for name, module in list(sys.modules.items()):
        if name.startswith("fedstill.") and hasattr(module, "noise_seed"):
            module.noise_seed = lambda seed, run, secret=b"": seed


def run_case(table: Table) -> Outcome:
    """Run one experiment with an empty cache and return its numbers."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDSTILL_CACHE"] = cache
        result = fedstill.run(fedstill.Experiment(**table))
    tensors: dict[str, Tensor] = {}
    for place, weights in (("last", result.weights), ("best", result.best_weights)):
        for kind, tree in (("params", weights.params), ("buffers", weights.buffers)):
            tensors |= {f"{place}:{kind}:{name}": tensor for name, tensor in tree.items()}
    if result.targets is not None:
        tensors |= {"targets:probabilities": result.targets.probabilities, "targets:kept": result.targets.kept}
    if result.samples is not None:
        tensors |= {"samples:x": result.samples.x, "samples:y": result.samples.y}
    claims = () if result.privacy is None else result.privacy.claims
    summary = {
        "rows": [{key: row.get(key) for key in ROW_KEYS} for row in result.history.rows],
        "bytes_up": result.history.bytes_up,
        "bytes_down": result.history.bytes_down,
        "privacy": [[claim.unit, claim.against, claim.epsilon] for claim in claims],
    }
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return Outcome(copies, json.loads(json.dumps(summary)))  # as it is read back from a recording


def record(folder: Path) -> int:
    """Run every case and write the numbers to `folder`; return 1 if a case fails."""
    began, total = time.perf_counter(), 0
    tensors: dict[str, Tensor] = {}
    summaries: Table = {}
    for name, outcome in run_cases():
        total += 1
        if outcome is not None:
            tensors |= {f"{name}|{key}": tensor for key, tensor in outcome.tensors.items()}
            summaries[name] = outcome.summary
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS_FILE)
    (folder / SUMMARY_FILE).write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")
    print(f"{len(summaries)} of {total} compositions recorded in {time.perf_counter() - began:.0f} s")
    return int(len(summaries) < total)


# ---- Comparing ------------------------------------------------------------------------------------------------------


def check(folder: Path, only: str) -> int:
    """Run the cases again, print a line for each that differs from `folder`, and return 1 if any differs or fails."""
    recorded = read_recording(folder)
    equal = total = 0
    for name, outcome in run_cases(only):
        total += 1
        before = recorded.pop(name, None)
        if before is None or outcome is None:
            print(f"{name}: {'not recorded' if before is None else 'failed'}", flush=True)
        elif lines := differences(before, outcome):
            print(f"{name}: {'; '.join(lines)}", flush=True)
        else:
            equal += 1
    for name in recorded if not only else ():
        print(f"{name}: recorded, but no longer a case")
    print(f"{equal} of {total} compositions equal")
    return int(equal < total or not total)


def read_recording(folder: Path) -> dict[str, Outcome]:
    """Return the numbers of every case that `record` wrote to `folder`."""
    summaries = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    recorded = {name: Outcome({}, summary) for name, summary in summaries.items()}
    for key, tensor in load_file(folder / TENSORS_FILE).items():
        name, _, place = key.partition("|")
        recorded[name].tensors[place] = tensor
    return recorded


def differences(before: Outcome, after: Outcome) -> list[str]:
    """Say how two runs of a case differ; an empty list means that they are equal."""
    lines = []
    if missing := sorted(before.tensors.keys() - after.tensors.keys()):
        lines.append(f"{len(missing)} tensors are missing ({missing[0]})")
    if extra := sorted(after.tensors.keys() - before.tensors.keys()):
        lines.append(f"{len(extra)} tensors are new ({extra[0]})")
    distances: dict[str, float] = {}
    for name in before.tensors.keys() & after.tensors.keys():
        was, now = before.tensors[name], after.tensors[name]
        if (was.dtype, was.shape) != (now.dtype, now.shape):
            lines.append(f"{name} is {now.dtype} {tuple(now.shape)}, was {was.dtype} {tuple(was.shape)}")
        elif not torch.equal(was, now):
            distances[name] = (was.double() - now.double()).abs().nan_to_num(nan=torch.inf).max().item()
    if distances:
        where = max(distances, key=distances.__getitem__)
        lines.append(f"largest difference {distances[where]:.3g} in {where}")
    if before.summary != after.summary:
        lines.append(first_difference(before.summary, after.summary))
    return lines


def first_difference(before: Any, after: Any, place: str = "") -> str:
    """Name the first place where two JSON values differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        key = next(key for key in before if before[key] != after[key])
        return first_difference(before[key], after[key], f"{place}.{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        index = next(index for index in range(len(before)) if before[index] != after[index])
        return first_difference(before[index], after[index], f"{place}[{index}]")
    return f"{place.lstrip('.')} is {after}, was {before}"


def main() -> int:
    """Read the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("folder", type=Path)
    checking = commands.add_parser("check")
    checking.add_argument("folder", type=Path)
    checking.add_argument("--only", default="", metavar="PATTERN", help="a part of the names of cases")
    arguments = parser.parse_args()
    return record(arguments.folder) if arguments.command == "record" else check(arguments.folder, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
