"""The command that finds a method for the user's data."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedstill.cli.app import ChooseOptions, Format, print_json, say, tell
from fedstill.cli.report import report_command
from fedstill.cli.run import choose_folder, describe, on_file, print_table, resumable, settings_of
from fedstill.core.errors import FedstillError
from fedstill.experiment.choose import CHOSEN_FILE, LEVELS, Budget, Choice, choose, choose_again
from fedstill.experiment.overrides import read_experiment
from fedstill.methods.lookup import label, split_methods
from fedstill.report import counted
from fedstill.report.statistics import difference, listed
from fedstill.report.table import judge_methods, reference_lines, table_legend


def choose_command(options: ChooseOptions) -> None:
    experiment = read_experiment(options.file, settings_of(options))
    Budget.parse(options.budget)  # before the data are read
    folder = choose_folder(experiment, options.out)
    without = [name.strip() for name in (options.without or "").split(",") if name.strip()]
    methods = split_methods(options.methods or "")

    def play(say: Callable[[str], None]) -> Choice:
        say(f"choose with a budget of {options.budget}: {describe(experiment)}")
        return choose(experiment, options.budget, run_dir=folder, methods=methods, without=without, tell=say)

    _choose(play, folder, quiet=options.quiet, as_json=options.format is Format.json)


def choose_again_command(run_dir: Path, rounds: int | None, *, quiet: bool, as_json: bool) -> None:
    if rounds is not None:
        raise FedstillError(
            f"--rounds does not go with a tournament: run its winner, `fedstill run {run_dir / CHOSEN_FILE} --rounds N`"
        )
    _choose(lambda say: choose_again(run_dir, tell=say), run_dir, quiet=quiet, as_json=as_json)


def _choose(play: Callable[[Callable[[str], None]], Choice], folder: Path, *, quiet: bool, as_json: bool) -> None:
    with resumable(folder):
        choice = play((lambda line: None) if quiet else tell)
    if as_json:
        print_json({**choice.record, "final": choice.comparison.as_json()})
        return
    print_table(choice.comparison.summaries)
    say("\n".join([*table_legend(choice.comparison.summaries), *choice_lines(choice)]))
    if importlib.util.find_spec("vl_convert") is not None:  # the extra [report]
        report_command([folder], None, as_json=False)


def choice_lines(choice: Choice) -> list[str]:
    """Say which method was chosen, how it stands to FedAvg and to parties alone, and what was tried."""
    record, summaries = choice.record, choice.comparison.summaries
    by_name = {row.method: row for row in summaries if not row.is_reference}
    winner, base = label(choice.method), label(record["base"])
    lines = [f"Chosen by the rows that clients hold back: {winner}."]
    about = by_name.get(winner)
    if about is not None and base in by_name and base != winner:
        gap = difference(winner, about.last, base, by_name[base].last)
        words = f"On test rows and {counted(gap.seeds, 'fresh seed')} it is {100 * gap.mean:+.1f} points from {base}"
        if gap.low is not None and gap.high is not None:
            words += f" (95 % interval {100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
        lines.append(f"{words}.")
    if about is not None and choice.comparison.references:
        lines += [
            line[0].upper() + line[1:] + "."
            for line in reference_lines(winner, about.last, choice.comparison.references)
        ]
    judgement = judge_methods(summaries)
    if judgement is not None and winner in judgement.groups:
        equal = [
            name
            for name, letters in judgement.groups.items()
            if name not in (winner, base) and set(letters) & set(judgement.groups[winner])
        ]
        lines += [f"No difference is shown between it and {listed(equal)}."] if equal else []
    lines += tried_lines(record)
    again = on_file("run", choice.run_dir / CHOSEN_FILE)
    return [*lines, f"Everything is in {choice.run_dir}. Run it in full: {again}"]


def tried_lines(record: Any) -> list[str]:
    """Say how many candidates each level played, and how many were refused, failed or not afforded."""
    levels = Counter(
        {
            level + 1: len({line["method"] for line in record["played"] if line["level"] == level})
            for level in range(len(LEVELS))
        }
    )
    played = ", ".join(f"level {level}: {counted(count, 'candidate')}" for level, count in levels.items())
    budget = Budget(record["amount"], record["unit"])
    lines = [
        f"Tried {played}; {budget.shown(record['spent'])} of {budget.shown(record['amount'])} spent before the final."
    ]
    skipped = sum(len(step["not_afforded"]) for step in record["decisions"])
    failed = {line["method"] for line in record["played"] if line["failure"]}
    notes: Sequence[tuple[int, str]] = (
        (len(record["refused"]), "could not run here"),
        (len(failed), "failed"),
        (skipped, "did not fit into the budget"),
    )
    words = [f"{count} {why}" for count, why in notes if count]
    return [*lines, *([f"Of others, {', '.join(words)}; choose.json has the reasons."] if words else [])]
