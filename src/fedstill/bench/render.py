"""A paper's table with ours beside it: Markdown for the documentation, plain text for people, data for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fedstill.bench.recipe import Expected, Number, Recipe, find_table
from fedstill.bench.results import Run
from fedstill.bench.summary import LAST, ColumnSummary, RowSummary, Spread, summarize_table
from fedstill.report.table import align, counted

NOTHING = "–"
# Where the paper prints something to stand beside, or a run has logged it.
GAIN, PAPERS_GAIN = f"last {LAST} above the best other", "paper's gain"
BESIDE = {  # column: what a run logs, and what that is
    "before distillation": ("accuracy_aggregated", "the accuracy of the averaged model"),
    "as it is sent": ("accuracy_sent", "the accuracy of the model that clients get, where another one is reported"),
    "pseudo-label accuracy": ("pseudo_label_accuracy", "of the labels that the server learns from"),
    "pseudo-labels": ("pseudo_labels", "how many these are"),
}
LAST_ROUND, APART = "last round", "last round - paper"
REACHED, PAPERS_ROUNDS = "rounds to the target", "paper's rounds"
OPTIONAL = (
    "paper",
    "best - paper",
    f"last {LAST} - paper",
    "speed-up",
    "paper's speed-up",
    "FedAvg's rounds / ours",
    LAST_ROUND,
    APART,
    GAIN,
    PAPERS_GAIN,
    REACHED,
    PAPERS_ROUNDS,
    *BESIDE,
)
Rows = list[list[str]]  # header first


def render_table(recipe: Recipe, preset: str, table_name: str, runs: Sequence[Run], expected: Expected) -> str:
    """One table as Markdown: for each column what it is, a table, and at the end what the words mean."""
    columns = summarize_table(find_table(recipe, preset, table_name), runs, expected)
    parts = [f"**{column.column}**{_facts(column)}\n\n{markdown_table(cells(column))}" for column in columns]
    return "\n\n".join([*parts, legend(columns)]) + "\n"


def text_table(columns: Sequence[ColumnSummary]) -> str:
    """The same with columns by spaces."""
    parts = [f"{column.column}{_facts(column)}\n{align(_two_line_header(cells(column)))}" for column in columns]
    return "\n\n".join([*parts, textwrap.fill(legend(columns), 100)])


def _two_line_header(rows: Rows) -> Rows:
    """Long names over narrow numbers: each name in two lines of about the same length."""
    header, *body = rows
    halves = [textwrap.wrap(name, max(len(name) // 2 + 2, max(map(len, name.split())))) for name in header]
    above = [lines[0] if len(lines) > 1 else "" for lines in halves]
    return [above, [" ".join(lines[len(lines) > 1 :]) for lines in halves], *body]


def markdown_table(rows: Rows) -> str:
    """The first row is the header, the first column stands left, the others right.

    >>> print(markdown_table([["method", "best"], ["fedavg", "33.0"]]))
    | method | best |
    |---|---:|
    | fedavg | 33.0 |
    """
    header, *body = rows
    rule = "|" + "|".join(["---", *["---:"] * (len(header) - 1)]) + "|"
    return "\n".join([_line(header), rule, *(_line(row) for row in body)])


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def cells(column: ColumnSummary) -> Rows:
    """Header and rows of one column; what is optional only where somebody has it."""
    finals = [row.final if _prints(column, "last") else None for row in column.rows]
    gains = [row.gain if _prints(column, "gain") else None for row in column.rows]
    kept = {
        "method": [row.row for row in column.rows],
        "best over rounds": [_spread(row.best) for row in column.rows],
        f"mean of last {LAST} rounds": [_spread(row.last) for row in column.rows],
        LAST_ROUND: [_spread(value) for value in finals],
        _paper_header(column): [_number(row.figure) for row in column.rows],
        "best - paper": [_signed(row.above(row.best)) for row in column.rows],
        f"last {LAST} - paper": [_signed(row.above(row.last)) for row in column.rows],
        APART: [_signed(row.above(value)) for row, value in zip(column.rows, finals, strict=True)],
        GAIN: [_signed(value) for value in gains],
        PAPERS_GAIN: [_number(row.paper.get("gain")) for row in column.rows],
        "speed-up": [_spread(row.speedup, "x") for row in column.rows],
        "paper's speed-up": [_number(row.paper.get("speedup"), "x") for row in column.rows],
        "FedAvg's rounds / ours": [_ratio(row) for row in column.rows],
        REACHED: [_of_all(row.reached, row.seeds) for row in column.rows],
        PAPERS_ROUNDS: [_number(row.paper.get("rounds")) for row in column.rows],
        **{name: [_spread(row.beside.get(logged)) for row in column.rows] for name, (logged, _) in BESIDE.items()},
        "seeds": [str(row.seeds) for row in column.rows],
    }
    shown = {name: values for name, values in kept.items() if name not in OPTIONAL or set(values) != {NOTHING}}
    return [list(shown), *(list(row) for row in zip(*shown.values(), strict=True))]


def _prints(column: ColumnSummary, number: str) -> bool:
    return any(number in row.paper for row in column.rows)


def _paper_header(column: ColumnSummary) -> str:
    kinds = {kind for row in column.rows for kind in ("best", "last") if kind in row.paper}
    return {"best": "paper (best)", "last": "paper (last rounds)"}[kinds.pop()] if len(kinds) == 1 else "paper"


def legend(columns: Sequence[ColumnSummary]) -> str:
    """What the words of the header mean, in one line."""
    seeds = max((row.seeds for column in columns for row in column.rows), default=0)
    over = "Mean over seeds ± standard deviation" if seeds > 1 else "Ours with one seed" if seeds else "Nothing run yet"
    told = (
        f"{over}, test accuracy in percent. Best over rounds is the highest of all evaluated rounds, beside it the "
        f"mean of the last {LAST} evaluated; the paper's figure is as printed."
    )
    if any(row.speedup for column in columns for row in column.rows):
        told += (
            " Speed-up: all rounds over the first round that reaches FedAvg's best accuracy with the same seed"
            " (1 if none does); FedAvg's rounds / ours: the round of FedAvg's best over that round,"
            " over the seeds that reach it (how many of how many, where not all do)."
        )
    if any(row.reached for column in columns for row in column.rows):
        told += " Rounds to the target: the first evaluated round with that accuracy, over the seeds that reach it."
    logged = {name for column in columns for row in column.rows for name in row.beside}
    if words := [f"{name}, {meaning}" for name, (key, meaning) in BESIDE.items() if key in logged]:
        told += f" Means of the last {LAST} rounds: {'; '.join(words)}."
    return told


def _facts(column: ColumnSummary) -> str:
    told = "".join(f"{length} or " for length in column.rounds[:-1])
    told = f", {told}{counted(column.rounds[-1], 'round')}" if column.rounds else ""
    if column.target is not None:
        told += f", target {column.target:g} %"
    return told + _engines(column)


def _engines(column: ColumnSummary) -> str:
    """Which are not the default, and whose where not all have the same."""
    rows: dict[str, list[str]] = {}
    for row in column.rows:
        for engine, seeds in row.engines.items():
            part = f", {seeds} of {row.seeds} seeds" if seeds < row.seeds else ""
            rows.setdefault(engine, []).append(f"{row.row}{part}")
    told = [(engine, "" if len(rows) == 1 else f" ({_listed(whose)})") for engine, whose in rows.items() if engine]
    return "".join(f", {engine}{whose}" for engine, whose in told)


def _listed(words: Sequence[str]) -> str:
    return ("; " if any(", " in word for word in words) else ", ").join(words)


def _spread(value: Spread | None, unit: str = "") -> str:
    if value is None:
        return NOTHING
    return f"{value.mean:.2f}{unit}" + ("" if value.std is None else f" ± {value.std:.2f}")


def _ratio(row: RowSummary) -> str:
    """1.26x (1 of 2): of two seeds, one reaches FedAvg's best."""
    return _of_all(row.ratio, 0 if row.speedup is None else row.speedup.seeds, "x")


def _of_all(value: Spread | None, all_seeds: int, unit: str = "") -> str:
    """With how many of the seeds it is over, where that is neither all of them nor none."""
    reached = 0 if value is None else value.seeds
    return _spread(value, unit) + (f" ({reached} of {all_seeds})" if 0 < reached < all_seeds else "")


def _number(value: Number | None, unit: str = "") -> str:
    return NOTHING if value is None else value if isinstance(value, str) else f"{value:.2f}{unit}"


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.2f}"


def as_json(
    recipe: Recipe, preset: str, table_name: str, columns: Sequence[ColumnSummary], *, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """settings: what the command line has changed of the recipe."""
    table = find_table(recipe, preset, table_name)
    head = {"paper": recipe.paper, "preset": preset, "table": table_name, "title": table.title, "note": table.note}
    return {**head, "settings": list(settings), "columns": [column.as_json() for column in columns]}
