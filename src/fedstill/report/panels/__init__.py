"""The panels of a report. A panel is one file: a function `panel` from the runs to a `Panel`, and a line in PANELS."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedstill.report.charts import Chart, Point, thin
from fedstill.report.runs import Runs


@dataclass(frozen=True)
class Table:
    """Rows of text below a heading; columns after the first `left` ones are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    left: int = 1


@dataclass(frozen=True)
class Panel:
    """One section of the page."""

    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    table: Table | None = None
    texts: Sequence[tuple[str, str]] = ()  # (caption, text to copy)
    pictures: Sequence[tuple[bytes, str]] = ()  # (content of a PNG file, text for readers who cannot see it)


MakePanel = Callable[[Runs], Panel | None]  # None: the runs have no data for it


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def mean_line(
    seeds: Sequence[Mapping[int, float]],
    *,
    at: Sequence[Mapping[int, float]] = (),
    scale: float = 1.0,
    most: float = math.inf,
) -> list[Point]:
    """Return mean and mean ± sample standard deviation over seeds, at the rounds that all of them have, thinned.

    seeds: round -> number, of each seed.
    most: where the band ends; it begins at 0 at least, where no number is below 0.
    at: round -> where the point stands instead of at its round, of each seed; the mean over the seeds counts.
    """
    known = [series for series in seeds if series]
    if not known:
        return []
    points = []
    least = 0.0 if min(min(series.values()) for series in known) >= 0 else -math.inf
    for number in thin(sorted(set.intersection(*(set(series) for series in known)))):
        values = [scale * series[number] for series in known]
        places = [series[number] for series in at if number in series]
        mean = statistics.fmean(values)
        squares = math.fsum((value - mean) ** 2 for value in values)  # statistics.stdev takes ten times as long
        spread = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0
        low, high = max(least, mean - spread), min(most, mean + spread)
        points.append(Point(statistics.fmean(places) if places else number, mean, low, high))
    return points


PANELS = (  # modules of this package, in the order of the page; the function `panel` of each is a MakePanel
    "answer",
    "tournament",
    "sensitivity",
    "holdings",
    "curves",
    "cost",
    "classes",
    "parties",
    "forgetting",
    "confusion",
    "calibration",
    "method_numbers",
    "teachers",
    "invented",
    "audit",
    "repeat",
)


def panel_makers() -> dict[str, MakePanel]:
    """Return the function of each panel by its name, in the order of the page."""
    return {name: importlib.import_module(f"{__name__}.{name}").panel for name in PANELS}
