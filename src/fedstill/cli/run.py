"""The commands that compute: run, compare, resume."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import typer

from fedstill.cli.app import (
    ChooseOptions,
    CompareOptions,
    Format,
    RunOptions,
    SweepOptions,
    print_json,
    say,
    stoppable,
    tell,
)
from fedstill.cli.progress import Progress
from fedstill.core.errors import FedstillError
from fedstill.experiment.build import build_federation, load_source
from fedstill.experiment.choose import CHOICE_FILE
from fedstill.experiment.code_names import code_names
from fedstill.experiment.compare import (
    BEST_FILE,
    RESULTS_FILE,
    Comparison,
    choose_methods,
    compare,
    entries_of,
    grown,
    table_notes,
    with_axes,
)
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import describe_model
from fedstill.experiment.more_rounds import with_rounds
from fedstill.experiment.overrides import (
    attack_table,
    describe_partition,
    parse_method,
    read_experiment,
    with_short_forms,
    without_defaults,
)
from fedstill.experiment.run import run
from fedstill.experiment.run_folder import CONFIG_FILE, check_run_folder, new_run_dir, read_description
from fedstill.loop.callbacks import Callback
from fedstill.loop.cautions import all_refused
from fedstill.loop.history import History, Result
from fedstill.methods.lookup import label, split_methods
from fedstill.report import counted, human_bytes
from fedstill.report.parties import parties_of, party_text
from fedstill.report.sensitivity import ON_HELD_BACK, PICTURE_FILE, in_letters, in_sentences
from fedstill.report.table import MethodSummary, plain_table, prepared_text, reference_lines, rich_table, table_legend
from fedstill.storage.toml import read_toml, toml_value


def run_command(options: RunOptions) -> None:
    changes = settings_of(options)
    experiment = read_experiment(options.file, changes)
    folder = choose_folder(experiment, options.out)
    changed = any(not change.strip().startswith("method") for change in changes)  # the method is named anyway
    file = folder / CONFIG_FILE if changed else options.file
    _run(experiment, folder, file=file, quiet=options.quiet, as_json=options.format is Format.json)


def compare_command(options: CompareOptions) -> None:
    changes = settings_of(options)
    experiment = read_experiment(options.file, changes)
    asked = split_methods(options.methods or "")
    if options.methods is not None and not asked:
        raise FedstillError("--methods is empty: name some, e.g. --methods fedavg,fedprox,scaffold")
    entries, inside = choose_methods(experiment, asked), experiment.compare
    count = inside.seeds if options.seeds is None else options.seeds
    changed = changes or options.attack or count != inside.seeds or (asked and tuple(entries) != inside.methods)
    section = {**inside.model_dump(), "methods": list(entries), "seeds": count, "over": [], "search": 0}
    if options.attack is not None:
        section["attacks"] = split_methods(options.attack)
    _begin_or_grow(experiment.replace(compare=section), options, changed=bool(changed))


def sweep_command(options: SweepOptions) -> None:
    experiment = read_experiment(options.file, settings_of(options))
    if options.seeds is not None:
        experiment = experiment.replace(compare={**experiment.compare.model_dump(), "seeds": options.seeds})
    _begin_or_grow(with_axes(experiment, options.over or (), search=options.search), options, changed=True)


def _begin_or_grow(experiment: Experiment, options: CompareOptions | SweepOptions, *, changed: bool) -> None:
    """Begin a comparison or a sweep, or go on with the one in --out; changed: the experiment file does not say it."""
    grows = options.out is not None and (options.out / RESULTS_FILE).exists() and (options.out / CONFIG_FILE).exists()
    if options.out is not None and grows:
        folder, experiment = options.out, grown(experiment, options.out, fixed=("rounds", "early_stop", "privacy"))
    else:
        folder = choose_folder(experiment, options.out)
    file = folder / CONFIG_FILE if changed or grows else options.file
    as_json = options.format is Format.json
    _compare(experiment, folder, file=file, quiet=options.quiet, as_json=as_json, resume=grows)


def settings_of(options: RunOptions) -> list[str]:
    """Return the settings of --set and of the options that are short for one."""
    short = {"seed": options.seed, "rounds": options.rounds, "device": options.device}
    jobs = options.jobs if isinstance(options, (CompareOptions, SweepOptions, ChooseOptions)) else None
    flag = "true" if options.references else None
    settings = with_short_forms(options.settings or [], {**short, "references": flag, "jobs": jobs})
    if options.attack is None or isinstance(options, CompareOptions):  # `compare` runs each method also without it
        return settings
    return [*settings, *(f"attack.{key}={toml_value(value)}" for key, value in attack_table(options.attack).items())]


def resume_command(run_dir: Path, rounds: int | None, *, quiet: bool, as_json: bool) -> None:
    if (run_dir / CHOICE_FILE).exists():
        from fedstill.cli.choose import choose_again_command

        return choose_again_command(run_dir, rounds, quiet=quiet, as_json=as_json)
    experiment = read_description(run_dir)
    if rounds is not None:
        experiment, notes = with_rounds(experiment, rounds, run_dir)
        for note in notes:
            tell(note)
    go_on = _compare if (run_dir / RESULTS_FILE).exists() else _run
    return go_on(experiment, run_dir, file=run_dir / CONFIG_FILE, quiet=quiet, as_json=as_json, resume=True)


def choose_folder(experiment: Experiment, out: Path | None) -> Path:
    folder = new_run_dir(experiment) if out is None else out
    if folder.exists() and not folder.is_dir():
        raise FedstillError(f"--out: '{folder}' is a file: give a folder")
    if (folder / CONFIG_FILE).exists():
        raise FedstillError(
            f"--out: '{folder}' already holds a run: choose another folder, or `fedstill resume {folder}`"
        )
    check_run_folder(experiment, folder, asked="--out")
    return folder


def _fail_where_all_were_refused(results: Iterable[Result]) -> None:
    """End with exit code 1 if no upload of a whole run was accepted; a warning has named the cure."""
    if any(all_refused(result.history) for result in results):
        raise typer.Exit(1)


def _run(
    experiment: Experiment, folder: Path, *, file: Path | None, quiet: bool, as_json: bool, resume: bool = False
) -> None:
    """Run an experiment, and print its result; `file` is the experiment file to go on with."""
    source = load_source(experiment)
    federation = build_federation(experiment, source)
    title = "\n".join([describe(experiment), *source.notes])
    with resumable(folder), Progress(title, runs=1, rounds=experiment.rounds) as progress:
        progress.label = experiment.method.name
        watchers = [] if quiet else [progress]
        result = run(experiment, run_dir=folder, callbacks=watchers, federation=federation, resume=resume)
    if as_json:
        print_json(result.summary())
    _fail_where_all_were_refused([result])  # before the text, because numbers of an untrained model would mislead
    if as_json:
        return
    parties = parties_of(federation, result)
    say(run_text(experiment, result, parties=party_text(parties) if parties else ""))
    if not quiet:
        say(f"Next: {_after_run(experiment, file)}")


def _compare(
    experiment: Experiment, folder: Path, *, file: Path | None, quiet: bool, as_json: bool, resume: bool = False
) -> None:
    """Run a comparison, and print its table; `file` is the experiment file to go on with."""
    entries, seeds = entries_of(experiment), experiment.compare.seeds
    thing = "point" if experiment.compare.over else "method"
    source = load_source(next(iter(entries.values())))
    number = experiment.compare.search or len(entries)
    counts = f"{counted(number, thing)}, {counted(seeds, 'seed')}"
    title = "\n".join([f"{counts}: {describe(experiment)}", *source.notes])
    with resumable(folder), Progress(title, runs=number * seeds, rounds=experiment.rounds) as progress:

        def watch(method: str, seed: int) -> Sequence[Callback]:
            name = f"{method} seed {seed}"
            if experiment.compare.jobs > 1:
                return [] if quiet else [progress.beside(name)]
            progress.label = name
            return [] if quiet else [progress]

        comparison = compare(experiment, run_dir=folder, callbacks=watch, source=source, resume=resume)
    results = [result for seeds_of_method in comparison.results.values() for result in seeds_of_method]
    if thing == "point" and not all(all_refused(result.history) for result in results):
        results = []  # that some points cannot learn is an answer
    if as_json:
        sensitivity = comparison.sensitivity
        about = {} if sensitivity is None else sensitivity.as_json()
        sweep = {"points": comparison.as_json(), **about, "ended_early": list(comparison.ended)}
        print_json(sweep if thing == "point" else comparison.as_json())
        _fail_where_all_were_refused(results)
        return
    print_table(comparison.summaries)
    names = (PICTURE_FILE, "curves.png", "partition.png", "pseudo_labels.png")
    files = [RESULTS_FILE, *(name for name in names if (folder / name).exists())]
    lines = [
        *([ON_HELD_BACK] if thing == "point" else ()),
        *table_legend(comparison.summaries, thing),
        *(_sweep_lines(comparison) if thing == "point" else ()),
        *table_notes(comparison.results),
        *_reference_lines(comparison),
        f"Everything is in {folder}: {', '.join(files)} and one folder a {thing}.",
    ]
    if not quiet:
        if thing == "method":
            after = _after_comparison(experiment, comparison.summaries[0].method, file)
        else:
            after = f"{on_file('run', folder / BEST_FILE)}  (the best point, with all rows, on the test rows)"
        lines.append(f"Next: {after}")
    say("\n".join(lines))
    _fail_where_all_were_refused(results)


def _sweep_lines(comparison: Comparison) -> list[str]:
    """Return the map of a sweep, and how much each key matters."""
    sensitivity = comparison.sensitivity
    return [] if sensitivity is None else ["", in_letters(sensitivity), "", *in_sentences(sensitivity)]


def print_table(summaries: Sequence[MethodSummary]) -> None:
    """Print the table of a comparison, in colours where a person reads it."""
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(rich_table(summaries, width=console.width))
    else:
        say(plain_table(summaries))


def _reference_lines(comparison: Comparison) -> list[str]:
    """Return how the best method stands to the reference points, where there are any."""
    best = comparison.summaries[0]
    lines = reference_lines(best.method, best.last, comparison.references) if comparison.references else []
    return [line[0].upper() + line[1:] + "." for line in lines]


def resumable(folder: Path) -> AbstractContextManager[None]:
    begun = (CONFIG_FILE, CHOICE_FILE)
    command = f"go on with: fedstill resume {shlex.quote(str(folder))}"
    return stoppable(lambda: command if any((folder / name).exists() for name in begun) else None)


def describe(experiment: Experiment) -> str:
    split = describe_partition(experiment)
    network = describe_model(experiment.model.name, experiment.model.options)
    return f"{network} on {experiment.data.source}, {split}, {counted(experiment.rounds, 'round')}"


def run_text(experiment: Experiment, result: Result, *, parties: str = "") -> str:
    """Return the result of a run for people, with the table of its parties."""
    last, best, metric = result.history.last or {}, result.history.best or {}, result.history.best_by
    value = "is not defined" if best.get(metric) is None else f"{best[metric]:.4f}"
    chosen_by = "" if metric == "accuracy" else f", the best by {metric}: {value}"
    lines = [
        f"{result.method}: {counted(len(result.history.rows), 'round')} in {result.seconds:.1f} s",
        f"  last accuracy  {100 * last['accuracy']:.2f} %",
        f"  best accuracy  {100 * best['accuracy']:.2f} % (round {best['round']}{chosen_by})",
        f"  sent           {_sent(result.history)}",
    ]
    if prepared := prepared_text([result.history.rows]):
        lines.append(f"  prepared       {prepared}")
    if result.ended_early:
        lines.append(f"  early stop     {result.ended_early}")
    if result.reported:
        each = ", ".join(f"{name} {100 * last[f'accuracy_{name}']:.2f} %" for name in result.prototypes)
        lines += [f"  reported       {result.reported}", f"  prototypes     {each}"]
    if experiment.target is not None:
        reached = result.rounds_to_target
        lines.append(f"  target         {'not reached' if reached is None else f'reached in round {reached}'}")
    if result.references is not None:
        references = reference_lines(result.method, [last["accuracy"]], [result.references])
        lines.append("  references     " + ("\n" + " " * 17).join(references))
    if result.privacy is not None:
        lines.append("  privacy        " + result.privacy.text().replace("\n", "\n" + " " * 17))
    if result.generated is not None:
        lines.append(f"  generated      {result.generated['line']}")
        lines.append("                 (a check against copies, no guarantee of privacy: see generated.json)")
    lines += _incidents(result)
    lines += [parties] if parties else []
    lines.append(f"Everything is in {result.run_dir} (models in best/ and last/, numbers in metrics.jsonl, pictures).")
    if result.targets is not None:
        lines.append(f"Labels for the unlabeled set: fedstill predict {shlex.quote(str(result.run_dir))}")
    return "\n".join(lines)


def _sent(history: History) -> str:
    """Say how many bytes went up and down; questions that a method asks clients before its first round stand apart."""
    all_bytes = f"{human_bytes(history.bytes_up)} up, {human_bytes(history.bytes_down)} down"
    asked = [row["round"] for row in history.rows if row.get("bytes_prepared") or row.get("bytes_prepared_down")]
    if not asked:
        return all_bytes
    when = "before the first round" if asked == [1] else f"before round {' and '.join(map(str, asked))}:"
    up, down = history.total("bytes_prepared"), history.total("bytes_prepared_down")
    return f"{all_bytes} ({when} {human_bytes(up)} up, {human_bytes(down)} down)"


def _incidents(result: Result) -> list[str]:
    """Count uploads that were not taken, rounds that drew nobody, and all other records of the audit."""
    turned = sum(record["client"] is not None and not record.get("note") for record in result.audit)
    alone = sum(row.get("cohort") == 0 for row in result.history.rows)
    other = len(result.audit) - turned - alone
    kinds = [(turned, "turned away", "upload"), (alone, "nobody drawn", "round"), (other, "noted", "incident")]
    where = f"see {result.run_dir}/audit.jsonl"
    return [f"  {title:<14} {counted(count, thing)}, {where}" for count, title, thing in kinds if count > 0]


def _after_run(experiment: Experiment, file: Path | None) -> str:
    """Propose a comparison; under a budget a look at the method, because plain ones cannot keep it."""
    method = without_defaults(experiment.method)
    if experiment.privacy.epsilon is not None:
        return f"fedstill explain {shlex.quote(method)}"
    other = "scaffold" if method == "fedavg" else "fedavg"
    return f"{on_file('compare', file)} --methods {shlex.quote(f'{method},{other}')} --seeds 3"


def _after_comparison(experiment: Experiment, best: str, file: Path | None) -> str:
    """Propose a look at the winner, and another skew where the partition has one."""
    alpha, command = experiment.partition.options.get("alpha"), on_file("compare", file)
    seeds = 5 if experiment.compare.seeds < 5 else 2 * experiment.compare.seeds
    sections = {label(entry): parse_method(entry, experiment) for entry in experiment.compare.methods}
    winner = without_defaults(sections[best.partition(" under ")[0]])  # files with their folders, unlike in the table
    other = f"{command} --set partition.alpha={10 * alpha:g}  (milder skew)" if alpha else f"{command} --seeds {seeds}"
    return f"fedstill explain {shlex.quote(winner)}, or {other}"


def on_file(command: str, file: Path | None) -> str:
    """Return a command on a file as a shell reads it, with the user's word where the file names code."""
    allow = ["--allow-code"] if file and code_names(read_toml(file)) else []
    return shlex.join(["fedstill", command, *([str(file)] if file else []), *allow])
