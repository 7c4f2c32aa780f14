"""`fedstill bench`: a paper's tables listed, run and shown with ours beside the paper's."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from fedstill.bench.estimate import Estimate, estimate, estimate_line, longest_first
from fedstill.bench.form import Expected, Recipe, Table
from fedstill.bench.load import find_paper, find_preset, find_table, load_expected, load_recipe
from fedstill.bench.order import Order
from fedstill.bench.plan import choose_jobs, find_device, make_orders, place_data, split_done
from fedstill.bench.pool import Crew, crew
from fedstill.bench.render import as_json, text_table
from fedstill.bench.results import Run, add_run, cell_key, merge, read_runs
from fedstill.bench.selection import choose, select, with_settings
from fedstill.bench.sharing import shared_gpu
from fedstill.bench.summary import summarize_table
from fedstill.bench.worker import Message
from fedstill.cli.bench_progress import BenchProgress
from fedstill.cli.shared import print_json, tell
from fedstill.core.errors import FedstillError


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
    table: Table
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    out: Path
    results: Path


def bench_command(options: BenchOptions) -> None:
    if options.seeds < 1:
        raise FedstillError(f"--seeds {options.seeds}: use at least 1")
    folder = find_paper(options.paper)
    recipe, expected = load_recipe(folder), load_expected(folder)
    preset = find_preset(recipe, options.preset)
    out = Path("runs") / "bench" / recipe.paper if options.out is None else options.out
    results = results_file(options, recipe, out)
    if options.table is None:
        _list(options, recipe, preset, read_runs(results))
        return
    work = _choose(options, recipe, expected, preset, out, results)
    failed = _run(work, options)
    if not options.dry_run:
        _show(work, options.as_json)
    if failed:
        tell(f"{failed} runs failed; the same command tries them again")
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
    table = find_table(recipe, preset, options.table)
    columns = choose("--columns", options.columns, table.columns)
    rows = choose("--methods", options.methods, table.rows)
    table = with_settings(table, options.settings, select(table, columns, rows))
    recipe = replace(recipe, tables={preset: {table.name: table}})
    return Work(recipe, expected, preset, table, columns, rows, out, results)


def _run(work: Work, options: BenchOptions) -> int:
    """Run what is not done yet; how many failed."""
    device = find_device(options.device)
    cells = select(work.table, work.columns, work.rows)
    wanted = make_orders(cells, preset=work.preset, seeds=options.seeds, device=device, out=work.out)
    missing, found = split_done(wanted, read_runs(work.results))
    for run in found:
        add_run(work.results, work.recipe.paper, run)
    left = place_data(missing, options.data, tell)
    if not left:
        done, skipped = len(wanted) - len(missing), f", {len(missing)} skipped" if missing else ""
        _tell_estimate(f"nothing to run: {done} runs done{skipped}", 0, 0.0, options)
        return 0
    jobs = choose_jobs(options.jobs, device=device, runs=len(left))
    with _stoppable(), shared_gpu(jobs, device) as shared, crew(jobs) as workers:
        known = estimate(left, wanted, read_runs(work.results), workers, jobs=jobs)
        for failure in known.failures:
            tell(f"no estimate from {failure}")
        line = estimate_line(left, known, jobs=jobs, device=device) + (" (shared through MPS)" if shared else "")
        _tell_estimate(line, len(left), known.total(left, jobs), options)
        return 0 if options.dry_run else _perform(work, longest_first(left, known), known, workers)


def _tell_estimate(line: str, runs: int, seconds: float | None, options: BenchOptions) -> None:
    """With --dry-run it is the answer, otherwise a word before the work begins."""
    if not options.dry_run:
        tell(line)
    elif options.as_json:
        print_json({"runs": runs, "seconds": None if seconds is None else round(seconds, 1), "text": line})
    else:
        typer.echo(line)


def _perform(work: Work, orders: Sequence[Order], known: Estimate, workers: Crew) -> int:
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


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C is no accident: what is done is kept, and the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        tell("stopped; go on with the same command: finished runs are kept, begun ones resume")
        raise typer.Exit(130) from None


def _show(work: Work, in_json: bool) -> None:
    runs = read_runs(work.results)
    columns = summarize_table(work.table, runs, work.expected, columns=work.columns, rows=work.rows)
    if in_json:
        print_json(as_json(work.recipe, work.preset, work.table.name, columns))
        return
    title = f"{work.recipe.paper}, {heading(work.table)} (preset {work.preset})"
    typer.echo("\n".join([title, *([work.table.note] if work.table.note else []), "", text_table(columns), ""]))
    typer.echo(f"Curves and seconds of every run are in {work.results}, models below {work.out}.")


def heading(table: Table) -> str:
    """Table 3: title; a figure is called what it is.

    >>> heading(Table("3", "Accuracy", ())), heading(Table("figure-8", "The switch", ()))
    ('table 3: Accuracy', 'figure 8: The switch')
    """
    name = f"table {table.name}" if table.name.isdecimal() else table.name.replace("-", " ")
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
        typer.echo(f"\n{heading(table)}\n  {entry['done']} runs done; one seed is {entry['runs']} runs")
        for name, words in (("columns", table.columns), ("methods", table.rows)):
            typer.echo(textwrap.fill(f"  {name}: {', '.join(words)}", 100, subsequent_indent=" " * 11))
    first = next(iter(recipe.tables[preset]))
    typer.echo(f"\nNext: fedstill bench {options.paper} --table {first} --dry-run")


def _entry(table: Table, runs: Sequence[Run]) -> dict[str, Any]:
    keys = {cell_key(cell.experiment) for cell in table.cells}
    done = sum(run["key"] in keys for run in merge(runs))
    about = {"name": table.name, "title": table.title, "note": table.note}
    return {**about, "columns": list(table.columns), "rows": list(table.rows), "runs": len(keys), "done": done}
