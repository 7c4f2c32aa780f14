"""Calibration: whether a model that says 80 % is right in 80 % of the cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.report.charts import Point, line_chart
from fedstill.report.panels import Panel, percent
from fedstill.report.runs import Runs, list_of, number, table_of


def panel(runs: Runs) -> Panel | None:
    for method, each in runs.by_method.items():
        for run in each:
            for fit in map(table_of, list_of(run.files["calibration.json"].get("last"))):
                before, after = table_of(fit.get("before")), table_of(fit.get("after"))
                if points := curve(before):
                    break
            else:
                continue
            lines = {"as trained": points}
            if calibrated := curve(after):
                lines["with a fitted temperature"] = calibrated
            lines["perfect"] = [Point(0, 0, 0, 0), Point(100, 100, 100, 100)]
            sentences = [
                f"The last model of {method}, seed {run.seed}, on {before.get('rows')} rows of "
                f"{fit.get('fitted_on', 'labeled data')}: how often answers of a given confidence are right."
            ]
            errors = [number(table.get("ece")) for table in (before, after)]
            if errors[0] is not None:
                sentences.append(
                    f"The calibration error is {percent(errors[0])} as trained"
                    + (f" and {percent(errors[1])} with the temperature." if errors[1] is not None else ".")
                )
            if fit.get("why"):
                sentences.append(f"fedstill's note: {fit['why']}.")
            chart = line_chart(
                lines,
                x="confidence (%)",
                y="right answers (%)",
                alt="Lines: the share of right answers by confidence. " + " ".join(sentences[1:2]),
            )
            return Panel("Whether its confidence is earned", sentences, [chart])
    return None


def curve(table: Mapping[str, Any]) -> list[Point]:
    """Return (mean confidence, accuracy) in percent of each bin that has rows."""
    points = []
    for bucket in map(table_of, list_of(table.get("bins"))):
        confidence, accuracy, count = (number(bucket.get(key)) for key in ("confidence", "accuracy", "count"))
        if confidence is not None and accuracy is not None and count:
            points.append(Point(100 * confidence, 100 * accuracy, 100 * accuracy, 100 * accuracy))
    return points
