"""Confusion: which class the last model of the best method takes for which."""

from __future__ import annotations

import numpy as np

from fedstill.report.charts import heat_map, plain_names
from fedstill.report.panels import Panel
from fedstill.report.runs import LARGEST, Run, Runs, list_of

MOST_NUMBERS = 12  # classes of a map with a number in each cell
SAID = 3  # confusions in words


def panel(runs: Runs) -> Panel | None:
    for method, each in runs.by_method.items():
        for run in each:
            if (matrix := matrix_of(run)) is not None:
                return _panel(method, run, matrix)
    return None


def matrix_of(run: Run) -> np.ndarray | None:
    """Return the confusion matrix of the last evaluated round; None where there is none."""
    rows = list_of(run.last.get("confusion")) if run.last else []
    try:
        matrix = np.array(rows, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
    return matrix if square and (matrix >= 0).all() and (matrix < LARGEST).all() and matrix.any() else None


def _panel(method: str, run: Run, matrix: np.ndarray) -> Panel:
    count = len(matrix)
    names = run.classes if len(run.classes) == count else [str(place) for place in range(count)]
    labels = plain_names(names, 20)
    shares = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    cells = [(labels[j], labels[i], float(shares[i, j])) for i in range(count) for j in range(count)]
    chart = heat_map(
        cells,
        columns=labels,
        rows=labels,
        x="the model's answer",
        y="true class",
        value="share of the class (%)",
        title=f"Answers of {method} to the test rows of each class",
        numbers=(0, 100) if count <= MOST_NUMBERS else None,
    )
    wrong = matrix * (1 - np.eye(count))
    places = [divmod(int(place), count) for place in np.argsort(-wrong, axis=None, kind="stable")[:SAID]]
    mistakes = [f"{names[i]} is taken for {names[j]} {wrong[i, j]:.0f} times" for i, j in places if wrong[i, j] > 0]
    sentences = [f"The last model of {method}, seed {run.seed}, on {matrix.sum():,.0f} test rows."]
    if mistakes:
        sentences.append(f"The most frequent mistakes: {'; '.join(mistakes)}.")
    return Panel("What is confused", sentences, [chart])
