"""`fedstill bench`: a paper's tables listed, run and shown with ours beside the paper's."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import typer

from fedstill.bench.code_path import code_lines
from fedstill.bench.plan import (
    BenchPlan,
    Job,
    Seconds,
    claimed,
    device_name,
    estimate_line,
    find_device,
    finished_run,
    longest_first,
    make_jobs,
    make_plan,
    roughly,
)
from fedstill.bench.recipe import (
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
from fedstill.bench.results import Records, Run, add_run, cell_id, curve_of, read_runs, run_id
from fedstill.bench.summary import best, last_ten, summarize_table
from fedstill.bench.workers import Message, do_jobs
from fedstill.cli.app import BenchOptions, Format, print_json, say, stoppable, tell
from fedstill.core.errors import FedstillError, printable
from fedstill.experiment.cluster import in_one_process
from fedstill.experiment.config import Experiment
from fedstill.report import counted

GO_ON = "go on with the same command: finished runs are kept, begun ones resume"
QUIET_SECONDS = 60.0  # where there is no terminal: a line at least this often
LEAST_SECONDS = 1e-3  # of a run: shares are of a sum that is not zero


def bench_command(options: BenchOptions) -> None:
    folder = find_paper(options.paper)
    recipe = load_recipe(folder)
    expected = load_expected(folder, recipe)
    preset = find_preset(recipe, options.preset)
    out = Path("runs") / "bench" / recipe.paper if options.out is None else options.out
    results = results_file(options, recipe, out)
    if options.table is None:
        _list(options, recipe, preset, read_runs(results, recipe.paper))
        return
    printed = find_table(recipe, preset, options.table)
    columns = choose("--columns", options.columns, printed.columns)
    rows = choose("--methods", options.methods, printed.rows)
    table = with_settings(printed, options.settings or (), select(printed, columns, rows))
    cluster = None
    if options.jobs > 1:  # runs are spread, not their clients
        cluster = next((cell.experiment for cell in table.cells if cell.experiment.engine.name == "ray"), None)
        whole = [replace(cell, experiment=in_one_process(cell.experiment)) for cell in table.cells]
        table = replace(table, cells=tuple(whole))
    device = find_device(options.device)
    cells = select(table, columns, rows)
    jobs = make_jobs(cells, preset=preset, seeds=options.seeds, device=device, out=out)

    def planned() -> BenchPlan:
        return make_plan(jobs, read_runs(results, recipe.paper), options.data, rerun_changed=options.rerun_changed)

    plan = planned()
    for line in [*plan.skipped, *code_lines(plan.skipped_runs)]:
        tell(line)
    failed = 0
    if options.dry_run or not (plan.left or plan.finished):
        _announce(plan, options, device)
    else:
        with claimed(out, results):
            plan = planned()  # another bench may just have ended
            for job in (job for job in plan.left if options.rerun_changed and finished_run(job) is not None):
                shutil.rmtree(job.folder)  # other code has finished it
            for run in plan.finished:
                add_run(results, recipe.paper, run)
            failed = _work_off(plan, options, device=device, paper=recipe.paper, results=results, cluster=cluster)
    if not options.dry_run and plan.done + len(plan.left) > failed:
        runs = read_runs(results, recipe.paper)
        summaries = summarize_table(table, runs, expected, columns=columns, rows=rows, printed=printed)
        if options.format is Format.json:
            print_json(as_json(recipe, preset, table, summaries, settings=options.settings or ()))
        else:
            changed = f", changed: {', '.join(options.settings)}" if options.settings else ""
            say(f"{recipe.paper}, {heading(table)} (preset {preset}{changed})")
            say("\n".join([*([table.note] if table.note else []), "", text_table(summaries), ""]))
            models = f", models below {out}" if out.exists() else ""
            say(f"Curves and seconds of every run are in {results}{models}.")
    if failed:
        tell(f"{counted(failed, 'run')} failed; the same command tries again")
    if failed or (plan.missing and not plan.left):
        raise typer.Exit(1)


def results_file(options: BenchOptions, recipe: Recipe, out: Path) -> Path:
    """The one named, else the documentation's (of unchanged experiments, where there is one), else one in `out`."""
    if options.results is not None:
        return options.results
    documented = Path("docs") / "results"
    if documented.is_dir() and not options.settings:
        return documented / f"{recipe.paper}.json"
    return out / "results.json"


def _announce(plan: BenchPlan, options: BenchOptions, device: str) -> Seconds:
    """Say how many runs are left and how long they take: with --dry-run that is the answer, else a word before them."""
    at_once = max(1, min(options.jobs, len(plan.left)))
    seconds = Seconds(plan.runs, device=device_name(device), at_once=at_once)
    if plan.left:
        line, total = estimate_line(plan.left, seconds, device), seconds.total(plan.left)
    else:
        skipped = f", {len(plan.missing)} skipped" if plan.missing else ""
        line, total = f"nothing to run: {counted(plan.done, 'run')} done{skipped}", 0.0
    if not options.dry_run:
        tell(line)
    elif options.format is Format.json:
        answer = {"runs": len(plan.left), "seconds": None if total is None else round(total, 1), "text": line}
        print_json(answer)
    else:
        say(line)
    return seconds


def _work_off(
    plan: BenchPlan, options: BenchOptions, *, device: str, paper: str, results: Path, cluster: Experiment | None
) -> int:
    """Do the runs that are left, each recorded as it ends; returns how many failed."""
    seconds = _announce(plan, options, device)
    jobs = longest_first(plan.left, seconds)
    with stoppable(lambda: GO_ON), BenchProgress(jobs, seconds) as progress:

        def hear(message: Message) -> None:
            if message.run is not None:
                add_run(results, paper, message.run)
            progress.hear(message)

        do_jobs(jobs, hear, at_once=seconds.at_once, cluster=cluster)
    return progress.failed


def heading(table: Table) -> str:
    """Table 3: title; a figure by the name that --table takes.

    >>> heading(Table("3", "Accuracy", ())), heading(Table("figure-8", "The switch", ()))
    ('table 3: Accuracy', 'figure-8: The switch')
    """
    name = f"table {table.name}" if table.name.isdecimal() else table.name
    return f"{name}: {table.title}"


def _list(options: BenchOptions, recipe: Recipe, preset: str, runs: Sequence[Run]) -> None:
    """The tables of a paper, and how much of each is done."""
    for name in ("columns", "methods"):
        if getattr(options, name) is not None:
            raise FedstillError(f"--{name} needs --table: choose one of {', '.join(recipe.tables[preset])}")
    records = Records(runs)
    tables = [_entry(table, records) for table in recipe.tables[preset].values()]
    if options.format is Format.json:
        head = {"paper": recipe.paper, "title": recipe.title, "presets": dict(recipe.presets), "preset": preset}
        print_json({**head, "tables": tables})
        return
    say(f"{recipe.paper}: {recipe.title}")
    for name, meaning in recipe.presets.items():
        say(f"preset {name}{' (shown)' if name == preset else ''}: {meaning}")
    whole_names = textwrap.TextWrapper(100, subsequent_indent=" " * 11, break_on_hyphens=False, break_long_words=False)
    for table, entry in zip(recipe.tables[preset].values(), tables, strict=True):
        cells = f"{entry['cells_done']} of {counted(entry['runs'], 'cell')} have a run"
        say(f"\n{heading(table)}\n  {cells}, {counted(entry['done'], 'run')} with all seeds")
        for name, words in (("columns", table.columns), ("methods", table.rows)):
            say(whole_names.fill(f"  {name}: {', '.join(words)}"))
    first = next(iter(recipe.tables[preset]))
    say(f"\nNext: fedstill bench {shlex.quote(options.paper)} --table {shlex.quote(first)} --dry-run")


def _entry(table: Table, records: Records) -> dict[str, Any]:
    cells = {cell_id(cell.experiment): records.of(cell.experiment) for cell in table.cells}
    done = {run_id(run) for by_seed in cells.values() for run in by_seed.values()}
    about = {"name": table.name, "title": table.title, "note": table.note}
    names = {"columns": list(table.columns), "rows": list(table.rows)}
    return {**about, **names, "runs": len(cells), "done": len(done), "cells_done": sum(map(bool, cells.values()))}


class BenchProgress:
    """Runs as they happen, on stderr: one bar on a terminal; elsewhere a line a finished run and one a minute.

    The time left follows from the seconds of recorded runs, of those that end here too, at the speed seen so far. As
    long as a job has no estimate, rounds are the measure.
    """

    def __init__(self, jobs: Sequence[Job], seconds: Seconds, *, terminal: bool | None = None) -> None:
        self.jobs, self.seconds = jobs, seconds
        self.finished = self.failed = 0
        self._share = [0.0] * len(jobs)  # done of each run
        self._before: dict[int, float] = {}  # done of it when it began here
        self._errors: set[str] = set()  # each is printed once
        self._began = self._last_printed = time.perf_counter()
        self._weigh()
        self.bar: Any = None
        if sys.stderr.isatty() if terminal is None else terminal:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("count", "left", "label")]
            self.bar = Progress(BarColumn(bar_width=24), *texts, console=Console(stderr=True), transient=True)
            self._task = self.bar.add_task("", total=1.0, count=self.count, left="", label="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def hear(self, message: Message) -> None:
        number, job = message.number, self.jobs[message.number]
        if message.round is not None:
            self._share[number] = message.round / job.experiment.rounds
            self._before.setdefault(number, self._share[number])
            self._show(f"{job.label}, round {message.round}/{job.experiment.rounds}")
        elif message.doing:
            self._show(f"{job.label}, {message.doing}")
        else:
            self._share[number] = 1.0
            self.finished += 1
            self._say(f"{job.label}{self._end_of(message)}")

    def _end_of(self, message: Message) -> str:
        if message.run is None:
            self.failed += 1
            self._before[message.number] = 1.0  # rounds that were not computed are no speed
            reason = "for the same reason" if message.error in self._errors else message.error
            self._errors.add(str(message.error))
            return f" failed: {reason}"
        self.seconds.add(message.run)
        self._weigh()
        curve = curve_of(message.run)
        numbers = f"best {best(curve):.2f} %, last 10 {last_ten(curve):.2f} %"
        return f": {numbers}, {roughly(message.run['seconds'])}"

    def _weigh(self) -> None:
        """The work of each job: seconds, or its rounds where some job has no estimate."""
        seconds = [self.seconds.of(job) for job in self.jobs]
        rounds = [float(job.experiment.rounds) for job in self.jobs]
        self._work = rounds if None in seconds else [max(spent or 0.0, LEAST_SECONDS) for spent in seconds]

    @property
    def done(self) -> float:
        """Share of all work."""
        return sum(share * work for share, work in zip(self._share, self._work, strict=True)) / sum(self._work)

    @property
    def left(self) -> str:
        before = sum(share * self._work[number] for number, share in self._before.items()) / sum(self._work)
        spent, here = time.perf_counter() - self._began, self.done - before
        return f"{roughly(spent * (1 - self.done) / here)} left" if here > 0 and self.done < 1 else ""

    @property
    def count(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished}/{len(self.jobs)} runs{failed}"

    def _show(self, label: str) -> None:
        if self.bar is not None:
            self.bar.update(self._task, completed=self.done, count=self.count, left=self.left, label=label)
        elif time.perf_counter() - self._last_printed > QUIET_SECONDS:
            self._say(label)

    def _say(self, line: str) -> None:
        self._last_printed = time.perf_counter()
        if self.bar is not None:
            self._show("")
            self.bar.console.print(printable(line), markup=False, highlight=False)
        else:
            words = [self.count, line, self.left]
            print(printable("  ".join(word for word in words if word)), file=sys.stderr, flush=True)
