"""A sweep: its best point, a map of the two keys that matter most, and the curve of each key."""

from __future__ import annotations

from pathlib import Path

from fedstill.report.charts import Chart, Point, bars, heat_map, line_chart, plain_names
from fedstill.report.panels import Panel, Table, percent
from fedstill.report.runs import Runs, table_of
from fedstill.report.sensitivity import (
    MOST_KEYS,
    ON_HELD_BACK,
    Effect,
    Sensitivity,
    as_number,
    in_sentences,
    sensitivity,
)
from fedstill.storage.files import read_json

SEARCH_FILE = "search.json"


def panel(runs: Runs) -> Panel | None:
    if not runs.is_sweep:
        return None
    whole = {
        name: [run.accuracy for run in each if run.accuracy is not None and run.is_whole]
        for name, each in runs.by_method.items()
    }
    scores = {name: each for name, each in whole.items() if len(each) == len(runs.by_method[name])}
    sweep = sensitivity(scores, [name for folder in runs.folders for name in _ended(folder)])
    if sweep is None:
        return None
    charts = [_map(sweep)] if sweep.cells else []
    charts += [_curve(effect) for effect in sweep.effects[:MOST_KEYS]]
    rows = [
        (effect.key, value, percent(spread.mean), percent(spread.low), percent(spread.high))
        for effect in sweep.effects
        for value, spread in effect.values.items()
    ]
    caption = "Each value of each key: the accuracies of all points with it, whatever their other keys are."
    table = Table(("key", "value", "mean", "lowest", "highest"), rows, caption, left=2)
    return Panel("What matters in this sweep", [ON_HELD_BACK, *in_sentences(sweep)], charts, table)


def _ended(folder: Path) -> list[str]:
    """Return the points that search.json says to have ended early."""
    try:
        return [*table_of(table_of(read_json(folder / SEARCH_FILE)).get("ended_early"))]
    except (OSError, ValueError):
        return []


def _map(sweep: Sensitivity) -> Chart:
    first, second = sweep.effects[:2]
    columns = dict(zip(first.values, plain_names(first.values, 20), strict=True))
    rows = dict(zip(second.values, plain_names(second.values, 20), strict=True))
    cells = [(columns[column], rows[row], 100 * value) for (column, row), value in sweep.cells.items()]
    x, y = plain_names([first.key, second.key])
    return heat_map(
        cells,
        columns=list(columns.values()),
        rows=list(rows.values()),
        x=x,
        y=y,
        value="accuracy (%)",
        title=sweep.map_title,
        numbers=(100 * min(sweep.cells.values()), 100 * max(sweep.cells.values())),
    )


def _curve(effect: Effect) -> Chart:
    """Return a line with the lowest and the highest point at each number; bars where a value is no number."""
    numbers = [as_number(value) for value in effect.values]
    alt = f"Mean accuracy at each value of {effect.key}."
    if any(number is None for number in numbers):
        means = [(value, 100 * spread.mean) for value, spread in effect.values.items()]
        return bars(means, x=effect.key, y="mean accuracy (%)", alt=alt)
    points = [
        Point(number, 100 * spread.mean, 100 * spread.low, 100 * spread.high)
        for number, spread in zip(numbers, effect.values.values(), strict=True)
        if number is not None
    ]
    log = points[0].x > 0
    return line_chart({effect.key: points}, x=effect.key, y="mean accuracy (%)", alt=alt, height=180, log=log)
