"""A search for the best point of a sweep by Optuna; a point that falls behind the others is ended early.

The same seed, the same scores and the same number of jobs lead to the same points. So a search that was killed asks for
the same points again: the folders of finished runs answer at once, and search.json has the points that ended early.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.experiment.points import Axis, experiment_at, point_name, read_axes
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Result, Row
from fedstill.storage.files import read_json, write_whole
from fedstill.storage.toml import parse_value

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

SEARCH_FILE = "search.json"
DIGITS = 3  # of a number that a range gives, so that it can be read and typed
RANDOM = 10  # points at random before scores lead the search
LEAST = 4  # points that have reached a round, before others are ended there: a median of fewer says little
SPARED = 4  # no point ends in the first quarter of its rounds

Curve = Mapping[int, float]  # round -> accuracy
Floor = Mapping[int, float]  # round -> the accuracy that a point must have reached by then
Play = Callable[[Mapping[str, Experiment], slice, Floor], dict[str, list[Result]]]  # points, which seeds, floor


class EndBelow(Callback):
    """Ends a run whose best accuracy so far is below the floor of the round.

    A resumed run replays its past rows first, so it ends in the round where it would have ended.
    """

    def __init__(self, floor: Floor) -> None:
        self._floor, self._best = floor, -math.inf

    def on_start(self, info: RunInfo) -> bool | None:
        return self.replay(info.past)

    def replay(self, rows: Iterable[Row]) -> bool:
        """Look at rows of the past, and return whether the run ended with one of them."""
        return any(self.on_round(row) for row in rows)

    def on_round(self, row: Row) -> bool:
        if "accuracy" not in row:
            return False
        self._best = max(self._best, row["accuracy"])
        return self._best < self._floor.get(row["round"], -math.inf)


def search(
    experiment: Experiment, play: Play, *, folder: Path | None, keep: Callable[[dict[str, list[Result]]], None]
) -> tuple[dict[str, list[Result]], dict[str, Curve]]:
    """Play the points that Optuna asks for; return their results, and the curves of points that were ended early.

    The first seed of a point decides whether it ends early: it does where its best accuracy is below the median of the
    points before it. Points are asked for in groups of [compare] jobs, which are played side by side.
    keep: gets all results so far after each group.
    """
    axes, count, jobs = read_axes(experiment), experiment.compare.search, experiment.compare.jobs
    study = _study(experiment.seed, at_once=jobs)
    known = {} if folder is None else read_ended(folder)
    results: dict[str, list[Result]] = {}
    ended: dict[str, Curve] = {}
    for start in range(0, count, jobs):
        trials = [study.ask() for _ in range(min(jobs, count - start))]
        asked = [tuple(f"{axis.key}={_draw(trial, axis)}" for axis in axes) for trial in trials]
        names = [point_name(settings) for settings in asked]
        floor = _floor([*ended.values(), *(_curve(each[0]) for each in results.values())], experiment.rounds)
        ended |= {name: known[name] for name in names if name in known}
        new = {
            name: experiment_at(experiment, settings)
            for name, settings in zip(names, asked, strict=True)
            if name not in results and name not in ended
        }
        first = play(new, slice(0, 1), floor)
        for name, (result,) in first.items():
            if EndBelow(floor).replay(result.history.rows):
                ended[name] = _curve(result)
        if folder is not None:
            write_whole(folder / SEARCH_FILE, json.dumps({"ended_early": {**known, **ended}}, indent=1) + "\n")
        for name in first.keys() & ended.keys():
            if (place := first[name][0].run_dir) is not None:
                shutil.rmtree(place.parent, ignore_errors=True)
        others = play({name: new[name] for name in new if name not in ended}, slice(1, None), {})
        results |= {name: [*first[name], *others[name]] for name in others}
        keep(results)
        for name, trial in zip(names, trials, strict=True):
            _tell(study, trial, ended.get(name), results.get(name, []))
    return results, ended


def read_ended(folder: Path) -> dict[str, Curve]:
    """Return the points of a search that were ended early, by their names; none where search.json says nothing."""
    try:
        table = read_json(folder / SEARCH_FILE)["ended_early"]
        return {
            str(name): {int(at): float(value) for at, value in curve.items()} for name, curve in table.items() if curve
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def _study(seed: int, *, at_once: int) -> Study:
    try:
        import optuna
    except ImportError:
        raise FedstillError("--search needs Optuna: pip install 'fedstill[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=RANDOM, constant_liar=at_once > 1)
    return optuna.create_study(direction="maximize", sampler=sampler)


def _draw(trial: Trial, axis: Axis) -> str:
    if not axis.is_range:
        return str(trial.suggest_categorical(axis.key, axis.values))
    low, high = map(parse_value, axis.values)
    if isinstance(low, int) and isinstance(high, int):
        return str(trial.suggest_int(axis.key, low, high, log=True))
    return f"{trial.suggest_float(axis.key, low, high, log=True):.{DIGITS}g}"


def _tell(study: Study, trial: Trial, ended: Curve | None, results: list[Result]) -> None:
    """Tell Optuna the mean over seeds of the last accuracies, or how far a point came that was ended early."""
    import optuna

    if ended is not None:
        for at, accuracy in ended.items():
            trial.report(accuracy, at)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(trial, statistics.fmean(result.summary()["accuracy_last"] for result in results))


def _curve(result: Result) -> Curve:
    return {row["round"]: row["accuracy"] for row in result.history.evaluated}


def _floor(curves: list[Curve], rounds: int) -> Floor:
    """Return the medians of the rounds that enough points have reached, without the first quarter and the last."""
    middle = range(max(1, rounds // SPARED), rounds)
    reached = {at: [curve[at] for curve in curves if at in curve] for at in middle}
    return {at: statistics.median(values) for at, values in reached.items() if len(values) >= LEAST}
