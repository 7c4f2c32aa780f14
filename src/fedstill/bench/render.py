"""Show a paper's table beside ours: Markdown for the documentation, plain text for people, JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fedstill.bench.recipe import Expected, Number, Recipe, Table, find_table
from fedstill.bench.results import Run
from fedstill.bench.summary import LAST, ColumnSummary, Spread, summarize_table
from fedstill.report import counted
from fedstill.report.table import align

NOTHING = "–"
ALWAYS = ("method", "best over rounds", f"mean of last {LAST} rounds", "seeds")  # other columns where somebody has them
BESIDE = {  # column: name in a run's log, and its meaning
    "before distillation": ("accuracy_aggregated", "the accuracy of the averaged model"),
    "as it is sent": ("accuracy_sent", "the accuracy of the model that clients get, where another one is reported"),
    "pseudo-label accuracy": ("pseudo_label_accuracy", "of the labels that the server learns from"),
    "pseudo-labels": ("pseudo_labels", "how many these are"),
}
Rows = list[list[str]]  # header first


def render_table(recipe: Recipe, preset: str, table_name: str, runs: Sequence[Run], expected: Expected) -> str:
    """Return one table as Markdown: for each column its facts and a table, and at the end the words explained."""
    columns = summarize_table(find_table(recipe, preset, table_name), runs, expected)
    parts = [f"**{column.column}**{_facts(column)}\n\n{markdown_table(cells(column))}" for column in columns]
    return "\n\n".join([*parts, legend(columns)]) + "\n"


def text_table(columns: Sequence[ColumnSummary]) -> str:
    """Return the columns as plain text, aligned by spaces."""
    parts = [f"{column.column}{_facts(column)}\n{align(_two_line_header(cells(column)))}" for column in columns]
    return "\n\n".join([*parts, textwrap.fill(legend(columns), 100)])


def _two_line_header(rows: Rows) -> Rows:
    """Break each name of the header into two lines of about the same length, because its numbers are narrow."""
    header, *body = rows
    halves = [textwrap.wrap(name, max(len(name) // 2 + 2, max(map(len, name.split())))) for name in header]
    above = [lines[0] if len(lines) > 1 else "" for lines in halves]
    return [above, [" ".join(lines[len(lines) > 1 :]) for lines in halves], *body]


def markdown_table(rows: Rows) -> str:
    """Return rows as a Markdown table; the first row is the header, the first column stands left, the others right.

    >>> print(markdown_table([["method", "best"], ["fedavg", "33.0"]]))
    | method | best |
    |---|---:|
    | fedavg | 33.0 |
    """
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    rule = "|" + "|".join(["---", *["---:"] * (len(rows[0]) - 1)]) + "|"
    return "\n".join([header, rule, *body])


def cells(column: ColumnSummary) -> Rows:
    """Return the header and the rows of one column."""
    rows = column.rows
    printed = {figure for row in rows for figure in row.paper}
    kinds = printed & {"best", "last"}
    paper = {"best": "paper (best)", "last": "paper (last rounds)"}[kinds.pop()] if len(kinds) == 1 else "paper"
    finals = [row.final if "last" in printed else None for row in rows]
    columns = {
        "method": [row.row for row in rows],
        "best over rounds": [_spread(row.best) for row in rows],
        f"mean of last {LAST} rounds": [_spread(row.last) for row in rows],
        "last round": [_spread(value) for value in finals],
        paper: [_number(row.figure) for row in rows],
        "best - paper": [_signed(row.above(row.best)) for row in rows],
        f"last {LAST} - paper": [_signed(row.above(row.last)) for row in rows],
        "last round - paper": [_signed(row.above(value)) for row, value in zip(rows, finals, strict=True)],
        f"last {LAST} above the best other": [_signed(row.gain if "gain" in printed else None) for row in rows],
        "paper's gain": [_number(row.paper.get("gain")) for row in rows],
        "speed-up": [_spread(row.speedup, "x") for row in rows],
        "paper's speed-up": [_number(row.paper.get("speedup"), "x") for row in rows],
        "FedAvg's rounds / ours": [_of_all(row.ratio, row.speedup.seeds if row.speedup else 0, "x") for row in rows],
        "rounds to the target": [_of_all(row.reached, row.seeds) for row in rows],
        "paper's rounds": [_number(row.paper.get("rounds")) for row in rows],
        **{name: [_spread(row.beside.get(logged)) for row in rows] for name, (logged, _) in BESIDE.items()},
        "seeds": [str(row.seeds) for row in rows],
    }
    shown = {name: values for name, values in columns.items() if name in ALWAYS or set(values) != {NOTHING}}
    return [list(shown), *(list(row) for row in zip(*shown.values(), strict=True))]


def legend(columns: Sequence[ColumnSummary]) -> str:
    """Explain the words of the header in one line."""
    seeds = max((row.seeds for column in columns for row in column.rows), default=0)
    over = "Mean over seeds ± standard deviation" if seeds > 1 else "Ours with one seed" if seeds else "Nothing run yet"
    text = (
        f"{over}, test accuracy in percent. Best over rounds is the highest of all evaluated rounds, beside it the "
        f"mean of the last {LAST} evaluated; the paper's figure is as printed."
    )
    if any(row.speedup for column in columns for row in column.rows):
        text += (
            " Speed-up: all rounds over the first round that reaches FedAvg's best accuracy with the same seed"
            " (1 if none does); FedAvg's rounds / ours: the round of FedAvg's best over that round,"
            " over the seeds that reach it (how many of how many, where not all do)."
        )
    if any(row.reached for column in columns for row in column.rows):
        text += " Rounds to the target: the first evaluated round with that accuracy, over the seeds that reach it."
    logged = {name for column in columns for row in column.rows for name in row.beside}
    if words := [f"{name}, {meaning}" for name, (key, meaning) in BESIDE.items() if key in logged]:
        text += f" Means of the last {LAST} rounds: {'; '.join(words)}."
    return text


def _facts(column: ColumnSummary) -> str:
    text = "".join(f"{length} or " for length in column.rounds[:-1])
    text = f", {text}{counted(column.rounds[-1], 'round')}" if column.rounds else ""
    if column.target is not None:
        text += f", target {column.target:g} %"
    return text + _engines(column)


def _engines(column: ColumnSummary) -> str:
    """Return the engines that are not the default, with their rows where not all rows have the same engine."""
    rows: dict[str, list[str]] = {}
    for row in column.rows:
        for engine, seeds in row.engines.items():
            part = f", {seeds} of {row.seeds} seeds" if seeds < row.seeds else ""
            rows.setdefault(engine, []).append(f"{row.row}{part}")
    words = ""
    for engine, whose in ((engine, whose) for engine, whose in rows.items() if engine):
        comma = "; " if any(", " in word for word in whose) else ", "
        words += f", {engine}" + ("" if len(rows) == 1 else f" ({comma.join(whose)})")
    return words


def _spread(value: Spread | None, unit: str = "") -> str:
    if value is None:
        return NOTHING
    return f"{value.mean:.2f}{unit}" + ("" if value.std is None else f" ± {value.std:.2f}")


def _of_all(value: Spread | None, all_seeds: int, unit: str = "") -> str:
    """Return a value such as 1.26x (1 of 2), with the seeds that have it; no count where all or none have."""
    reached = 0 if value is None else value.seeds
    return _spread(value, unit) + (f" ({reached} of {all_seeds})" if 0 < reached < all_seeds else "")


def _number(value: Number | None, unit: str = "") -> str:
    return NOTHING if value is None else value if isinstance(value, str) else f"{value:.2f}{unit}"


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.2f}"


def as_json(
    recipe: Recipe, preset: str, table: Table, columns: Sequence[ColumnSummary], *, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return one table for programs; settings: keys of the recipe that the command line has changed."""
    head = {"paper": recipe.paper, "preset": preset, "table": table.name, "title": table.title, "note": table.note}
    return {**head, "settings": list(settings), "columns": [column.as_json() for column in columns]}
