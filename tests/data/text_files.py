"""Small tables of texts, and an experiment that reads one."""

from __future__ import annotations

import csv
from pathlib import Path

from fedstill import Experiment

SMALL = {
    "rounds": 1,
    "cohort": 2,
    "partition": {"scheme": "iid", "clients": 2},
    "model": {"name": "bert", "layers": 1, "hidden": 8, "heads": 2, "inner": 8},
}
TOPICS = {"sport": "the team won the final match", "money": "the bank raised its interest rates"}


def news(count: int = 40) -> list[tuple[str, str, str]]:
    """(user, text, label): every text has its own number."""
    names = list(TOPICS)
    return [(f"u{i % 4}", f"{TOPICS[names[i % 2]]} again {i}", names[i % 2]) for i in range(count)]


def table(path: Path, rows: list[tuple], header: tuple[str, ...] = ("user", "text", "label")) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def experiment(path: Path, **data) -> Experiment:
    return Experiment(data={"source": str(path), "inputs": ["text"], "tokens": 12, "unlabeled": 10, **data}, **SMALL)
