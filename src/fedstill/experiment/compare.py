"""Run several methods with several seeds on the same data and cohorts, and put the results into one table."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.data import Source
from fedstill.experiment.build import build, build_federation, load_source, split_settings
from fedstill.experiment.cluster import in_one_process
from fedstill.experiment.config import Experiment, MethodSection, checked_experiment
from fedstill.experiment.overrides import attack_table, parse_method, without_defaults
from fedstill.experiment.points import as_texts, best_experiment, points_of, read_axes, united
from fedstill.experiment.run import draw_pictures, measure_references, read_data, run_built
from fedstill.experiment.run_folder import (
    CONFIG_FILE,
    check_run_folder,
    check_same_comparison,
    with_given_data,
    write_description,
)
from fedstill.experiment.search import Curve, EndBelow, Floor, search
from fedstill.experiment.side_by_side import Job, run_side_by_side
from fedstill.loop.callbacks import Callback
from fedstill.loop.cautions import each_once
from fedstill.loop.federate import Built, check_built
from fedstill.loop.history import Result
from fedstill.loop.references import References
from fedstill.methods.lookup import anchored, build_phases, label, split_methods
from fedstill.privacy.statement import Claim
from fedstill.report import counted, draw_all
from fedstill.report.parties import parties_of, write_parties
from fedstill.report.sensitivity import PICTURE_FILE, Sensitivity, sensitivity, sensitivity_picture
from fedstill.report.table import MethodSummary, best_first, column_means, prepared_text, reference_rows, table_json
from fedstill.storage.files import read_bytes, read_json, working_in, write_whole

RESULTS_FILE = "results.json"
BEST_FILE = "best.toml"  # of a sweep
LONGEST_FOLDER = 120  # file systems take 255 bytes


@dataclass(frozen=True)
class Comparison:
    """The results of each method, one for each seed in the order of seeds."""

    results: dict[str, list[Result]]
    run_dir: Path | None = None
    references: tuple[References, ...] = ()  # one for each seed, where the experiment asks for them
    ended: Mapping[str, Curve] = field(default_factory=dict)  # points of a search that fell behind, and no result has

    @property
    def summaries(self) -> list[MethodSummary]:
        methods = [summarize(method, results) for method, results in self.results.items()]
        return best_first([*methods, *reference_rows(self.references)])

    @property
    def sensitivity(self) -> Sensitivity | None:
        """How much each key of a sweep matters; None where no key has several values."""
        scores = {name: summarize(name, results).last for name, results in self.results.items()}
        return sensitivity(scores, list(self.ended))

    def as_json(self) -> list[dict[str, Any]]:
        return table_json(self.summaries)


def summarize(method: str, results: Sequence[Result]) -> MethodSummary:
    summaries = [result.summary() for result in results]
    return MethodSummary(
        method=method,
        last=tuple(row["accuracy_last"] for row in summaries),
        best=tuple(row["accuracy_best"] for row in summaries),
        seconds=statistics.fmean(row["seconds"] for row in summaries),
        bytes_up=round(statistics.fmean(row["bytes_up"] for row in summaries)),
        bytes_down=round(statistics.fmean(row["bytes_down"] for row in summaries)),
        metrics=column_means([result.history.last for result in results if result.history.last]),
        epsilon=max((claim.epsilon for claim in map(_main_claim, results) if claim), default=None),
    )


def _main_claim(result: Result) -> Claim | None:
    """Return a run's first claim of privacy that follows from no other claim."""
    return next(iter(result.privacy.strongest()), None) if result.privacy else None


def table_notes(results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return the lines below the table: options behind a bare name, preparations, privacy, runs that ended early."""
    about: dict[str, list[str]] = {}
    for method, runs in results.items():
        for claim in dict.fromkeys(claim.about() for claim in map(_main_claim, runs) if claim):
            about.setdefault(claim, []).append(method)
    notes = [
        f"{method} is {runs[0].stands_for}: without options it has the options of the experiment's [method] section."
        for method, runs in results.items()
        if runs[0].stands_for
    ]
    prepared = {method: prepared_text([run.history.rows for run in runs]) for method, runs in results.items()}
    notes += [f"{method} prepared, mean over runs: {text}" for method, text in prepared.items() if text]
    notes += [f"epsilon of {', '.join(methods)}: {claim}" for claim, methods in about.items()]
    if about:
        notes.append("An epsilon counts one run (the largest over seeds): runs on the same data add up.")
    for method, runs in results.items():
        reasons = Counter(run.privacy.stopped for run in runs if run.privacy and run.privacy.stopped)
        notes += [f"{method}, {count} of {counted(len(runs), 'run')}: {reason}" for reason, count in reasons.items()]
        if ended := [str(len(run.history.rows)) for run in runs if run.ended_early]:
            share = f"{len(ended)} of {counted(len(runs), 'run')}"
            notes.append(f"{method}, {share}: ended early (early_stop), after {', '.join(ended)} rounds")
    return notes


def compare(
    experiment: Experiment,
    methods: Sequence[str] = (),
    *,
    seeds: int | None = None,
    run_dir: str | Path | None = None,
    callbacks: Callable[[str, int], Sequence[Callback]] = lambda method, seed: (),
    source: Source | None = None,
    data: Any = None,
    resume: bool = False,
) -> Comparison:
    """Run every method with seeds experiment.seed, + 1, ...; the data are loaded once and split once a seed.

    methods: names with options, e.g. ["fedavg", "fedprox(mu=0.1)"], or one text, "fedavg,fedprox(mu=0.1)"; by default
        the experiment's [compare] methods. The bare name of the experiment's method has the options of the [method]
        section. A name with options, "feddf(student.lr=0.1)", has no others.
    callbacks: called with the method and the seed, returns the callbacks of that run.
    source: data that are loaded already (by default the experiment's data are loaded).
    data: data in Python, as `run` takes them: (x, y), (x, y, owners), a DataFrame, a torch Dataset.
    resume: go on with the comparison in `run_dir`; methods and seeds that it does not have yet are added to it.
    """
    if data is not None:
        if source is not None:
            raise FedstillError("source and data both say whose rows there are: give one of them")
        experiment, source = read_data(experiment, data)
    experiment = _with_methods(checked_experiment(experiment), methods, seeds)
    folder = None if run_dir is None else Path(run_dir)
    before = None if folder is None else _description(folder)
    if folder is not None and resume and before is not None:
        experiment = grown(experiment, folder)
    entries = entries_of(experiment)
    source = load_source(next(iter(entries.values()))) if source is None else source
    player = _Player(experiment, folder, source, callbacks, resume)
    variants = player.build(entries)
    federation = next(iter(variants.values()))[0][1].federation
    given = not federation.built_from
    if experiment.compare.jobs > 1 and (folder is None or given):
        cause = "data in Python are in one process only" if given else "run_dir is missing, where the runs are written"
        raise FedstillError(f"compare.jobs = {experiment.compare.jobs}: {cause}: set it to 1")
    with ExitStack() as stack:
        if folder is not None:
            check_run_folder(experiment, folder, asked="run_dir")
            stack.enter_context(working_in(folder))
            if _description(folder) != before:
                raise FedstillError(f"'{folder}' was changed by another process just now: give the command again")
            (folder / BEST_FILE).unlink(missing_ok=True)  # there is none before all points have ended
            if not (folder / RESULTS_FILE).exists():  # before config.toml, because it tells a comparison from a run
                _save({}, experiment, folder)
            write_description(with_given_data(experiment) if given else experiment, folder)
        if not experiment.compare.search:
            return player.compare(variants)
        keep = partial(_save, experiment=experiment, folder=folder)
        results, ended = search(experiment, player.play_points, folder=folder, keep=keep)
        return player.finish(results, federation, ended=ended)


def _description(folder: Path) -> bytes | None:
    return read_bytes(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else None


def sweep(
    experiment: Experiment, over: Mapping[str, Any] | Iterable[str] | str = (), *, search: int | None = None, **how: Any
) -> Comparison:
    """Compare the points of some keys: every combination of their values, or as many as `search` by Optuna.

    over: {"local.lr": [0.01, 0.1], "method.mu": None}, or texts as `--over` takes them; None stands for the values that
        the method's page proposes, and "0.001..0.1" for a range to search. By default the experiment's [compare] over.
    search: how many points Optuna may ask for; 0 runs all combinations. By default [compare] search.
    how: seeds, run_dir, callbacks, source, data and resume, as `compare` takes them.
    The accuracies are on rows that clients hold back. The best point is the first of `summaries`, and
    run_dir/best.toml is its experiment, which is measured on the test rows as the experiment given is.
    """
    return compare(with_axes(experiment, as_texts(over), search=search), **how)


def with_axes(experiment: Experiment, over: Sequence[str], *, search: int | None = None) -> Experiment:
    """Return the experiment with a sweep in its [compare] section, whose axes have values."""
    section = {**experiment.compare.model_dump(), "methods": [], "references": False}
    section |= {"over": list(over)} if over else {}
    section |= {} if search is None else {"search": search}
    if not section["over"]:
        raise FedstillError("a sweep needs a key: e.g. --over local.lr=0.01,0.1")
    asked = experiment.replace(compare=section)
    points_of(asked)  # names all mistakes
    return asked.replace(compare={**section, "over": [axis.text for axis in read_axes(asked)]})


def _with_methods(experiment: Experiment, methods: Sequence[str], seeds: int | None) -> Experiment:
    """Return the experiment with the methods and the seeds that it compares in its [compare] section."""
    section = experiment.compare.model_dump()
    if methods or not experiment.compare.over:
        section |= {"methods": list(choose_methods(experiment, methods)), "over": [], "search": 0}
    return experiment.replace(compare=section if seeds is None else {**section, "seeds": seeds})


def entries_of(experiment: Experiment) -> dict[str, Experiment]:
    """Return the experiment of each row of the table by its text: of each method, or of each point of a sweep."""
    if experiment.compare.over:
        return points_of(experiment)
    sections, entries = choose_methods(experiment), {}
    attacks = {text: experiment.replace(attack=attack_table(text)).attack for text in experiment.compare.attacks}
    for text, section in sections.items():
        entries[text] = experiment.model_copy(update={"method": section})
        entries |= {
            under(text, name): experiment.model_copy(update={"method": section, "attack": attack})
            for name, attack in attacks.items()
        }
    return entries


def under(method: str, attack: str) -> str:
    """Return the name in the table of a method that is attacked.

    >>> under("fedavg+median", "sign:0.2")
    'fedavg+median under sign:0.2'
    """
    return f"{method} under {attack}"


Variants = Mapping[str, Sequence[tuple[Experiment, Built]]]  # by the name in the table, one for each seed


@dataclass
class _Player:
    """Builds and runs the entries of a comparison."""

    experiment: Experiment
    folder: Path | None
    source: Source
    callbacks: Callable[[str, int], Sequence[Callback]]
    resume: bool
    federations: dict[str, Federation] = field(default_factory=dict)  # by the settings that they follow from
    experiments: dict[str, Experiment] = field(default_factory=dict)  # by the name in the table
    warned: set[str] = field(default_factory=set)

    def build(self, entries: Mapping[str, Experiment]) -> Variants:
        """Build the runs of each entry, one for each seed, and refuse an entry that cannot run."""
        variants: dict[str, list[tuple[Experiment, Built]]] = {}
        alone = self.experiment.compare.model_copy(update={"references": False})  # all entries share the references
        for entry, experiment in entries.items():
            pairs = []
            for shift in range(self.experiment.compare.seeds):
                run = experiment.model_copy(update={"seed": experiment.seed + shift, "compare": alone})
                run = in_one_process(run) if self.experiment.compare.jobs > 1 else run  # runs are spread, not clients
                if (split := split_settings(run)) not in self.federations:
                    self.federations[split] = build_federation(run, self.source)
                pairs.append((run, build(run, self.federations[split])))
            for _, built in pairs if experiment.privacy.epsilon is not None else pairs[:1]:
                check_built(built)  # a budget's first round depends on the split, so each seed is checked
            variants[label(entry)], self.experiments[label(entry)] = pairs, experiment
        return variants

    def play(self, variants: Variants, floor: Floor = MappingProxyType({})) -> Iterator[tuple[str, list[Result]]]:
        """Run each entry with each seed, and yield its results when it has all; floor: see EndBelow."""
        ahead: set[Path] = set()
        if self.folder is not None and self.experiment.compare.jobs > 1:
            jobs = [
                Job(
                    entry, run, self.folder / run_folder(entry, run.seed), self.resume, dict(floor)
                )  # a proxy cannot be sent
                for entry, pairs in variants.items()
                for run, _ in pairs
            ]
            ahead = run_side_by_side(jobs, self.experiment, callbacks=self.callbacks, warned=self.warned)
        for entry, pairs in variants.items():
            results = []
            for run, built in pairs:
                place = None if self.folder is None else self.folder / run_folder(entry, run.seed)
                again = self.resume or place in ahead
                watchers = [] if place in ahead else [*self.callbacks(entry, run.seed)]
                watchers += [EndBelow(floor)] if floor else []
                with each_once(self.warned):
                    result = run_built(run, built, run_dir=place, callbacks=watchers, resume=again, pictures=False)
                results.append(replace(result, stands_for=_stands_for(entry, run.method)))
            yield entry, results

    def play_points(self, points: Mapping[str, Experiment], seeds: slice, floor: Floor) -> dict[str, list[Result]]:
        """Run points with some of the seeds."""
        variants = {name: pairs[seeds] for name, pairs in self.build(points).items()}
        return dict(self.play(variants, floor))

    def compare(self, variants: Variants) -> Comparison:
        """Run all entries, then the references; results.json has the rows of all finished entries at any time."""
        results: dict[str, list[Result]] = {}
        for entry, made in self.play(variants):
            results[entry] = made
            _save(results, self.experiment, self.folder)
        pairs = next(iter(variants.values()))
        references = []
        for run, built in pairs if self.experiment.compare.references else []:
            file = None if self.folder is None else self.folder / "references" / f"seed-{run.seed}.json"
            watchers = self.callbacks("references", run.seed)
            references.append(measure_references(run, built, file=file, callbacks=watchers, resume=self.resume))
        for finished in results.values() if references and self.folder is not None else []:
            for result, known, (_, built) in zip(finished, references, pairs, strict=True):
                parties = parties_of(built.federation, replace(result, references=known))
                if parties and result.run_dir is not None:
                    write_parties(parties, result.run_dir)  # again, because the references are known now
        return self.finish(results, pairs[0][1].federation, references)

    def finish(
        self,
        results: dict[str, list[Result]],
        federation: Federation,
        references: Sequence[References] = (),
        ended: Mapping[str, Curve] = MappingProxyType({}),
    ) -> Comparison:
        """Write the table and the pictures, and of a sweep the file of its best point."""
        comparison = Comparison(results, self.folder, tuple(references), ended)
        if self.folder is not None:
            _save(results, self.experiment, self.folder, references)
            draw_pictures(self.experiment, federation, results, self.folder, references)
            if self.experiment.compare.over:
                best = best_experiment(self.experiment, self.experiments[comparison.summaries[0].method])
                write_whole(self.folder / BEST_FILE, best.to_toml())
                if (effects := comparison.sensitivity) is not None:
                    title = f"{federation.train.name}: {federation.partition}"
                    draw_all({PICTURE_FILE: lambda path: sensitivity_picture(effects, path, title=title)}, self.folder)
        return comparison


def grown(experiment: Experiment, folder: Path, *, fixed: Collection[str] = ()) -> Experiment:
    """Return the experiment with the methods, points and seeds of the comparison in a folder, too.

    Another experiment is refused in one line. fixed: settings that must be the same although no round depends on them.
    """
    before = check_same_comparison(experiment, folder, fixed=fixed)
    old, asked = before.compare, experiment.compare
    if old.over or asked.over:
        return experiment.replace(compare=united(before, experiment, where=str(folder)))
    methods = {folder_name(label(text)): text for text in old.methods}
    for text in asked.methods:
        name = folder_name(label(text))
        if name in methods and anchored(text) != methods[name]:
            raise FedstillError(f"'{folder}' has another method in '{name}', {methods[name]}: rename {text}")
        methods.setdefault(name, text)
    more = {"methods": list(methods.values()), "seeds": max(old.seeds, asked.seeds)}
    more["references"] = old.references or asked.references
    more["attacks"] = list(dict.fromkeys([*old.attacks, *asked.attacks]))
    return experiment.replace(compare={**asked.model_dump(), **more})


def choose_methods(experiment: Experiment, methods: Sequence[str] = ()) -> dict[str, MethodSection]:
    """Return each entry's [method] section by its text: `methods`, else [compare], else FedAvg and the experiment's."""
    default = dict.fromkeys(["fedavg", experiment.method.name])
    texts = [*(_as_texts(methods) or experiment.compare.methods or default)]
    entries, mistakes = dict[str, MethodSection](), list[str]()
    for text in texts:
        try:
            entries[text] = parse_method(text, experiment)
            build_phases(entries[text].phases)  # so that two parts that clash are reported before the data are read
        except FedstillError as error:
            mistakes += [line for line in error.lines if line not in mistakes]
    if mistakes:
        raise FedstillError(*mistakes)
    folders = {folder_name(label(text)) for text in entries}
    if len(folders) < len(texts):
        raise FedstillError(f"compare.methods names a method twice: {', '.join(texts)}; each entry must differ")
    return entries


def _as_texts(methods: object) -> list[str]:
    """Return methods as texts, from one text with commas or from several; the table and the folders need the names."""
    if isinstance(methods, str):
        return split_methods(methods)
    texts: list[Any] = list(methods) if isinstance(methods, Iterable) else [methods]
    for text in texts:
        if not isinstance(text, str):
            name = getattr(text, "__name__", "function")
            kind = f"the function {name}" if callable(text) else f"a {type(text).__name__}"
            raise FedstillError(f"compare takes methods as text: instead of {kind} give 'fedavg' or 'FILE.py:{name}'")
    return texts


def _stands_for(entry: str, section: MethodSection) -> str:
    """Return the method with its options where the entry is a bare name that does not show them, else no text."""
    full, name = label(without_defaults(section)), label(section.name)
    return full if entry.partition(" under ")[0] == name != full else ""


def folder_name(entry: str) -> str:
    """Return the name of the folder of a method's entry.

    >>> folder_name("fedprox(mu=0.1)")
    'fedprox-mu-0.1'
    """
    name = re.sub(r"[^\w.]+", "-", entry).strip("-")
    if len(name) <= LONGEST_FOLDER:
        return name
    return f"{name[:LONGEST_FOLDER]}-{hashlib.sha256(entry.encode()).hexdigest()[:8]}"


def run_folder(entry: str, seed: int) -> str:
    return f"{folder_name(entry)}/seed-{seed}"


def _save(
    results: dict[str, list[Result]], experiment: Experiment, folder: Path | None, references: Sequence[References] = ()
) -> None:
    """Write results.json: the table, and for each run its numbers and its folder.

    Methods of an earlier start that this one has not come to yet keep their rows.
    """
    if folder is None:
        return
    earlier = _earlier(folder)
    runs = [row for row in earlier["runs"] if row["method"] not in results] + [
        {
            **result.summary(),
            "method": method,
            "seed": seed,
            "run_dir": run_folder(method, seed),
            "rounds_to_target": result.rounds_to_target,
        }
        for method, finished in results.items()
        for seed, result in enumerate(finished, experiment.seed)
    ]
    kept = [MethodSummary.from_json(row) for row in earlier["methods"] if row["method"] not in results]
    table = {"name": experiment.name, "methods": table_json([*kept, *Comparison(results).summaries]), "runs": runs}
    if references:
        table["references"] = [
            {"seed": seed, **each.summary()} for seed, each in enumerate(references, experiment.seed)
        ]
    write_whole(folder / RESULTS_FILE, json.dumps(table, indent=2) + "\n")


def _earlier(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that an earlier start wrote into results.json; none where it holds something else."""
    nothing: dict[str, list[dict[str, Any]]] = {"methods": [], "runs": []}
    try:
        table = read_json(folder / RESULTS_FILE)
        for row in table["methods"]:
            MethodSummary.from_json(row)
        return table if all(isinstance(row["method"], str) for row in table["runs"]) else nothing
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return nothing
