"""How `fedstill choose` came to its winner: every candidate's score, level by level, and the candidates left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.report import counted
from fedstill.report.charts import Point, line_chart
from fedstill.report.panels import Panel, Table, percent
from fedstill.report.runs import Runs, list_of, number, table_of
from fedstill.storage.files import read_json

CHOICE_FILE = "choose.json"
MOST_ROWS = 60
Scores = dict[str, dict[int, float]]  # method -> level -> mean score over seeds


def panel(runs: Runs) -> Panel | None:
    record = next((table for folder in runs.folders if (table := _read(folder))), None)
    if record is None:
        return None
    lines = [table_of(line) for line in list_of(record.get("played"))]
    scores = _scores(lines)
    if not scores:
        return None
    metric = str(record.get("metric", "accuracy"))
    levels = sorted({level for each in scores.values() for level in each})
    ranked = sorted(scores, key=lambda method: (-max(scores[method]), -scores[method][max(scores[method])], method))
    refused = {
        **_texts(record.get("refused")),
        **{str(line.get("method")): str(line["failure"]) for line in lines if line.get("failure")},
    }
    skipped = [
        str(text) for step in list_of(record.get("decisions")) for text in list_of(table_of(step).get("not_afforded"))
    ]
    rows = [
        (
            method,
            *(shown(scores[method][level]) if level in scores[method] else "" for level in levels),
            "dropped" if max(scores[method]) < levels[-1] else "",
        )
        for method in ranked[:MOST_ROWS]
    ]
    rows += [(method, *[""] * len(levels), why) for method, why in list(refused.items())[:MOST_ROWS]]
    rows += [(method, *[""] * len(levels), "did not fit into the budget") for method in dict.fromkeys(skipped)][
        :MOST_ROWS
    ]
    counts = ", ".join(f"{sum(level in each for each in scores.values())} at level {level}" for level in levels)
    sentences = [
        f"{counted(len(scores), 'candidate')} took part: {counts}. A score is the {metric} on rows that clients held "
        "back, the mean over the last fifth of the rounds. No other figure here uses these rows or seeds.",
        f"{record.get('chosen') or 'Nobody yet'} won. The answer above compares it with its runners-up on fresh seeds.",
    ]
    if len(rows) < len(scores) + len(refused) + len(set(skipped)):
        sentences.append(f"The table has the first {MOST_ROWS} of each kind; choose.json has all.")
    less_is_better = any(score < 0 for each in scores.values() for score in each.values())
    scale = -1 if less_is_better else 100
    best = {
        method: [Point(level, *[scale * score] * 3) for level, score in sorted(scores[method].items())]
        for method in ranked[:12]
    }
    axis = metric if less_is_better else f"{metric} %"
    chart = line_chart(best, x="level", y=axis, alt="Scores of the best twelve candidates by level.", height=220)
    head = ["candidate", *(f"level {level}" for level in levels), "remark"]
    return Panel(
        "How it was chosen",
        sentences,
        [chart],
        Table(head, rows, "All candidates, by the last level that they played."),
    )


def shown(score: float) -> str:
    """Return a score as text. Only a metric of which less is better has negative scores, and it need not be a share."""
    return percent(score) if score >= 0 else f"{-score:.3f}"


def _read(folder: Path) -> Mapping[str, Any] | None:
    try:
        record = read_json(folder / CHOICE_FILE)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _scores(lines: list[Mapping[str, Any]]) -> Scores:
    values: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        score, level = number(line.get("score")), line.get("level")
        if score is not None and isinstance(level, int):
            values.setdefault((str(line.get("method")), level + 1), []).append(abs(score))
    scores: Scores = {}
    for (method, level), each in values.items():
        scores.setdefault(method, {})[level] = statistics.fmean(each)
    return scores


def _texts(table: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in table_of(table).items()}
