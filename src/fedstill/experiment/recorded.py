"""Runs and comparisons that are on disk: read without their data, their models, or another round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.experiment.compare import RESULTS_FILE
from fedstill.experiment.run_folder import read_description
from fedstill.loop.history import Row
from fedstill.loop.references import read_references
from fedstill.methods.lookup import label
from fedstill.report.curves import Curve
from fedstill.report.table import MethodSummary, reference_rows


def read_rows(folder: Path) -> list[Row]:
    """Return the rounds in metrics.jsonl of a run; a last line that a killed run has not finished is left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no table")
            rows.append(row)
        except ValueError as error:
            if number < len(lines):
                raise FedstillError(f"'{folder / 'metrics.jsonl'}' cannot be read in line {number} ({error})") from None
    return rows


def read_results(folder: Path) -> dict[str, Any]:
    """Return results.json of a comparison; its keys "methods" and "runs" are lists of tables."""
    path = folder / RESULTS_FILE
    read_description(folder)
    if not path.is_file():
        raise FedstillError(f"'{folder}' holds one run, no comparison (no {RESULTS_FILE}): give a folder of `compare`")
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(row["method"], str) for key in ("methods", "runs") for row in results[key]):
            raise ValueError("a method without a name")
    except (ValueError, KeyError, TypeError) as error:
        raise FedstillError(f"'{path}' cannot be read ({error}): run `fedstill resume {folder}`") from None
    return results


def read_summaries(folder: Path) -> list[MethodSummary]:
    """Return the rows of a comparison's table, with its reference points."""
    results = read_results(folder)
    try:
        methods = [MethodSummary.from_json(row) for row in results["methods"]]
    except (KeyError, TypeError) as error:
        raise FedstillError(f"'{folder / RESULTS_FILE}' lacks {error}: run `fedstill resume {folder}`") from None
    if not methods:
        raise FedstillError(f"'{folder}' has no finished method yet: go on with `fedstill resume {folder}`")
    files = sorted((folder / "references").glob("seed-*.json"), key=lambda file: int(file.stem.removeprefix("seed-")))
    references = [known for file in files if (known := read_references(file)) is not None]
    return [*methods, *reference_rows(references)]


def read_curves(folder: Path) -> dict[str, list[Curve]]:
    """Return rounds and accuracies by method, a curve for each seed; of a run or of a comparison."""
    experiment = read_description(folder)
    if (folder / RESULTS_FILE).exists():
        places = [(run["method"], folder / str(run["run_dir"])) for run in read_results(folder)["runs"]]
    else:
        places = [(label(experiment.method.name), folder)]
    curves: dict[str, list[Curve]] = {}
    for method, place in places:
        rows = [row for row in read_rows(place) if row.get("accuracy") is not None]
        if rows:
            curve = [int(row["round"]) for row in rows], [float(row["accuracy"]) for row in rows]
            curves.setdefault(method, []).append(curve)
    if not curves:
        raise FedstillError(f"'{folder}' has no evaluated round yet: go on with `fedstill resume {folder}`")
    return curves
