"""The commands of runs between organisations: deploy init, deploy rehearse, deploy run, site."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from fedstill.cli.app import DeployInitOptions, stoppable, tell
from fedstill.cli.progress import Progress
from fedstill.core.errors import FedstillError
from fedstill.deploy.folder import read_deployment, read_site
from fedstill.deploy.rehearsal import rehearse
from fedstill.deploy.site import consent, open_site, serve_site
from fedstill.deploy.starter import Asked, write_deployment
from fedstill.experiment.overrides import read_experiment


def init_command(options: DeployInitOptions) -> None:
    names = tuple(name.strip() for name in options.sites.split(",") if name.strip())
    if not names:
        raise FedstillError("--sites is empty: name some, e.g. --sites north,south,west")
    asked = Asked(names, options.out, options.address, options.seats, options.contract)
    for line in write_deployment(read_experiment(options.file, options.settings or []), asked):
        typer.echo(line)


def site_command(folder: Path, *, yes: bool, check: bool) -> None:
    opened = open_site(read_site(folder))
    for note in opened.rows.notes:
        tell(note)
    typer.echo(opened.text)
    for doubt in opened.rows.doubts:  # last, where a person looks before the answer
        tell(f"look: {doubt}")
    if check:
        odd = "what looks odd stands above" if opened.rows.doubts else "nothing looks odd"
        start = f"fedstill site {shlex.quote(str(folder))}"
        tell(f"{len(opened.rows.data.y)} rows can be read, and {odd}; start with: {start}")
        return
    tell(f"consent: {consent(opened, yes=yes, ask=_ask if sys.stdin.isatty() else None)} (consent.json)")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    serve_site(opened, tell=tell, stop=stop)
    tell("stopped; start it again with the same command")


def run_command(folder: Path) -> None:
    from fedstill.deploy.flower.run import run_deployment

    with stoppable(
        lambda: f"the sites keep what they have; go on with: fedstill deploy run {shlex.quote(str(folder))}"
    ):
        done = run_deployment(folder, tell)
    typer.echo(f"results: {done}; `fedstill report {shlex.quote(str(done))}` makes a page of them")


def _ask() -> bool:
    return str(typer.prompt("Type yes if this may leave", default="no")).strip().lower() == "yes"


def rehearse_command(folder: Path, data: list[str], *, rounds: int | None, out: Path | None, quiet: bool) -> None:
    places = {}
    for entry in data:
        name, equals, place = entry.partition("=")
        if not equals or not place:
            raise FedstillError(f"--data {entry}: write the site's name and its rows, e.g. --data north=north.csv")
        places[name] = place
    deployment = read_deployment(folder)
    total = deployment.experiment.rounds if rounds is None else min(rounds, deployment.experiment.rounds)
    if out is not None and out.exists():
        raise FedstillError(f"--out: '{out}' is there already: give a new folder")
    with TemporaryDirectory(prefix="fedstill-") as scratch, Progress("", runs=1, rounds=total) as progress:
        progress.label = deployment.experiment.method.name
        copy = Path(scratch) / "rehearsal" if out is None else out
        watchers = () if quiet else (progress,)
        verdict = rehearse(folder, copy, places, rounds=rounds, callbacks=watchers, tell=tell)
    typer.echo(verdict.text())
    if not verdict.as_meant:
        raise typer.Exit(1)
