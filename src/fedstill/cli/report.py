"""The command that writes a page about runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstill.about.explain import explain
from fedstill.cli.app import print_json, say, tell
from fedstill.core.errors import FedstillError
from fedstill.report import counted, human_bytes
from fedstill.report.page import write_report
from fedstill.report.runs import Runs, read_runs, table_of


def report_command(folders: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    runs = read_runs(folders)
    path = write_report(folders, out, runs=runs, reveals=reveals_of(runs))
    for gap in runs.gaps[:10]:
        tell(gap)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size, "runs": len(runs.all), "gaps": list(runs.gaps)})
        return
    size = human_bytes(path.stat().st_size)
    say(f"{path} ({size}): {counted(len(runs.all), 'run')} of {counted(len(runs.by_method), 'method')}")


def reveals_of(runs: Runs) -> dict[str, list[str]]:
    """Return everything that leaves a client, of the methods that fedstill has.

    A method FILE.py:function is left out, because a report runs no code that a run's folder names.
    """
    known: dict[str, list[str]] = {}
    for name, each in runs.by_method.items():
        text = str(table_of(each[0].config.get("method")).get("name"))
        try:
            if ":" not in text:
                facts = explain(text)
                known[name] = [*facts["leaves_a_client"], *facts["leaves_a_client_once"]]
        except FedstillError:
            continue  # an older method, or a damaged name
    return known
