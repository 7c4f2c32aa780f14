"""Figures of each method with its defaults on three small federations; `make pages` writes them into defaults.json."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

BASELINE = "fedavg"
Figures = dict[str, Any]  # accuracy, and beside FedAvg's difference and error; or refused: fedstill's reason


@cache
def measured() -> dict[str, Any]:
    """Return {"seeds": 5, "federations": {key: words}, "methods": {method: {key: Figures}}}."""
    text = resources.files("fedstill.about").joinpath("defaults.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def side_of(figures: Figures) -> str:
    """Return "below" or "above" where a method is more than one standard error from FedAvg, else an empty text.

    >>> side_of({"difference": -1.2, "error": 0.5}), side_of({"difference": 0.0, "error": 0.0})
    ('below', '')
    """
    difference, error = figures.get("difference", 0.0), figures.get("error", 0.0)
    return "below" if difference < -error else "above" if difference > error else ""


def is_below_everywhere(method: str) -> bool:
    """Return whether a method is more than one standard error below FedAvg on every federation on which it runs."""
    runs = [figures for figures in measured()["methods"][method].values() if "accuracy" in figures]
    return bool(runs) and all(side_of(figures) == "below" for figures in runs)


def sentences(method: str) -> list[str]:
    """Return lines with the figures of a method of the library; none for a name without figures."""
    table = measured()
    rows: dict[str, Figures] = table["methods"].get(method, {})
    words: dict[str, str] = table["federations"]
    runs = {words[key]: figures for key, figures in rows.items() if "accuracy" in figures}
    unfit = [words[key] for key, figures in rows.items() if "refused" in figures]
    lines = []
    if method == BASELINE:
        figures_text = "; ".join(f"{where}: {figures['accuracy']:.1f} %" for where, figures in runs.items())
        lines.append(f"Accuracy on three small federations, mean of {table['seeds']} seeds: {figures_text}.")
    elif runs:
        figures_text = "; ".join(f"{where}: {difference_text(figures)}" for where, figures in runs.items())
        lines.append(
            f"With its defaults, accuracy minus FedAvg's in points, mean of {table['seeds']} seeds ± standard error: "
            f"{figures_text}."
        )
    if unfit:
        reason = next(figures["refused"] for figures in rows.values() if "refused" in figures)
        where = "the three small federations" if len(unfit) == len(words) else "; ".join(unfit)
        lines.append(f"Does not apply to {where}: {reason}.")
    return lines


def difference_text(figures: Figures) -> str:
    """Return a difference with its error, and on which side of FedAvg it lies.

    >>> difference_text({"difference": -1.23, "error": 0.5})
    '-1.2 ± 0.5 (below)'
    """
    side = side_of(figures)
    return f"{gain_text(figures)} ({side})" if side else gain_text(figures)


def gain_text(figures: Figures) -> str:
    """Return the difference to FedAvg with its standard error.

    >>> gain_text({"difference": -0.01, "error": 0.5})
    '+0.0 ± 0.5'
    """
    return f"{round(figures['difference'], 1) + 0.0:+.1f} ± {figures['error']:.1f}"  # + 0.0 turns -0.0 into 0.0
