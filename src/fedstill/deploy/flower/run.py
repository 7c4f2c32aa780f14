"""Runs a deployment over Flower: starts the parts that are not up, watches the ServerApp, and resumes it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.files import (
    APP,
    CONNECTION,
    DEPLOYMENT,
    HOME,
    QUIET,
    checked_address,
    need_flower,
    read_addresses,
    server_folder,
    superlink_command,
    write,
)
from fedstill.deploy.flower.keys import check_certificate
from fedstill.deploy.flower.server_app import ALIVE_FILE, OUTCOME_FILE
from fedstill.deploy.folder import Deployment, read_deployment
from fedstill.storage.files import is_held, write_whole

Tell = Callable[[str], None]
LOOK = 0.5  # seconds between two looks at everything
START_PATIENCE = 300.0  # seconds for a part to listen, or for a ServerApp to begin; a busy machine takes over 90
MOST_DEATHS = 5  # of ServerApps in a row that ended without a new round
ALREADY = "already in use"  # Flower's words for a key that is registered


def run_deployment(folder: Path, tell: Tell) -> Path:
    """Play a deployment to its end, and return the folder of its run. Called again, it goes on."""
    need_flower()
    for line in write(read_deployment(folder)):
        tell(line)
    deployment, server = read_deployment(folder), server_folder(folder)
    addresses = read_addresses(folder)
    for path in (server / "server.crt", server / "authority" / "ca.crt"):
        check_certificate(path)
    if _outcome(server).get("finished"):
        tell(f"this run is finished: see {deployment.run_dir}")
        return deployment.run_dir
    superlink = Part("superlink", superlink_command(folder), addresses.superlink, server)
    proxy = Part(
        "proxy", [sys.executable, "-m", "fedstill.deploy.flower.proxy", str(folder.resolve())], addresses.listen, server
    )
    with superlink.kept_up(folder, tell), ExitStack() as opened:
        _register(deployment, folder)  # before the door opens, because Flower ends a node that it does not know
        opened.enter_context(proxy.kept_up(folder, tell))
        tell(
            f"the SuperLink and the proxy are up at {addresses.listen}: waiting for the sites, at most "
            f"{deployment.deadline:g} s, then for the first round; its log is {deployment.run_dir}/log.txt"
        )
        watch = Watch(deployment, tell)
        deaths, run = 0, ""
        while True:
            began = watch.round
            if not is_held(server / ALIVE_FILE):
                (server / OUTCOME_FILE).unlink(missing_ok=True)
                run = _start(folder, tell)
            while is_held(server / ALIVE_FILE):
                watch.look()
                superlink.look(folder, tell)
                proxy.look(folder, tell)
                time.sleep(LOOK)
            watch.look()
            outcome = _outcome(server)
            if outcome.get("finished"):
                return deployment.run_dir
            if outcome and not outcome["again"]:
                raise FedstillError(outcome["reason"])
            deaths = 1 if watch.round > began else deaths + 1
            if deaths > MOST_DEATHS:
                raise FedstillError(
                    f"the ServerApp died {deaths} times in round {watch.round + 1}: see {server}/superlink.log"
                )
            tell(f"the ServerApp ended in round {watch.round + 1} ({outcome.get('reason', 'killed')}): going on")
            superlink.look(folder, tell)
            if run:
                _flwr(folder, "stop", run, CONNECTION)


@dataclass
class Part:
    """A process of the server: started if nobody listens at its address, and again when it dies."""

    name: str
    command: list[str]
    address: str
    logs: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @contextmanager
    def kept_up(self, folder: Path, tell: Tell) -> Iterator[None]:
        """Have the part up while the block runs; end it afterwards if it was started here."""
        self.look(folder, tell)
        try:
            yield
        finally:
            if self.process is not None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
                self.process.kill()
                self.process.wait()

    def look(self, folder: Path, tell: Tell) -> None:
        if _listens(self.address):
            return
        if self.process is not None and self.process.poll() is not None:
            tell(f"the {self.name} died: starting it again")
        if self.process is None or self.process.poll() is not None:
            with (self.logs / f"{self.name}.log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment(folder),
                    start_new_session=True,
                )  # fmt: skip
        ends = time.monotonic() + START_PATIENCE
        while not _listens(self.address):
            if self.process.poll() is not None or time.monotonic() > ends:
                raise FedstillError(f"the {self.name} does not start: see {self.logs / self.name}.log")
            time.sleep(LOOK)


class Watch:
    """Tells each round of a run folder once it is there, and each warning of its log: who was left out, and why."""

    def __init__(self, deployment: Deployment, tell: Tell) -> None:
        self.path, self.rounds, self.tell = deployment.run_dir / "metrics.jsonl", deployment.experiment.rounds, tell
        self.round = self._rows()[-1]["round"] if self._rows() else 0
        self.names = deployment.names
        self.logged = len(self._warnings())

    def look(self) -> None:
        warnings, rows = self._warnings(), self._rows()
        for line in warnings[self.logged :]:
            self.tell(line)
        self.logged = len(warnings)
        for row in rows:
            if row["round"] > self.round:
                accuracy = f", accuracy {row['accuracy']:.4f}" if row.get("accuracy") is not None else ""
                accuracy += f" on the rows of {row['measured_by']} sites" if "measured_by" in row else ""
                took = f"{row['accepted']} of {row['cohort']} sites{accuracy}, {row['seconds']:.1f} s"
                self.tell(f"round {row['round']} of {self.rounds}: {took}")
        self.round = rows[-1]["round"] if rows else self.round

    def _rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in _whole_lines(self.path)]

    def _warnings(self) -> list[str]:
        lines = _whole_lines(self.path.with_name("log.txt"))
        texts = [line.partition(" WARNING ")[2] for line in lines if " WARNING " in line]
        return [re.sub(r"(?<=: client )\d+", lambda found: self.names[int(found[0])], text) for text in texts]


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that grows, without one that is not written to its end."""
    try:
        return path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return []


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: its home, and the folder of the deployment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    home = str((server_folder(folder) / HOME).resolve())
    return {**os.environ, "PATH": path, "FLWR_HOME": home, DEPLOYMENT: str(folder.resolve()), **QUIET}


def _register(deployment: Deployment, folder: Path) -> None:
    """Register the nodes of the roster; the SuperLink's database remembers them, and the folder `nodes` says whose."""
    for member in deployment.members:
        key, line = server_folder(folder) / "nodes" / f"{member.name}.pub", member.public_key + "\n"
        if key.exists() and key.read_text(encoding="utf-8") == line:
            continue
        waiting = key.with_suffix(".new")
        write_whole(waiting, line)
        done = _flwr(folder, "supernode", "register", str(waiting), CONNECTION, "--name", member.name)
        if done.returncode and ALREADY not in done.stdout + done.stderr:
            raise FedstillError(f"the node of '{member.name}' cannot be registered: {_last_line(done)}")
        waiting.replace(key)


def _start(folder: Path, tell: Tell) -> str:
    """Start a ServerApp, and return Flower's number of its run once it has begun."""
    server = server_folder(folder)
    done = _flwr(folder, "run", str(server / APP), CONNECTION, "--format", "json")
    answers = [line for line in done.stdout.splitlines() if '"run-id"' in line]
    if done.returncode or not answers:
        raise FedstillError(f"the run cannot be started: {_last_line(done)}")
    run = answers[0].split('"')[3]
    ends = time.monotonic() + START_PATIENCE
    while not is_held(server / ALIVE_FILE) and not (server / OUTCOME_FILE).exists():
        if time.monotonic() > ends:
            raise FedstillError(
                f"the ServerApp did not begin within {START_PATIENCE:.0f} s: see {server}/superlink.log"
            )
        time.sleep(LOOK)
    return run


def _flwr(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), *words], env=environment(folder), capture_output=True, text=True
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr + done.stdout).split())[-300:]


def _outcome(server: Path) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = json.loads((server / OUTCOME_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return outcome


def _listens(address: str) -> bool:
    host, port = checked_address(address, "address")
    with suppress(OSError), socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, port), timeout=2):
        return True
    return False
