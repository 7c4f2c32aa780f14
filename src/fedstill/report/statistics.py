"""Statistics of methods that were run with the same seeds: intervals, paired tests, and groups of equals.

All methods of a comparison have the same split and the same cohorts under one seed. So two methods are compared by
their difference within each seed, in which the luck of the split cancels out.

The paired t-test decides. Wilcoxon's signed-rank test stands beside it from six seeds on, because with fewer its
smallest p value, 2 / 2^n, is above the level. Two questions make two families of tests, and Holm's correction keeps the
chance of any false finding in a family at the level:

- Which methods can be told apart? All pairs. The best method is chosen by the same numbers that the test reads, so a
  correction for the comparisons with the best method alone would be too small.
- Which methods differ from FedAvg? One test for each other method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

LEVEL = 0.05
FEW_SEEDS = 5  # with fewer the intervals are wide: at 4 seeds the factor of the standard error is 3.2, at 2 it is 12.7
LEAST_FOR_RANKS = 6  # 2 / 2^5 is above the level
BASELINE = "fedavg"
NO_DIFFERENCE = "no difference shown"

Values = Sequence[float]  # one for each seed, in the order of seeds


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; the standard deviation and the interval are None for a single seed."""

    seeds: int
    mean: float
    std: float | None = None
    low: float | None = None  # of the 95 % confidence interval of the mean, by Student's t
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """A method minus a reference, over the seeds that both have."""

    method: str
    reference: str
    seeds: int
    mean: float
    low: float | None = None  # of the 95 % confidence interval, not corrected for many methods
    high: float | None = None
    effect: float | None = None  # Hedges' correction of Cohen's d_z: mean / standard deviation of the differences
    p: float | None = None  # of the paired t-test; None for a single seed
    p_ranks: float | None = None  # of Wilcoxon's signed-rank test, from six seeds on
    p_holm: float | None = None  # p after Holm's correction for all tests of its family

    @property
    def is_shown(self) -> bool:
        return self.p_holm is not None and self.p_holm < LEVEL

    @property
    def verdict(self) -> str:
        """Say "better", "worse" or "no difference shown"; of a single seed that nothing can be said."""
        if self.p_holm is None:
            return "nothing can be said from one seed"
        return ("better" if self.mean > 0 else "worse") if self.is_shown else NO_DIFFERENCE

    def as_json(self) -> dict[str, Any]:
        return {**{key: value for key, value in asdict(self).items() if key != "method"}, "verdict": self.verdict}


@dataclass(frozen=True)
class Judgement:
    """Which methods of a comparison can be told apart."""

    best: str  # the method of the highest mean
    seeds: int  # the fewest that two methods share
    groups: Mapping[str, str]  # by method, best first: letters; no difference is shown between methods that share one
    from_best: Mapping[str, Difference]  # of each other method, corrected for all pairs
    from_baseline: Mapping[str, Difference]  # of each other method to FedAvg; empty where FedAvg is not among them


def estimate(values: Values) -> Estimate:
    """Return mean, sample standard deviation and 95 % confidence interval of independent values."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Estimate(count, mean)
    from scipy.special import stdtrit

    std = float(np.std(values, ddof=1))
    reach = float(stdtrit(count - 1, 1 - LEVEL / 2)) * std / math.sqrt(count)
    return Estimate(count, mean, std, mean - reach, mean + reach)


def difference(method: str, values: Values, reference: str, others: Values) -> Difference:
    """Compare a method with a reference, seed by seed; seeds that only one of them has are left out."""
    pairs = np.array([pair for pair in zip(values, others, strict=False) if all(map(math.isfinite, pair))])
    gaps = pairs[:, 0] - pairs[:, 1] if len(pairs) else np.array([math.nan])
    if len(pairs) < 2:
        return Difference(method, reference, len(pairs), float(gaps[0]))
    from scipy.special import stdtr

    about, freedom = estimate(gaps.tolist()), len(gaps) - 1
    assert about.std is not None
    interval = (about.low, about.high)
    if np.ptp(gaps) <= 1e-9 * np.abs(pairs).max():  # the t-test divides by a spread of zero or of rounding errors
        nothing = abs(about.mean) <= 1e-9 * np.abs(pairs).max()
        p = 1.0 if nothing else 2.0 * 0.5 ** len(gaps)  # the sign test
        return Difference(method, reference, len(gaps), about.mean, *interval, 0.0 if nothing else None, p, None, p)
    p = 2.0 * float(stdtr(freedom, -abs(about.mean) / about.std * math.sqrt(len(gaps))))
    ranks = None
    if len(gaps) >= LEAST_FOR_RANKS:
        from scipy.stats import wilcoxon

        ranks = float(wilcoxon(gaps).pvalue)
    effect = hedges(freedom) * about.mean / about.std if freedom > 1 else None
    return Difference(method, reference, len(gaps), about.mean, *interval, effect, p, ranks, p)


def hedges(freedom: int) -> float:
    """Return the factor that takes the bias from an effect size of a few differences (Hedges, 1981).

    >>> round(hedges(2), 3), round(hedges(14), 3)
    (0.564, 0.945)
    """
    return math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom - 1) / 2)) / math.sqrt(freedom / 2)


def holm(p_values: Values) -> list[float]:
    """Return p values corrected for their number by Holm's step-down method (1979).

    >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected


def corrected_by_holm(family: Sequence[Difference]) -> list[Difference]:
    """Return the differences with `p_holm`; one without a test stays without and does not count."""
    tested = [each for each in family if each.p is not None]
    by_pair = {
        (each.method, each.reference): p
        for each, p in zip(tested, holm([each.p for each in tested if each.p is not None]), strict=True)
    }
    return [replace(each, p_holm=by_pair.get((each.method, each.reference))) for each in family]


def letters(names: Sequence[str], apart: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Give each name letters, so that two names share a letter unless they are `apart` (Piepho, 2004).

    >>> letters(["x", "y", "z"], [("x", "z")])
    {'x': 'a', 'y': 'ab', 'z': 'b'}
    """
    groups = [set(names)]
    for first, second in apart:
        for group in [group for group in groups if {first, second} <= group]:
            groups.remove(group)
            for part in (group - {second}, group - {first}):
                if not any(part <= other for other in groups):
                    groups = [other for other in groups if not other < part] + [part]
    places = {name: place for place, name in enumerate(names)}
    groups.sort(key=lambda group: sorted(places[name] for name in group))
    return {name: "".join(_letter(at) for at, group in enumerate(groups) if name in group) for name in names}


def _letter(place: int) -> str:
    """Return a, b, ..., z, and beyond them A, B, ..., Z; a comparison with more groups has numbers in brackets."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return alphabet[place] if place < len(alphabet) else f"[{place + 1}]"


def judge(methods: Mapping[str, Values], *, baseline: str = BASELINE) -> Judgement | None:
    """Say which of at least two methods can be told apart; None where there are fewer with finite values."""
    means = {name: float(np.mean(values)) for name, values in methods.items() if len(values)}
    order = sorted((name for name in means if math.isfinite(means[name])), key=lambda name: (-means[name], name))
    if len(order) < 2:
        return None
    best = order[0]
    pairs = corrected_by_holm(
        [difference(low, methods[low], high, methods[high]) for high, low in combinations(order, 2)]
    )
    others = [name for name in order if name != baseline] if baseline in order else []
    to_baseline = [difference(name, methods[name], baseline, methods[baseline]) for name in others]
    return Judgement(
        best=best,
        seeds=min(pair.seeds for pair in pairs),
        groups=letters(order, [(pair.reference, pair.method) for pair in pairs if pair.is_shown]),
        from_best={pair.method: pair for pair in pairs if pair.reference == best},
        from_baseline={each.method: each for each in corrected_by_holm(to_baseline)},
    )


def in_words(judgement: Judgement, thing: str = "method") -> list[str]:
    """Say in sentences which method is best, from which it cannot be told apart, and who differs from FedAvg.

    thing: how the sentences call a method; points of a sweep have long names and are counted.
    """
    best, seeds = judgement.best, judgement.seeds
    if seeds < 2:
        return ["One seed: nothing can be said about differences, because another seed may turn the order round."]
    worse = [name for name, each in judgement.from_best.items() if each.is_shown]
    equal = [name for name, each in judgement.from_best.items() if not each.is_shown]
    if not worse:
        lines = [f"{best} has the highest mean; {NO_DIFFERENCE} between it and any other {thing}."]
    elif equal:
        less, same = (listed(each) if thing == "method" else f"{len(each)} {thing}s" for each in (worse, equal))
        lines = [f"{best} is better than {less}; {NO_DIFFERENCE} between it and {same}."]
    else:
        lines = [f"{best} is better than every other {thing}."]
    if len(judgement.from_baseline) > 1:
        baseline = next(iter(judgement.from_baseline.values())).reference
        if baseline != best:
            kinds: dict[str, list[str]] = {"better": [], "worse": []}
            for name, each in judgement.from_baseline.items():
                kinds.setdefault(each.verdict, []).append(name)
            shown = [f"{kind}: {listed(kinds[kind])}" for kind in ("better", "worse") if kinds[kind]]
            tests = len(judgement.from_baseline)
            pairs = f"{tests} tests instead of {tests * (tests + 1) // 2}"
            lines.append(f"Compared with {baseline} alone ({pairs}): {'; '.join(shown) or NO_DIFFERENCE}.")
    if seeds < FEW_SEEDS:
        lines.append(f"{seeds} seeds make wide intervals: only large differences can be shown.")
    return lines


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
