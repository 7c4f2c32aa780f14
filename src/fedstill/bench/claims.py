"""Judge a paper's main claims by the recorded runs: each claim is an order of methods, each verdict one of four words.

`[[claim]]` tables in a paper's expected.toml state the claims. `judge` compares two methods of an order by the runs
that have the same seed, and `verdict` turns these comparisons into a word.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from scipy.special import stdtrit

from fedstill.bench.recipe import CLAIM, EXPECTED_FILE, Expected, Recipe, check_known
from fedstill.bench.results import Curve, Records, Run, curve_of, first_fault
from fedstill.bench.summary import LAST, Spread, best, first_round, last_ten, spread
from fedstill.core.errors import FedstillError
from fedstill.storage import toml as toml_io

FEWEST_SEEDS = 3  # with fewer, a difference neither shows nor contradicts an order
CONFIDENCE = 0.95
HOLDS, IN_PART, NOT_SHOWN, CONTRADICTED = "holds", "holds in part", "not shown", "contradicted"
ABOVE = " > "
AVERAGED = " before distillation"  # "mrtf before distillation": the average that the row's server then distils
MEASURES = {"best": "best round", "last": f"mean of the last {LAST} rounds", "rounds": "rounds to the target"}


class Claim(BaseModel):
    """One `[[claim]]` of a paper's expected.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    table: str
    column: str
    setting: str  # in words: data, network, clients, rounds
    order: list[str]  # "fedlmd > fedntd > kd": the first is better than the second, the second than the third
    # a row, or "mrtf before distillation": the average of the same runs before the server changes it
    measure: Literal["best", "last", "rounds"]  # rounds: to the column's target, fewer are better
    printed: list[str] | None = None  # table and column of the paper's figures, if they are not the claim's own
    says: str = ""  # the paper's claim in words, if it prints no figures for it
    of: Literal["paper", "fedstill"] = "paper"  # fedstill: no paper claims it; it is about a form of ours

    @property
    def chains(self) -> list[list[str]]:
        return [chain.split(ABOVE) for chain in self.order]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for chain in self.chains for row in chain))


_CLAIMS = TypeAdapter(list[Claim])


@dataclass(frozen=True)
class Difference:
    """How far the better method of a pair is ahead in the runs of equal seeds; negative if it is behind."""

    better: str
    worse: str
    by_seed: Sequence[float]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed) if self.by_seed else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % t interval of the mean over seeds; None with fewer than three seeds."""
        seeds = len(self.by_seed)
        if seeds < FEWEST_SEEDS:
            return None
        mean = statistics.fmean(self.by_seed)
        reach = float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(self.by_seed) / seeds**0.5
        return mean - reach, mean + reach


@dataclass(frozen=True)
class Finding:
    """A claim, the paper's figures for it, our value of each row and our difference of each pair, and the verdict."""

    claim: Claim
    paper: Mapping[str, float | str]
    ours: Mapping[str, Spread | None]
    differences: Sequence[Difference]

    @property
    def was_run(self) -> bool:
        return any(value is not None for value in self.ours.values())

    @property
    def verdict(self) -> str:
        return verdict(self.differences)


def verdict(differences: Sequence[Difference]) -> str:
    """Return the word for the pairs of an order.

    A pair is shown if the whole interval of its difference is above 0, and refuted if it is below 0. An order whose
    pairs are all shown holds. It holds in part if some are shown. It is contradicted if none is shown and one is
    refuted. Otherwise it is not shown, which is all that fewer than three seeds can give.
    """
    intervals = [difference.interval for difference in differences]
    shown = [interval is not None and interval[0] > 0 for interval in intervals]
    refuted = [interval is not None and interval[1] < 0 for interval in intervals]
    if shown and all(shown):
        return HOLDS
    return IN_PART if any(shown) else CONTRADICTED if any(refuted) else NOT_SHOWN


def judge(claim: Claim, recipe: Recipe, runs: Sequence[Run], expected: Expected) -> Finding:
    """Compare each pair of the claim's order by the runs of equal seeds of the recipe's first preset."""
    records, table = Records(runs), recipe.tables[next(iter(recipe.presets))][claim.table]
    cells = {cell.row: cell.experiment for cell in table.cells if cell.column == claim.column}
    values: dict[str, dict[int, float]] = {}
    for row in claim.rows:
        cell = cells[row.removesuffix(AVERAGED)]
        curve, measure = _averaged if row.endswith(AVERAGED) else curve_of, _measure(claim, cell.target)
        by_seed = {seed: measure(curve(run)) for seed, run in records.of(cell).items()}
        values[row] = {seed: value for seed, value in by_seed.items() if value is not None}
    sign = -1.0 if claim.measure == "rounds" else 1.0
    differences = [
        Difference(
            better=better,
            worse=worse,
            by_seed=[
                sign * (value - values[worse][seed]) for seed, value in values[better].items() if seed in values[worse]
            ],
        )
        for chain in claim.chains
        for better, worse in pairwise(chain)
    ]
    where = claim.printed or [claim.table, claim.column]
    figures = expected.get(where[0], {}).get(where[1], {})
    paper = {row: figures[row][claim.measure] for row in claim.rows if claim.measure in figures.get(row, {})}
    return Finding(claim, paper, {row: spread(by_seed.values()) for row, by_seed in values.items()}, differences)


def _averaged(run: Run) -> Curve:
    """Return the curve of the averaged model; in a round that reports none, the server has changed nothing."""
    curve = curve_of(run)
    reported = run.get("beside", {}).get("accuracy_aggregated", [None] * len(curve.accuracy))
    pairs = zip(reported, curve.accuracy, strict=True)
    return curve._replace(accuracy=[sent if value is None else value for value, sent in pairs])


def _measure(claim: Claim, target: float | None) -> Callable[[Curve], float | None]:
    if claim.measure == "rounds":
        return lambda curve: None if target is None else first_round(curve, 100 * target)
    return best if claim.measure == "best" else last_ten


def load_claims(folder: Path, recipe: Recipe) -> list[Claim]:
    """Read the `[[claim]]` tables of a paper, and refuse a claim about no cell of the recipe's first preset."""
    file = folder / EXPECTED_FILE
    if not file.is_file():
        return []
    try:
        claims = _CLAIMS.validate_python(toml_io.read_toml(file).get(CLAIM, []))
    except ValidationError as error:
        form = 'table = "1", column = "cifar10", setting = "...", order = ["fedlmd > fedavg"], measure = "best"'
        raise FedstillError(f"{file}: {CLAIM}.{first_fault(error)}: write {form}") from None
    tables = recipe.tables[next(iter(recipe.presets))]
    for number, claim in enumerate(claims, 1):
        where = f"{file}: claim {number}"
        check_known(claim.table, tables, f"{where}: the recipe has no table")
        table = tables[claim.table]
        check_known(claim.column, table.columns, f"{where}: table '{claim.table}' has no column")
        rows = [cell.row for cell in table.cells if cell.column == claim.column]
        if not claim.order or any(len(chain) < 2 for chain in claim.chains):
            raise FedstillError(f"{where}: order needs two rows or more: write 'fedlmd > fedavg'")
        for row in claim.rows:
            check_known(row.removesuffix(AVERAGED), rows, f"{where}: column '{claim.column}' has no row")
    return claims


def paper_words(finding: Finding) -> str:
    """Return the paper's claim: its order with its figures, and its words if it has any.

    >>> claim = Claim(table="1", column="c", setting="", order=["fedlmd > fedavg"], measure="best")
    >>> paper_words(Finding(claim, {"fedlmd": 50.45, "fedavg": 33.02}, {}, []))
    'fedlmd 50.45 > fedavg 33.02'
    """
    sign = " < " if finding.claim.measure == "rounds" else ABOVE
    named = {row: f"{row} {_figure(finding.paper[row])}" if row in finding.paper else row for row in finding.claim.rows}
    firsts: dict[str, list[str]] = {}  # "fedaux > feddf", "fedaux > fedavg" become "fedaux > feddf, fedavg"
    for first, *others in finding.claim.chains:
        firsts.setdefault(first, []).append(sign.join(named[row] for row in others))
    orders = [f"{named[first]}{sign}{', '.join(others)}" for first, others in firsts.items()]
    return "; ".join([*orders, *([finding.claim.says] if finding.claim.says else [])])


def our_words(finding: Finding) -> str:
    """Return our value of each row and the difference of each pair, with its interval or, without one, seed by seed."""
    if not finding.was_run:
        return "not run"
    values = ", ".join(f"{row} {_value(finding, row)}" for row in finding.claim.rows)
    seeds = sorted({len(difference.by_seed) for difference in finding.differences})
    words = "one seed" if seeds == [1] else f"{' or '.join(map(str, seeds))} seeds"
    return f"{values}. Ahead by {'; '.join(map(_ahead, finding.differences))} ({words})"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def _value(finding: Finding, row: str) -> str:
    value = finding.ours[row]
    if value is None:
        return "not reached" if finding.claim.measure == "rounds" else "not run"
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}")


def _ahead(difference: Difference) -> str:
    if difference.interval is None:
        return ", ".join(f"{value:+.2f}" for value in difference.by_seed) or "no pair of runs"
    low, high = difference.interval
    return f"{difference.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
