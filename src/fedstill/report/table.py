"""The table of a comparison: mean, spread and interval over seeds, best method first; for terminals and as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import printable
from fedstill.loop.evaluate import METRICS
from fedstill.loop.history import Row
from fedstill.loop.references import References
from fedstill.privacy.statement import shown
from fedstill.report import human_bytes, wrapped
from fedstill.report.statistics import Judgement, estimate, in_words, judge

if TYPE_CHECKING:
    from rich.table import Table

PREPARED = "prepare/"  # begins the names of metrics that the first row of a run has from the preparation
INTERVAL, GROUP = "95 % CI", "group"
COLUMNS = ("method", "last %", INTERVAL, GROUP, "best %", "seconds", "up", "down")


@dataclass(frozen=True)
class MethodSummary:
    """One method over its seeds; seconds and bytes are those of one run, on average."""

    method: str
    last: tuple[float, ...]
    best: tuple[float, ...]
    seconds: float
    bytes_up: int
    bytes_down: int
    epsilon: float | None = None  # of one run, the largest over the seeds; None: nothing is claimed
    metrics: Mapping[str, float] = field(default_factory=dict)  # by heading, the mean over seeds: loop.evaluate.METRICS
    is_reference: bool = False  # it stands below the methods

    @property
    def mean(self) -> float:
        return statistics.fmean(self.last)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over the seeds; None for a single seed."""
        return statistics.stdev(self.last) if len(self.last) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean, cut at 0 and 1; None for a single seed."""
        about = estimate(self.last)
        return None if about.low is None or about.high is None else (max(about.low, 0.0), min(about.high, 1.0))

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "mean": self.mean,
            "std": self.std,
            "interval": self.interval,
            "seeds": len(self.last),
            "seconds": self.seconds,
            "best": statistics.fmean(self.best),
            "accuracies": list(self.last),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
            **self.metrics,
            **({"reference": True} if self.is_reference else {}),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> MethodSummary:
        """Return the summary that `as_json` made a row of; of the best rounds the row has the mean only."""
        known = {*COLUMNS, "mean", "std", "interval", "seeds", "best", "accuracies", "bytes_up", "bytes_down"}
        known |= {"epsilon", "reference", "from_best", "from_fedavg"}
        if not row["accuracies"]:
            raise ValueError("a method without an accuracy")
        return cls(
            method=row["method"],
            last=tuple(map(_number, row["accuracies"])),
            best=(_number(row["best"]),),
            seconds=_number(row["seconds"]),
            bytes_up=int(_number(row["bytes_up"])),
            bytes_down=int(_number(row["bytes_down"])),
            epsilon=None if row.get("epsilon") is None else _number(row["epsilon"]),
            metrics={heading: _number(value) for heading, value in row.items() if heading not in known},
            is_reference=row.get("reference", False),
        )


def _number(value: Any) -> float:
    """Return a number as it is; what is none, or does not fit, is an error."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"'{value}' is no number")
    float(value)  # a whole number of a thousand digits is an OverflowError
    return value


def best_first(summaries: Iterable[MethodSummary]) -> list[MethodSummary]:
    """By mean accuracy; a run whose accuracy is not a number comes last, and reference points below all methods."""
    return sorted(summaries, key=lambda row: (row.is_reference, row.mean != row.mean, -row.mean, row.method))


def judge_methods(summaries: Iterable[MethodSummary]) -> Judgement | None:
    """Say which methods can be told apart by their last accuracies; reference points are no methods."""
    return judge({row.method: row.last for row in summaries if not row.is_reference})


def table_json(summaries: Sequence[MethodSummary]) -> list[dict[str, Any]]:
    """Return the table as data: a row has its group, and its differences from the best method and from FedAvg."""
    judgement, rows = judge_methods(summaries), []
    for row in best_first(summaries):
        more: dict[str, Any] = {}
        if judgement is not None and row.method in judgement.groups and not row.is_reference:
            families = {"from_best": judgement.from_best, "from_fedavg": judgement.from_baseline}
            more = {"group": judgement.groups[row.method]} if judgement.seeds > 1 else {}
            more |= {key: family[row.method].as_json() for key, family in families.items() if row.method in family}
        rows.append({**row.as_json(), **more})
    return rows


def column_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean over rows of each metric that has a column, by its heading."""
    means: dict[str, float] = {}
    for name, metric in METRICS.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if metric.column and values:
            means[metric.column] = statistics.fmean(values) * (100 if metric.percent else 1)
    return means


def reference_rows(references: Sequence[References]) -> list[MethodSummary]:
    """Return a row for each reference point; there is one References for each seed."""
    if not references:
        return []
    rows = {
        "pooled": [[each.pooled] for each in references],
        "alone (mean)": [list(each.alone) for each in references],
        "majority class": [[each.majority] for each in references],
    }
    seconds = {"pooled": [each.seconds_pooled for each in references]}
    seconds["alone (mean)"] = [each.seconds_alone for each in references]
    return [
        MethodSummary(
            method=name,
            last=(last := tuple(statistics.fmean(row["accuracy"] for row in parties) for parties in by_seed)),
            best=last,  # they are measured once, after their last step
            seconds=statistics.fmean(seconds.get(name, [0.0])),
            bytes_up=0,
            bytes_down=0,
            metrics=column_means([row for parties in by_seed for row in parties]),
            is_reference=True,
        )
        for name, by_seed in rows.items()
    ]


def reference_lines(method: str, accuracies: Sequence[float], references: Sequence[References]) -> list[str]:
    """Answer whether the federation is worth it, and for whom: `method` had these accuracies, one for each seed."""
    summaries = [each.summary() for each in references]
    mean = {name: f"{100 * statistics.fmean(each[name] for each in summaries):.1f} %" for name in summaries[0]}
    parties = sum(len(each.alone) for each in references)
    gain = sum(
        federated > alone
        for federated, each in zip(accuracies, references, strict=True)
        for alone in each.accuracies_alone
    )
    seeds = f", over {len(references)} seeds" if len(references) > 1 else ""
    majority = statistics.fmean(float(each.majority["accuracy"]) for each in references)
    useless = [
        "the federated model is right no more often than a rule that always answers the most frequent class: "
        "look at balanced_accuracy and auc"
    ]
    return [
        f"federated ({method}) {100 * statistics.fmean(accuracies):.1f} %, alone {mean['alone_mean']} on average (best "
        f"party {mean['alone_best']}), pooled {mean['pooled']}, majority class {mean['majority']}",
        f"on the global test set the federated model is better than the own model of {gain} of {parties} parties"
        f"{seeds} (alone: worst tenth {mean['alone_worst_tenth']}, best tenth {mean['alone_best_tenth']})",
        *(useless if statistics.fmean(accuracies) <= majority else []),
        *references[0].budget,
    ]


def prepared_text(histories: Sequence[Sequence[Row]]) -> str:
    """Return the metrics of the preparation before the first round, such as: knn_accuracy 57.80 % (before 20.10 %).

    Each history holds the rows of one run, and a metric is the mean over runs. The text is empty if no run prepared
    anything.

    >>> prepared_text([[{"prepare/knn_accuracy": 0.5, "prepare/knn_accuracy_before": 0.25}], [{"prepare/epochs": 3}]])
    'knn_accuracy 50.00 % (before 25.00 %), epochs 3'
    """
    values: dict[str, list[float]] = {}
    for row in (row for rows in histories for row in rows):
        for name, value in row.items():
            if name.startswith(PREPARED) and isinstance(value, int | float):
                values.setdefault(name.removeprefix(PREPARED), []).append(value)
    words = {
        name: f"{100 * mean:.2f} %" if "accuracy" in name else f"{mean:.4g}"
        for name, mean in ((name, statistics.fmean(over)) for name, over in values.items())
    }
    before = {name: f" (before {words.pop(f'{name}_before')})" for name in list(words) if f"{name}_before" in words}
    return ", ".join(f"{name} {word}{before.get(name, '')}" for name, word in words.items())


def columns(summaries: Sequence[MethodSummary]) -> tuple[str, ...]:
    """The headings of the table; interval, group and privacy only where some method has them."""
    private = ["epsilon"] if any(row.epsilon is not None for row in summaries) else []
    several = any(row.interval for row in summaries)
    judgement = judge_methods(summaries)
    absent = {GROUP} if judgement is None or judgement.seeds < 2 else set()
    absent |= set() if several else {INTERVAL}
    shown = (heading for heading in COLUMNS if heading not in absent)
    return (*shown, *dict.fromkeys(name for row in summaries for name in row.metrics), *private)


def cells(summary: MethodSummary, headings: Sequence[str], group: str | None = None) -> tuple[str, ...]:
    """One row of the table; a method without a value under a heading has "none" there."""
    spread = "" if summary.std is None else f" ± {100 * summary.std:.2f}"
    texts = {
        "method": summary.method,
        "last %": f"{100 * summary.mean:.2f}{spread}",
        "seconds": f"{summary.seconds:.1f}",
        **{heading: f"{value:.2f}" for heading, value in summary.metrics.items()},
        **({} if summary.epsilon is None else {"epsilon": shown(summary.epsilon)}),
        **({} if group is None else {GROUP: group}),
    }
    if summary.interval:
        texts[INTERVAL] = "–".join(f"{100 * end:.1f}" for end in summary.interval)
    if not summary.is_reference:  # a reference has one measurement, and nobody sends anything
        texts["best %"] = f"{100 * statistics.fmean(summary.best):.2f}"
        texts |= {"up": human_bytes(summary.bytes_up), "down": human_bytes(summary.bytes_down)}
    return tuple(texts.get(heading, "none") for heading in headings)


def table_rows(summaries: Sequence[MethodSummary]) -> list[tuple[str, ...]]:
    """Return the headings and then a row for each method, best first, then the reference points."""
    names, judgement = columns(summaries), judge_methods(summaries)
    groups = {} if judgement is None else judgement.groups
    rows = best_first(summaries)
    return [names, *(cells(row, names, None if row.is_reference else groups.get(row.method)) for row in rows)]


def table_legend(summaries: Sequence[MethodSummary], thing: str = "method") -> list[str]:
    """Return the lines below the table: what its numbers are, and what they show about the methods.

    thing: how the lines call a row of the table.
    """
    judgement = judge_methods(summaries)
    seeds = max(len(row.last) for row in summaries)
    if seeds < 2:
        one_run = "One seed: no spread; seconds and bytes are those of one run."
        return [one_run, *(in_words(judgement, thing) if judgement else ())]
    lines = [
        f"Mean over {seeds} seeds ± standard deviation, and its 95 % confidence interval (CI); seconds and bytes are "
        "those of one run."
    ]
    if judgement is not None and judgement.seeds > 1:
        pairs = len(judgement.groups) * (len(judgement.groups) - 1) // 2
        correction = f", Holm's correction for {pairs} pairs" if pairs > 1 else ""
        lines.append(
            f"Between {thing}s that share a letter (group) no difference is shown (t-tests paired by seed{correction}, "
            "level 5 %)."
        )
    return [*lines, *(in_words(judgement, thing) if judgement else ())]


def plain_table(summaries: Sequence[MethodSummary]) -> str:
    """Columns by spaces: for logs, pipes and files."""
    return align(table_rows(summaries))


def align(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows as text, a line each, the first `left` columns to the left, the others to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def rich_table(summaries: Sequence[MethodSummary], *, width: int = 120) -> Table:
    """The same for a terminal of so many letters: long names take several lines, and the best mean stands out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headings, *rows = table_rows(summaries)
    widths = [max(len(row[place]) for row in (headings, *rows)) for place in range(len(headings))]
    roomy = sum(widths) + 3 * len(widths) <= width
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if roomy else 0), header_style="bold")
    room = max(width - sum(widths[1:]) - (3 if roomy else 1) * len(widths), len("method"))
    for name in headings:
        first = name == "method"
        table.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for place, (name, *numbers) in enumerate(rows):
        texts = (Text(printable(cell, keep="\n")) for cell in (wrapped(name, room), *numbers))
        table.add_row(*texts, style="bold green" if place == 0 else None)
    return table
