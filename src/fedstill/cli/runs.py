"""The commands that compute: run, compare, resume."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from fedstill.callbacks import Callback
from fedstill.cli.progress import Progress, duration
from fedstill.cli.shared import print_json, tell
from fedstill.comparison import RESULTS_FILE, Comparison, choose_methods, compare
from fedstill.config import Experiment
from fedstill.core.errors import FedstillError
from fedstill.experiment import CONFIG_FILE, describe_partition, new_run_dir, read_description, resume_run, run
from fedstill.history import Result
from fedstill.report.table import human_bytes, plain_table, rich_table
from fedstill.settings import split_methods


def choose_folder(experiment: Experiment, out: Path | None) -> Path:
    if out is None:
        return new_run_dir(experiment)
    if out.exists() and not out.is_dir():
        raise FedstillError(f"--out: '{out}' is a file: give a folder")
    if (out / CONFIG_FILE).exists():
        raise FedstillError(f"--out: '{out}' already holds a run: choose another folder, or `fedstill resume {out}`")
    return out


def run_command(experiment: Experiment, *, file: Path | None, out: Path | None, as_json: bool) -> None:
    folder = choose_folder(experiment, out)
    with _resumable(folder), Progress(runs=1, rounds=experiment.rounds) as progress:
        progress.label = experiment.algorithm.name
        result = run(experiment, run_dir=folder, callbacks=[progress])
    print_json(result.summary()) if as_json else typer.echo(run_text(experiment, result, file))


def compare_command(
    experiment: Experiment, *, methods: str | None, seeds: int | None, out: Path | None, as_json: bool
) -> None:
    entries = choose_methods(experiment, _entries(methods))
    count = experiment.compare.seeds if seeds is None else seeds
    experiment = experiment.replace(compare={"methods": list(entries), "seeds": count})
    folder = choose_folder(experiment, out)
    comparison = _compare(experiment, folder, resume=False)
    _print_comparison(comparison, folder, as_json)


def _entries(methods: str | None) -> list[str]:
    entries = split_methods(methods or "")
    if methods is not None and not entries:
        raise FedstillError("--methods is empty: name some, e.g. --methods fedavg,fedprox,scaffold")
    return entries


def resume_command(run_dir: Path, *, as_json: bool) -> None:
    experiment = read_description(run_dir)
    if (run_dir / RESULTS_FILE).exists():
        _print_comparison(_compare(experiment, run_dir, resume=True), run_dir, as_json)
        return
    with _resumable(run_dir), Progress(runs=1, rounds=experiment.rounds) as progress:
        progress.label = experiment.algorithm.name
        result = resume_run(run_dir, callbacks=[progress])
    print_json(result.summary()) if as_json else typer.echo(run_text(experiment, result, None))


def _compare(experiment: Experiment, folder: Path, *, resume: bool) -> Comparison:
    methods, seeds = experiment.compare.methods, experiment.compare.seeds
    with _resumable(folder), Progress(runs=len(methods) * seeds, rounds=experiment.rounds) as progress:

        def watch(method: str, seed: int) -> Sequence[Callback]:
            progress.label = f"{method} seed {seed}"
            return [progress]

        return compare(experiment, run_dir=folder, callbacks=watch, resume=resume)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Ctrl-C is no accident: say how to go on, exit as shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / CONFIG_FILE).exists():
            tell(f"stopped; go on with: fedstill resume {folder}")
        raise typer.Exit(130) from None


def run_text(experiment: Experiment, result: Result, file: Path | None) -> str:
    """What a person wants to know after a run, and what to try next."""
    last, best = result.history.last or {}, result.history.best or {}
    lines = [
        f"{result.method} on {experiment.data.source}, {describe_partition(experiment)}: "
        f"{len(result.history.rows)} rounds in {duration(result.seconds)}",
        f"  last accuracy  {100 * last['accuracy']:.2f} %",
        f"  best accuracy  {100 * best['accuracy']:.2f} % (round {best['round']})",
        f"  sent           {human_bytes(result.history.total('bytes_up'))} up, "
        f"{human_bytes(result.history.total('bytes_down'))} down",
    ]
    if experiment.target is not None:
        reached = result.rounds_to_target
        lines.append(f"  target         {'not reached' if reached is None else f'reached in round {reached}'}")
    if result.audit:
        lines.append(f"  turned away    {len(result.audit)} uploads, see {result.run_dir}/audit.jsonl")
    lines.append(f"Everything is in {result.run_dir} (models in best/ and last/, numbers in metrics.jsonl, pictures).")
    other = "scaffold" if result.method == "fedavg" else "fedavg"
    named = f" {file}" if file else ""
    lines.append(f"Next: fedstill compare{named} --methods {result.method},{other} --seeds 3")
    return "\n".join(lines)


def _print_comparison(comparison: Comparison, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(comparison.as_json())
        return
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(comparison.summaries))
    else:
        typer.echo(plain_table(comparison.summaries))
    best = comparison.summaries[0].method
    pictures = [name for name in ("curves.png", "partition.png") if (folder / name).exists()]
    typer.echo("Mean ± standard deviation over the seeds; seconds and bytes are those of one run.")
    typer.echo(f"Everything is in {folder}: {', '.join([RESULTS_FILE, *pictures])} and one folder a method.")
    typer.echo(f"Next: fedstill explain {best.partition('(')[0]}, or another skew: --set partition.alpha=0.05")
