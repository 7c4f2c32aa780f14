"""Numbers of learning curves: best over rounds, the last ones, how soon FedAvg's best is reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

LAST = 10  # evaluated rounds


class Curve(NamedTuple):
    """Accuracy in percent at the evaluated rounds of one run."""

    rounds: int  # T, of the whole run
    evaluated: int  # every so many rounds, and in the last
    accuracy: Sequence[float]

    @property
    def at(self) -> list[int]:
        """The evaluated rounds.

        >>> Curve(5, 2, [10.0, 20.0, 30.0]).at
        [2, 4, 5]
        """
        return [number for number in range(1, self.rounds + 1) if evaluates(number, self.rounds, self.evaluated)]


def evaluates(number: int, rounds: int, every: int) -> bool:
    return number % every == 0 or number == rounds


class Spread(NamedTuple):
    """Mean over seeds and sample standard deviation (n - 1); no deviation for one seed."""

    mean: float
    std: float | None
    seeds: int

    def as_json(self) -> dict[str, Any]:
        return {
            "mean": round(self.mean, 4),
            "std": None if self.std is None else round(self.std, 4),
            "seeds": self.seeds,
        }


def spread(values: Iterable[float]) -> Spread | None:
    """None without any value.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, std=1.4142135623730951, seeds=2)
    """
    found = list(values)
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def best(curve: Curve) -> float:
    """The highest accuracy over rounds."""
    return max(curve.accuracy)


def last_ten(curve: Curve) -> float:
    """The mean of the last ten evaluated rounds."""
    return statistics.fmean(curve.accuracy[-LAST:])


def last_round(curve: Curve) -> float:
    """The accuracy after the last round."""
    return curve.accuracy[-1]


def last_known(values: Sequence[float | None]) -> float | None:
    """The mean of the last ten values, of those that exist; None where none does.

    >>> last_known([None, 80.0, 90.0])
    85.0
    """
    found = [value for value in values[-LAST:] if value is not None]
    return statistics.fmean(found) if found else None


def first_round(curve: Curve, target: float) -> int | None:
    """The first evaluated round with at least the target accuracy; None when it is never reached."""
    pairs = zip(curve.at, curve.accuracy, strict=True)
    return next((number for number, accuracy in pairs if accuracy >= target), None)


def speed_up(curve: Curve, fedavg: Curve) -> float:
    """T / r: all rounds over the first round r that reaches FedAvg's best accuracy; 1 if none does.

    FedLMD's printed speed-ups are this. FedAvg is the measure, so its own is 1 by definition.
    """
    if curve is fedavg:
        return 1.0
    reached = first_round(curve, best(fedavg))
    return 1.0 if reached is None else curve.rounds / reached


def rounds_ratio(curve: Curve, fedavg: Curve) -> float | None:
    """The round in which FedAvg reaches its best over the round in which this one does; None if it never does."""
    needed, reached = first_round(fedavg, best(fedavg)), first_round(curve, best(fedavg))
    return None if needed is None or reached is None else needed / reached
