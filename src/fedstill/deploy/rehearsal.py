"""A rehearsal: server and sites as processes of this machine, and the result beside that of a simulation."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.trainer import threads
from fedstill.core.tree import flatten
from fedstill.core.types import Dataset, Federation, Weights
from fedstill.data import hold_client_tests
from fedstill.deploy.folder import EXPERIMENT_FILE, SITE_FILE, Deployment, SiteFolder, read_deployment, read_site
from fedstill.deploy.rows import read_rows
from fedstill.deploy.server import built_for, federate_over, server_experiment
from fedstill.deploy.socket import Sockets
from fedstill.experiment.build import agreed_columns, agreed_data
from fedstill.experiment.config import Experiment
from fedstill.loop.callbacks import Callback
from fedstill.loop.federate import federate
from fedstill.loop.history import Result
from fedstill.storage import toml as toml_io
from fedstill.storage.files import write_whole

INVENTED = 120  # rows that are made up for a site whose rows are not here
PATIENCE = 120.0  # seconds until a site must be ready
LOG_FILE = "site.log"


class Verdict(NamedTuple):
    """What a rehearsal found."""

    result: Result
    different: tuple[str, ...]  # tensors of the model that are not equal to the simulation's, bit for bit
    tensors: int
    largest: float  # difference of two numbers
    invented: tuple[str, ...]  # sites whose rows were made up
    seconds: float
    noisy: bool = False  # sites put noise on what they send, each from a secret of its own

    @property
    def as_meant(self) -> bool:
        return self.noisy or not self.different

    def text(self) -> str:
        rounds = len(self.result.history.rows)
        head = f"{rounds} round{'s' if rounds != 1 else ''} in {self.seconds:.1f} s"
        if self.invented:
            head += f"; rows were made up for {', '.join(self.invented)}, so the accuracy says nothing"
        if self.noisy and self.different:
            return (
                f"{head}\nPLAYED: each site draws its noise from a secret of its own, so the model is not the "
                "simulation's, as it must be"
            )
        if not self.different:
            return f"{head}\nEQUAL: all {self.tensors} tensors of the model are the simulation's, bit for bit"
        return (
            f"{head}\nDIFFERENT: {len(self.different)} of {self.tensors} tensors are not the simulation's "
            f"({self.different[0]}; numbers differ by up to {self.largest:.3g})"
        )


def rehearse(
    folder: Path,
    copy: Path,
    data: Mapping[str, str],
    *,
    rounds: int | None = None,
    callbacks: Sequence[Callback] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Play the run of a deployment's folder with a process for each site, and compare it with a simulation.

    copy: a new folder, in which all of it happens; the deployment's own folder is left as it is.
    data: rows by the names of sites. A site without any takes those of its site.toml, or some are made up.
    """
    began = time.perf_counter()
    deployment = read_deployment(folder)
    if unknown := sorted(set(data) - {member.name for member in deployment.members}):
        raise FedstillError(
            f"--data: there is no site '{unknown[0]}': sites are {', '.join(m.name for m in deployment.members)}"
        )
    _copy(deployment, copy, rounds)
    deployment = read_deployment(copy)
    sites, invented = _sites(deployment, folder, data)
    rows = {site.client: _rows(site) for site in sites}
    tell("the simulation plays first")
    expected = simulated(deployment, rows)
    tell(f"{len(sites)} sites start, a process each")
    with _processes(sites):
        transport = Sockets({site.client: site.socket for site in sites}, deadline=max(deployment.deadline, PATIENCE))
        result = federate_over(deployment, transport, callbacks=callbacks)
    different, tensors, largest = compared(result.weights, expected.weights)
    return Verdict(result, different, tensors, largest, invented, time.perf_counter() - began, _draws_noise(deployment))


def _draws_noise(deployment: Deployment) -> bool:
    """Return whether sites protect something by noise."""
    built = built_for(deployment, server_experiment(deployment))
    releases = [release for phase in phases_of(built.method) for release in phase.method.releases]
    noisy = any(release.multiplier is not None for release in releases)
    return noisy or built.privacy.label_counts == "dp"


def _rows(site: SiteFolder) -> Dataset:
    try:
        return read_rows(site.experiment, site.data).data
    except FedstillError as error:
        raise FedstillError(*(f"site {site.name}: {line}" for line in error.lines)) from None


def _copy(deployment: Deployment, copy: Path, rounds: int | None) -> None:
    """Copy what a deployment's folder says, without memories, keys and runs."""
    names = {member.name for member in deployment.members}
    copy.mkdir(parents=True)
    for path in deployment.folder.iterdir():
        if path.is_file():
            shutil.copy(path, copy / path.name)
    server = deployment.folder / "server"
    (copy / "server").mkdir()
    table = toml_io.read_toml(server / "server.toml") | {"test": _absolute(deployment.test), "spare": 0}
    table["unlabeled"] = _absolute(deployment.unlabeled)
    write_whole(copy / "server" / "server.toml", toml_io.dumps(table))
    for name in names:
        place, site_copy = deployment.site_folder(name), copy / "sites" / name
        if not (place / SITE_FILE).is_file():
            raise FedstillError(f"'{place}' is not here: a rehearsal needs each site's folder as init wrote it")
        site_copy.mkdir(parents=True)
        for path in place.iterdir():
            if path.is_file() and path.suffix in (".toml", ".json") and path.name != "consent.json":
                shutil.copy(path, site_copy / path.name)
    if rounds is not None:
        for place in (copy, *((copy / "sites" / name) for name in names)):
            table = toml_io.read_toml(place / EXPERIMENT_FILE)
            table["rounds"] = min(rounds, int(table.get("rounds", rounds)))
            write_whole(place / EXPERIMENT_FILE, toml_io.dumps(table))


def _absolute(place: str) -> str:
    return str(Path(place).resolve()) if place and Path(place).exists() else place


def _sites(deployment: Deployment, original: Path, data: Mapping[str, str]) -> tuple[list[SiteFolder], tuple[str, ...]]:
    """Return the copied folders of the sites with rows named in them, and the sites whose rows were made up."""
    sites, invented = [], []
    for member in deployment.members:
        folder = deployment.site_folder(member.name)
        place = data.get(member.name) or read_site(original / "sites" / member.name).data
        if not place:
            place, name = str(_invent(deployment, member.client, folder)), member.name
            invented.append(name)
        table = toml_io.read_toml(folder / SITE_FILE)
        table |= {"data": _absolute(place), "memory": "memory", "socket": "socket/desk.sock", "socket_group": ""}
        write_whole(folder / SITE_FILE, toml_io.dumps(table))
        sites.append(read_site(folder))
    return sites, tuple(invented)


def _invent(deployment: Deployment, client: int, folder: Path) -> Path:
    """Write a file of made-up rows in the agreed form, and return its path."""
    experiment = deployment.experiment
    agreed, columns = agreed_data(experiment), agreed_columns(experiment)
    draw = numpy_generator(seed_for(experiment.seed, "rehearsal", client))
    labels = np.array(agreed.classes)[draw.integers(0, len(agreed.classes), INVENTED)]
    if agreed.text:
        raise FedstillError("texts are not made up: give some with --data NAME=PATH for each site")
    if not columns:
        path = folder / "invented.npz"
        x = draw.integers(0, 256, (INVENTED, *agreed.x.shape[1:]), dtype=np.uint8)
        np.savez(path, x=x, y=labels)
        return path
    width = agreed.x.shape[1]
    mean, std = (values * width if len(values) == 1 else values for values in (agreed.mean, agreed.std))
    table: dict[str, list[str]] = {}
    first = 0
    for column in columns:
        if column.words:
            table[column.name] = [column.words[place] for place in draw.integers(0, len(column.words), INVENTED)]
        else:
            numbers = draw.normal(mean[first], std[first], INVENTED)
            table[column.name] = [f"{number:.6g}" for number in numbers]
        first += column.width
    table[agreed.label] = labels.tolist()
    path = folder / "invented.csv"
    lines = [",".join(map(_cell, table)), *(",".join(map(_cell, row)) for row in zip(*table.values(), strict=True))]
    write_whole(path, "\n".join(lines) + "\n")
    return path


def _cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\n;') else text


def simulated(deployment: Deployment, rows: Mapping[int, Dataset]) -> Result:
    """Run the same experiment in this process: all rows in one federation, each site a client."""
    experiment = server_experiment(deployment)
    built = built_for(deployment, experiment)
    federation = _together(built.federation, rows, experiment)
    count = experiment.engine.threads
    alone = replace(built, federation=federation, holders=None)
    if count is None:
        return federate(alone)
    with threads(count):
        return federate(alone)


def _together(server: Federation, rows: Mapping[int, Dataset], experiment: Experiment) -> Federation:
    """Return the federation of the server's part and all sites' rows."""
    clients = sorted(rows)
    sizes = torch.zeros(server.population, dtype=torch.int64)
    for client in clients:
        sizes[client] = len(rows[client].y)
    x, y = (torch.cat([getattr(rows[client], name) for client in clients]) for name in ("x", "y"))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    whole = replace(server, train=replace(server.train, x=x, y=y), indices=torch.arange(len(y)), offsets=offsets)
    share = experiment.data.client_test_share
    return hold_client_tests(whole, share, seed=experiment.seed) if share else whole


@contextmanager
def _processes(sites: Sequence[SiteFolder]) -> Iterator[None]:
    """Start `fedstill site` for each site, wait until all are ready, and end them when the block ends."""
    started: list[tuple[SiteFolder, subprocess.Popen[bytes]]] = []
    try:
        for site in sites:
            with (site.folder / LOG_FILE).open("wb") as log:
                command = [sys.executable, "-m", "fedstill", "site", str(site.folder), "--yes"]
                started.append((site, subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)))
        end = time.monotonic() + PATIENCE
        for site, process in started:
            while not site.socket.is_socket():
                if process.poll() is not None or time.monotonic() > end:
                    log_text = (site.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip()
                    last = log_text.splitlines()[-1] if log_text else "it said nothing"
                    raise FedstillError(f"site {site.name} did not start: {last}")
                time.sleep(0.05)
        yield
    finally:
        for _, process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _, process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compared(ours: Weights, expected: Weights) -> tuple[tuple[str, ...], int, float]:
    """Return the names of tensors that differ in a bit, the number of tensors, and the largest difference."""
    first, second = flatten(ours._asdict()), flatten(expected._asdict())
    different = [name for name in first if not torch.equal(first[name].cpu(), second[name].cpu())]
    largest = max(((first[name].cpu() - second[name].cpu()).abs().max().item() for name in different), default=0.0)
    return tuple(different), len(first), largest
