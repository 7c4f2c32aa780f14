"""`fedstill bench`: a paper's tables listed, run and shown with ours beside the paper's."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from fedstill.bench.estimate import Estimate, estimate, estimate_line, longest_first, silent
from fedstill.bench.plan import (
    Job,
    check_jobs,
    check_places,
    choose_jobs,
    claimed,
    find_device,
    make_orders,
    place_data,
    split_done,
)
from fedstill.bench.recipe import (
    Expected,
    Recipe,
    Table,
    choose,
    find_paper,
    find_preset,
    find_table,
    load_expected,
    load_recipe,
    select,
    with_settings,
)
from fedstill.bench.render import as_json, text_table
from fedstill.bench.results import Records, Run, add_run, cell_id, read_runs, run_id
from fedstill.bench.summary import summarize_table
from fedstill.bench.workers import Message, WorkerPool, crew, shared_gpu
from fedstill.cli.app import print_json, stoppable, tell
from fedstill.cli.bench_progress import BenchProgress
from fedstill.core.errors import FedstillError
from fedstill.report.table import counted

GO_ON = "go on with the same command: finished runs are kept, begun ones resume"


@dataclass(frozen=True)
class BenchOptions:
    """The words of the command line."""

    paper: str
    table: str | None = None
    columns: str | None = None
    methods: str | None = None
    seeds: int = 1
    preset: str | None = None
    data: Path | None = None
    jobs: str = "auto"
    device: str = "auto"
    out: Path | None = None
    results: Path | None = None
    settings: Sequence[str] = ()
    dry_run: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Work:
    """What a call is about: the chosen part of one table, and where its results are."""

    recipe: Recipe
    expected: Expected
    preset: str
    table: Table  # with the settings of the command line
    printed: Table  # as the recipe has it
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    out: Path
    results: Path
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchPlan:
    """The runs asked for, and what is known of them."""

    wanted: Sequence[Job]
    missing: Sequence[Job]  # not done
    left: Sequence[Job]  # of those the ones that --data has data for
    found: Sequence[Run]  # done, but in their folders only
    runs: Sequence[Run]  # all that are known, of any table

    @property
    def done(self) -> int:
        return len(self.wanted) - len(self.missing)


@dataclass(frozen=True)
class Outcome:
    """What became of the runs that were asked for."""

    failed: int = 0
    any_done: bool = False  # now or before
    nothing_ran: bool = False  # though something was to be run


def bench_command(options: BenchOptions) -> None:
    if options.seeds < 1:
        raise FedstillError(f"--seeds {options.seeds}: use at least 1")
    check_jobs(options.jobs)
    folder = find_paper(options.paper)
    recipe = load_recipe(folder)
    expected = load_expected(folder, recipe)
    preset = find_preset(recipe, options.preset)
    out = Path("runs") / "bench" / recipe.paper if options.out is None else options.out
    results = results_file(options, recipe, out)
    if options.table is None:
        _list(options, recipe, preset, read_runs(results, recipe.paper))
        return
    work = _choose(options, recipe, expected, preset, out, results)
    outcome = _run(work, options)
    if not options.dry_run and (outcome.any_done or not outcome.nothing_ran):
        _show(work, options.as_json)
    if outcome.failed:
        tell(f"{counted(outcome.failed, 'run')} failed; the same command tries again")
    if outcome.failed or outcome.nothing_ran:
        raise typer.Exit(1)


def results_file(options: BenchOptions, recipe: Recipe, out: Path) -> Path:
    """The one named, else the documentation's (of unchanged experiments, where there is one), else one in `out`."""
    if options.results is not None:
        return options.results
    documented = Path("docs") / "results"
    if documented.is_dir() and not options.settings:
        return documented / f"{recipe.paper}.json"
    return out / "results.json"


def _choose(options: BenchOptions, recipe: Recipe, expected: Expected, preset: str, out: Path, results: Path) -> Work:
    assert options.table is not None
    printed = find_table(recipe, preset, options.table)
    columns = choose("--columns", options.columns, printed.columns)
    rows = choose("--methods", options.methods, printed.rows)
    table = with_settings(printed, options.settings, select(printed, columns, rows))
    recipe = replace(recipe, tables={preset: {table.name: table}})
    return Work(recipe, expected, preset, table, printed, columns, rows, out, results, tuple(options.settings))


def _run(work: Work, options: BenchOptions) -> Outcome:
    """Run what is not done yet."""
    device = find_device(options.device)
    cells = select(work.table, work.columns, work.rows)
    wanted = make_orders(cells, preset=work.preset, seeds=options.seeds, device=device, out=work.out)
    check_places(work.out, work.results)
    plan = _plan(work, wanted, options.data, skip=tell)
    if options.dry_run or not (plan.left or plan.found):
        return _work_off(work, plan, options, device=device)
    with claimed(work.out, work.results):
        plan = _plan(work, wanted, options.data, skip=silent)  # another bench may just have ended
        for run in plan.found:
            add_run(work.results, work.recipe.paper, run)
        return _work_off(work, plan, options, device=device)


def _plan(work: Work, wanted: Sequence[Job], data: Path | None, *, skip: Callable[[str], None]) -> BenchPlan:
    runs = read_runs(work.results, work.recipe.paper)
    missing, found = split_done(wanted, runs)
    return BenchPlan(wanted, missing, place_data(missing, data, skip), found, [*runs, *found])


def _work_off(work: Work, plan: BenchPlan, options: BenchOptions, *, device: str) -> Outcome:
    if not plan.left:
        skipped = f", {len(plan.missing)} skipped" if plan.missing else ""
        _tell_estimate(f"nothing to run: {counted(plan.done, 'run')} done{skipped}", 0, 0.0, options)
        return Outcome(any_done=plan.done > 0, nothing_ran=bool(plan.missing))
    jobs = choose_jobs(options.jobs, device=device, runs=len(plan.left))
    with stoppable(lambda: GO_ON), shared_gpu(jobs, device) as shared, crew(jobs) as workers:
        known = estimate(plan.left, plan.wanted, plan.runs, workers, jobs=jobs, tell=tell)
        for failure in known.failures:
            tell(f"no estimate from {failure}")
        able = _with_data(plan.left, known, options.data)
        if not able:
            line = f"nothing to run: {counted(plan.done, 'run')} done, {len(plan.missing)} without data"
            _tell_estimate(line, 0, 0.0, options)
            return Outcome(any_done=plan.done > 0, nothing_ran=True)
        line = estimate_line(able, known, jobs=jobs, device=device) + (" (shared through MPS)" if shared else "")
        _tell_estimate(line, len(able), known.total(able, jobs), options)
        if options.dry_run:
            return Outcome(any_done=plan.done > 0)
        failed = _perform(work, longest_first(able, known), known, workers)
        return Outcome(failed + len(plan.left) - len(able), any_done=plan.done > 0 or failed < len(able))


def _with_data(orders: Sequence[Job], known: Estimate, data: Path | None) -> list[Job]:
    """Orders whose data can be had; what cannot is told once a reason."""
    lacking: dict[str, dict[str, None]] = {}
    for order in orders:
        if (why := known.lacks_data(order)) is not None:
            lacking.setdefault(why, {})[order.column] = None
    for why, columns in lacking.items():
        cure = "" if data is not None else "; give --data DIR if it lies in a folder of yours"
        tell(f"skipped {', '.join(columns)}: {why}{cure}")
    return [order for order in orders if known.lacks_data(order) is None]


def _tell_estimate(line: str, runs: int, seconds: float | None, options: BenchOptions) -> None:
    """With --dry-run it is the answer, otherwise a word before the work begins."""
    if not options.dry_run:
        tell(line)
    elif options.as_json:
        print_json({"runs": runs, "seconds": None if seconds is None else round(seconds, 1), "text": line})
    else:
        typer.echo(line)


def _perform(work: Work, orders: Sequence[Job], known: Estimate, workers: WorkerPool) -> int:
    failed = 0
    with BenchProgress(orders, known) as progress:

        def hear(message: Message) -> None:
            nonlocal failed
            if message["kind"] == "done":
                add_run(work.results, work.recipe.paper, message["answer"])
            failed += message["kind"] == "failed"
            progress.hear(message)

        workers.do("run", orders, hear)
    return failed


def _show(work: Work, in_json: bool) -> None:
    runs = read_runs(work.results, work.recipe.paper)
    chosen = {"columns": work.columns, "rows": work.rows}
    columns = summarize_table(work.table, runs, work.expected, **chosen, printed=work.printed)
    if in_json:
        print_json(as_json(work.recipe, work.preset, work.table.name, columns, settings=work.settings))
        return
    changed = f", changed: {', '.join(work.settings)}" if work.settings else ""
    title = f"{work.recipe.paper}, {heading(work.table)} (preset {work.preset}{changed})"
    typer.echo("\n".join([title, *([work.table.note] if work.table.note else []), "", text_table(columns), ""]))
    models = f", models below {work.out}" if work.out.exists() else ""
    if work.results.exists():
        typer.echo(f"Curves and seconds of every run are in {work.results}{models}.")


def heading(table: Table) -> str:
    """Table 3: title; a figure by the name that --table takes.

    >>> heading(Table("3", "Accuracy", ())), heading(Table("figure-8", "The switch", ()))
    ('table 3: Accuracy', 'figure-8: The switch')
    """
    name = f"table {table.name}" if table.name.isdecimal() else table.name
    return f"{name}: {table.title}"


def _list(options: BenchOptions, recipe: Recipe, preset: str, runs: Sequence[Run]) -> None:
    for name in ("columns", "methods"):
        if getattr(options, name) is not None:
            raise FedstillError(f"--{name} needs --table: choose one of {', '.join(recipe.tables[preset])}")
    tables = [_entry(table, runs) for table in recipe.tables[preset].values()]
    if options.as_json:
        head = {"paper": recipe.paper, "title": recipe.title, "presets": dict(recipe.presets), "preset": preset}
        print_json({**head, "tables": tables})
        return
    typer.echo(f"{recipe.paper}: {recipe.title}")
    for name, meaning in recipe.presets.items():
        typer.echo(f"preset {name}{' (shown)' if name == preset else ''}: {meaning}")
    for table, entry in zip(recipe.tables[preset].values(), tables, strict=True):
        cells = f"{entry['cells_done']} of {counted(entry['runs'], 'cell')} have a run"
        typer.echo(f"\n{heading(table)}\n  {cells}, {counted(entry['done'], 'run')} with all seeds")
        for name, words in (("columns", table.columns), ("methods", table.rows)):
            typer.echo(_names(f"  {name}: {', '.join(words)}"))
    first = next(iter(recipe.tables[preset]))
    typer.echo(f"\nNext: fedstill bench {shlex.quote(options.paper)} --table {shlex.quote(first)} --dry-run")


def _names(line: str) -> str:
    """In lines of 100, each name whole: it is to be copied."""
    return textwrap.fill(line, 100, subsequent_indent=" " * 11, break_on_hyphens=False, break_long_words=False)


def _entry(table: Table, runs: Sequence[Run]) -> dict[str, Any]:
    records = Records(runs)
    cells = {cell_id(cell.experiment): records.of(cell.experiment) for cell in table.cells}
    done = {run_id(run) for found in cells.values() for run in found.values()}
    about = {"name": table.name, "title": table.title, "note": table.note}
    return {
        **about,
        "columns": list(table.columns),
        "rows": list(table.rows),
        "runs": len(cells),
        "done": len(done),
        "cells_done": sum(map(bool, cells.values())),
    }
