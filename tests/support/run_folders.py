"""Run folders as `fedstill run` leaves them, written by hand, with any names and any numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.storage import toml

MODEL_BYTES = 1000

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "\"><img src=x onerror='window.hacked = 1'>",
    "</script><script>window.hacked = 1</script>",
    "${window.hacked = 1} {{window.hacked = 1}} ' ; window.hacked = 1 //",
    "\u202etxt.exe\u2066 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f3e5\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji",
    "a\x00b\x1b[31m\n\ttab & <b>bold</b> \ud800",
    "datum.s] = 1; window.hacked = 1; [\\",
    "x" * 500,
    "javascript:window.hacked=1",
)


def row(number: int, accuracy: float, classes: int, **more: Any) -> dict[str, Any]:
    """Return one evaluated round; every class has the same accuracy, of ten test rows each."""
    right = round(10 * accuracy)
    confusion = [
        [right if i == j else 10 - right if j == (i + 1) % classes else 0 for j in range(classes)]
        for i in range(classes)
    ]
    return {
        "round": number,
        "cohort": 2,
        "accepted": 2,
        "bytes_up": 2 * MODEL_BYTES,
        "bytes_down": 2 * MODEL_BYTES,
        "accuracy": accuracy,
        "class_accuracy": [accuracy] * classes,
        "confusion": confusion,
        "forgetting": 0.1,
        "seconds": 0.5,
        **more,
    }


def write_run(
    folder: Path,
    accuracies: Sequence[float],
    *,
    method: str = "fedavg",
    seed: int = 0,
    counts: Sequence[Sequence[int]] = ((8, 2), (0, 10)),
    classes: Sequence[str] = ("cat", "dog"),
    parties: Sequence[str] = (),
    rows: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> Path:
    """Write a run with one evaluated round for each accuracy, or with these rows; `parties` name the clients."""
    folder.mkdir(parents=True)
    made = rows or [row(place, value, len(classes)) for place, value in enumerate(accuracies, 1)]
    config = {"name": "trial", "rounds": len(made), "cohort": 2, "sampling": "fixed", "seed": seed, **settings}
    config = {**config, "method": {"name": method}, "partition": {"scheme": "lda", "clients": len(counts)}}
    (folder / "config.toml").write_text(toml.dumps(config).encode("utf-8", "replace").decode(), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in made))
    (folder / "audit.jsonl").write_text("")
    (folder / "log.txt").write_text("")
    files: dict[str, Any] = {
        "contract.json": {
            "data": {"name": settings.get("name", "pets"), "classes": classes, "population": len(counts)}
        },
        "partition.json": {"clients": len(counts), "classes": classes, "names": parties, "counts": counts},
        "calibration.json": {"last": [calibration()]},
        "env.json": {"python": "3.11", "packages": {"fedstill": "0.1.0"}, "device": {"kind": "cpu", "name": "x"}},
    }
    if parties:
        lines = [
            {"name": name, "rows": 10, "test_rows": 5, "federated": 0.8, "pooled": 0.9, "alone": 0.6 + place / 100}
            for place, name in enumerate(parties)
        ]
        files["parties.json"] = {"summary": {}, "parties": lines}
    for name, tree in files.items():
        (folder / name).write_text(json.dumps(tree))
    return folder


def calibration() -> dict[str, Any]:
    bins = [
        {"low": 0.4, "high": 0.6, "count": 4, "confidence": 0.5, "accuracy": 0.25},
        {"low": 0.8, "high": 1.0, "count": 6, "confidence": 0.9, "accuracy": 0.75},
        {"low": 0.6, "high": 0.8, "count": 0, "confidence": None, "accuracy": None},
    ]
    return {"fitted_on": "the test set", "why": "a test", "before": {"rows": 10, "ece": 0.19, "bins": bins}}


def write_comparison(folder: Path, methods: dict[str, Sequence[Sequence[float]]], **more: Any) -> Path:
    """Write a comparison: accuracies by method, one list for each seed."""
    entries = []
    for place, (method, seeds) in enumerate(methods.items()):
        for seed, accuracies in enumerate(seeds):
            inside = f"method-{place}/seed-{seed}"
            write_run(folder / inside, accuracies, method=method, seed=seed, **more)
            entries.append({"method": method, "seed": seed, "run_dir": inside})
    (folder / "results.json").write_text(json.dumps({"name": "trial", "methods": [], "runs": entries}))
    (folder / "config.toml").write_text('name = "trial"\n')
    return folder


def write_hostile(folder: Path) -> Path:
    """Write a comparison whose every name tries to be more than a name."""
    accuracies = [[0.1 * (1 + place % 5), 0.05 * (1 + place)] for place in range(len(HOSTILE))]
    methods = {name: [values] for name, values in zip(HOSTILE, accuracies, strict=True)}
    counts = [[1 + (i + j) % 3 for j in range(len(HOSTILE))] for i in range(len(HOSTILE))]
    return write_comparison(
        folder, methods, classes=HOSTILE, parties=HOSTILE, counts=counts, name="<script>window.hacked = 1</script>"
    )
