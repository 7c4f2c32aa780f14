"""The answer in plain words: who won, by more than chance or not, at which price, and what left the parties."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedstill.privacy.statement import shown
from fedstill.report import counted, human_bytes
from fedstill.report.panels import Panel, Table, percent
from fedstill.report.panels.confusion import matrix_of
from fedstill.report.runs import DOWN, UP, Run, Runs, list_of, number, table_of
from fedstill.report.statistics import Judgement, in_words, judge, listed


def panel(runs: Runs) -> Panel:
    known = {method: runs.last(method) for method in runs.by_method if runs.last(method)}
    sentences = [_setting(runs)]
    if not known:
        return Panel("The answer", [*sentences, "No run has an evaluated round yet, so there is no answer."])
    best, thing = next(iter(known)), runs.thing
    mean = statistics.fmean(known[best].values())
    if len(known) == 1:
        sentences.append(f"{best} ends at {percent(mean)} {runs.first.measured}{_over(known[best])}.")
        judgement = None
    else:
        sentences.append(
            f"{best} has the highest {runs.first.measured} of {len(known)} {thing}s: {percent(mean)} after its last "
            f"round{_over(known[best])}."
        )
        on_split: dict[str, dict[str, Mapping[int, float]]] = {}
        for method in known:
            on_split.setdefault(runs.by_method[method][0].split, {})[method] = known[method]
        if len(on_split) == 1:
            judgement = _judgement(runs, known)
            sentences += _in_words(judgement, thing)
        else:  # a split is no merit of a method
            judgement = None
            sentences.append(f"Only {thing}s on one split can be compared.")
            for split, those in on_split.items():
                words = (
                    _in_words(_judgement(runs, those), thing) if len(those) > 1 else [f"one {thing} has runs on it."]
                )
                sentences.append(f"On the split {split}: {' '.join(words)}")
    sentences += _beside_majority(runs, best, mean)
    sentences += _beside_references(runs, best, known[best])
    first = runs.by_method[best][0]
    sentences.append(
        f"The rounds of one run of {best} took {_mean_seconds(runs.by_method[best])}, and its clients sent "
        f"{human_bytes(_total(first, UP))} and received {human_bytes(_total(first, DOWN))} in all."
    )
    sentences += _left(runs, best)
    if early := [method for method, each in runs.by_method.items() if any(not run.evaluated for run in each)]:
        sentences.append(f"At least one run of {listed(early)} has no evaluated round and is left out.")
    return Panel("The answer", sentences, table=_table(runs, known, judgement))


def _setting(runs: Runs) -> str:
    first = runs.first
    partition = table_of(first.config.get("partition"))
    population = table_of(first.files["contract.json"].get("data")).get("population") or partition.get("clients")
    held = f" held by {population} clients" if population else ""
    splits = list(dict.fromkeys(run.split for run in runs.all if run.split))
    split = f" ({'split' if len(splits) == 1 else f'{len(splits)} splits'}: {'; '.join(splits)})" if splits else ""
    names = {run.data_name for run in runs.all}
    data = f"'{first.data_name}'" if len(names) == 1 else f"{len(names)} data sets"
    cohort = first.config.get("cohort")
    taking = f", {cohort} clients a round" if isinstance(cohort, int) else ""
    rounds = max((run.rows[-1]["round"] for run in runs.all if run.rows), default=0)
    return (
        f"{counted(len(runs.by_method), runs.thing)} in {counted(len(runs.all), 'run')} on {data}{held}{split}: "
        f"{counted(rounds, 'round')}{taking}."
    )


def _in_words(judgement: Judgement | None, thing: str) -> list[str]:
    if judgement is None:
        return [f"These {thing}s share no seed on the same data, so chance may explain the order."]
    tests = f"(Paired t-tests over {judgement.seeds} seeds, 5 % level, Holm's correction.)"
    return [*in_words(judgement, thing), *([tests] if judgement.seeds > 1 else [])]


def _over(by_seed: Mapping[int, float]) -> str:
    if len(by_seed) < 2:
        return ", with one seed"
    return (
        f" (mean over {len(by_seed)} seeds, standard deviation {100 * statistics.stdev(by_seed.values()):.1f} points)"
    )


def _judgement(runs: Runs, known: Mapping[str, Mapping[int, float]]) -> Judgement | None:
    """Return which methods can be told apart over the seeds that all have; None where nobody can say."""
    shared = sorted(set.intersection(*(set(by_seed) for by_seed in known.values())))
    if not shared or len({run.data_name for run in runs.all}) > 1:
        return None
    return judge({method: [by_seed[seed] for seed in shared] for method, by_seed in known.items()})


def _beside_majority(runs: Runs, best: str, mean: float) -> list[str]:
    """Return what always answering the most frequent class reaches, where this is half of the rows or beats `best`."""
    first = next((run for run in runs.by_method[best] if run.evaluated), None)
    matrix = None if first is None else matrix_of(first)
    if first is None or matrix is None:
        return []
    share = float(matrix.sum(axis=1).max() / matrix.sum())
    if share < max(0.5, 1.5 / len(matrix)) and mean > share:
        return []
    name = first.classes[place] if (place := int(matrix.sum(axis=1).argmax())) < len(first.classes) else str(place)
    less = f" {best} does no better by accuracy: look at the classes below." if mean <= share else ""
    return [f"Whoever always answers '{name}' is right for {percent(share)} of these rows.{less}"]


def _beside_references(runs: Runs, best: str, by_seed: Mapping[int, float]) -> list[str]:
    alone, pooled = reference_levels(runs)
    words = []
    if alone is not None:
        gain = 100 * (statistics.fmean(by_seed.values()) - alone)
        worth = f"{gain:.1f} points above" if gain > 0 else f"{-gain:.1f} points below"
        words.append(f"{best} is {worth} the average of the models that clients train alone ({percent(alone)}).")
    if pooled is not None:
        words.append(f"One model trained on all rows in one place reaches {percent(pooled)}.")
    return words


def reference_levels(runs: Runs) -> tuple[float | None, float | None]:
    """Return the mean accuracy of the clients' own models and of the pooled model, where they were measured."""
    alone, pooled = [], []
    for table in runs.references:
        each = [number(table_of(row).get("accuracy")) for row in list_of(table.get("alone"))]
        each_known = [value for value in each if value is not None]
        alone += [statistics.fmean(each_known)] if each_known else []
        together = number(table_of(table.get("pooled")).get("accuracy"))
        pooled += [] if together is None else [together]
    return (statistics.fmean(alone) if alone else None), (statistics.fmean(pooled) if pooled else None)


def _left(runs: Runs, best: str) -> list[str]:
    words = []
    if runs.reveals.get(best):
        words.append(
            f"In each round with {best}, a client sends: {'; '.join(runs.reveals[best])}. Its rows stay with it."
        )
    for method, each in runs.by_method.items():
        epsilons = [value for run in each if (value := epsilon_of(run)) is not None]
        if epsilons:
            delta = number(each[0].files["privacy.json"].get("delta"))
            at = "" if delta is None else f" at delta = {delta:g}"
            words.append(f"{method} claims differential privacy with epsilon = {shown(max(epsilons))}{at}.")
    return words


def epsilon_of(run: Run) -> float | None:
    """Return the epsilon of a run's first claim of privacy."""
    claims = list_of(run.files["privacy.json"].get("claims"))
    return number(table_of(claims[0]).get("epsilon")) if claims else None


def _total(run: Run, keys: tuple[str, ...]) -> float:
    return list(run.summed(*keys).values())[-1] if run.rows else 0.0


def _mean_seconds(each: Sequence[Run]) -> str:
    seconds = statistics.fmean(_total(run, ("seconds",)) for run in each)
    return f"{seconds:.1f} seconds" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def _table(runs: Runs, known: Mapping[str, Mapping[int, float]], judgement: Judgement | None) -> Table:
    rows = []
    for method, by_seed in known.items():
        each = [run for run in runs.by_method[method] if run.evaluated]
        peak = statistics.fmean(max(row["accuracy"] for row in run.evaluated) for run in each)
        spread = f" ± {100 * statistics.stdev(by_seed.values()):.2f}" if len(by_seed) > 1 else ""
        sent = statistics.fmean(_total(run, UP) for run in each)
        seconds = statistics.fmean(_total(run, ("seconds",)) for run in each)
        last = f"{100 * statistics.fmean(by_seed.values()):.2f}{spread}"
        group = judgement.groups.get(method, "") if judgement is not None and judgement.seeds > 1 else ""
        rows.append((method, str(len(by_seed)), last, f"{100 * peak:.2f}", human_bytes(sent), f"{seconds:.1f}", group))
    head = ["method", "seeds", "last accuracy %", "best round %", "sent by clients", "seconds of rounds", "group"]
    thing = runs.thing
    caption = f"{thing.capitalize()}s, the best first: mean ± sample standard deviation over seeds."
    if any(row[-1] for row in rows):
        return Table(head, rows, f"{caption} No difference is shown between {thing}s that share a letter.")
    return Table(head[:-1], [row[:-1] for row in rows], caption)
