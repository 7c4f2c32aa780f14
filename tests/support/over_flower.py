"""A whole deployment over Flower on this machine: server, three SuperNodes and three sites, each a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedstill.core.types import Weights
from fedstill.data.tokens import train_tokenizer
from fedstill.deploy.flower.files import checked_address, write
from fedstill.deploy.folder import read_deployment, read_site
from fedstill.deploy.rehearsal import compared, simulated
from fedstill.deploy.rows import read_rows
from fedstill.loop.checkpoint import load_weights

NAMES = ("north", "south", "west")
CLASSES = ("a", "b", "c")
FEATURES = 6
EXPERIMENT = """\
name = "three"
rounds = {rounds}
cohort = 3
seed = 1
method = "{method}"
checkpoint_every = 1
evaluate = "global_test"
[data]
source = "agreed"
classes = ["a", "b", "c"]
{data}
[partition]
scheme = "iid"
clients = 3
[model]
{model}
[local]
epochs = 1
batch_size = 16
lr = 0.1
{local}
[engine]
name = "looped"
device = "cpu"
threads = 1
"""
TABLES = """\
label = "kind"
mean = [0.0]
std = [1.0]
[data.columns]
{columns}"""
PICTURES = """\
shape = [1, 8, 8]
mean = [0.5]
std = [0.25]"""
TEXTS = """\
label = "kind"
inputs = ["text"]
tokens = 12
tokenizer = "tokenizer.json"
"""
MLP = 'name = "mlp"\nhidden = [8]'
MIXED = 'name = "mixed"\nprototypes = ["mlp(hidden=[8])", "mlp(hidden=[6, 5])"]'
BERT = 'name = "bert"\nlayers = 1\nhidden = 8\nheads = 2\ninner = 8'


def data_of(kind: str) -> str:
    """Return the agreed form of `csv`, `npz` (pictures) or `texts`, as the section [data] says it."""
    if kind == "csv":
        return TABLES.format(columns="\n".join(f'f{place} = "numbers"' for place in range(FEATURES)))
    return PICTURES if kind == "npz" else TEXTS


def write_rows(path: Path, count: int, seed: int, *, labeled: bool = True) -> None:
    """Write a table of numbers (.csv), pictures (.npz) or texts (.texts.csv), each class with a mark of its own."""
    draw = np.random.default_rng(seed)
    y = draw.choice(3, size=count, p=np.roll([0.6, 0.3, 0.1], seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        x = draw.integers(0, 200, size=(count, 1, 8, 8)) + 20 * y[:, None, None, None]
        labels = {"y": np.array(CLASSES)[y]} if labeled else {}
        np.savez(path, x=x.astype(np.uint8), **labels)
        return
    if path.name.endswith(".texts.csv"):
        head, cells = ["text"], [[text_of(draw, label)] for label in y]
    else:
        x = draw.normal(size=(count, FEATURES)) + 2 * np.eye(3, FEATURES)[y]
        head, cells = [f"f{place}" for place in range(FEATURES)], [[f"{number:.5f}" for number in row] for row in x]
    if labeled:
        head, cells = [*head, "kind"], [[*row, CLASSES[label]] for row, label in zip(cells, y, strict=True)]
    path.write_text("\n".join(",".join(line) for line in [head, *cells]) + "\n")


WORDS = ("team match goal", "bank price loan", "star moon comet")


def text_of(draw: np.random.Generator, label: int) -> str:
    others = " ".join(WORDS).split()
    return " ".join(draw.choice(WORDS[label].split() if draw.random() < 0.7 else others) for _ in range(8))


def write_deployment(
    folder: Path,
    method: str,
    *,
    rounds: int = 3,
    deadline: float = 60.0,
    local: str = "",
    model: str = MLP,
    data: str = "csv",
) -> None:
    """Write a deployment with rows for three sites and the server, and Flower's files, at free ports.

    Written again into a folder, it is another run of the same network: ports, keys and certificates stay.
    data: `csv`, `npz` or `texts`.
    """
    suffix = {"texts": "texts.csv"}.get(data, data)
    outside, inside = free_ports(2)
    if (folder / "roster.json").exists():
        _, outside = checked_address(read_deployment(folder).address, "address")
    text = EXPERIMENT.format(method=method, rounds=rounds, data=data_of(data), local=local, model=model)
    write_rows(folder / "server" / f"test.{suffix}", 60, 9)
    write_rows(folder / "server" / f"unlabeled.{suffix}", 40, 8, labeled=False)
    (folder / "experiment.toml").write_text(text)
    places = f'test = "test.{suffix}"\nunlabeled = "unlabeled.{suffix}"\n'
    (folder / "server" / "server.toml").write_text(f'address = "127.0.0.1:{outside}"\ndeadline = {deadline}\n{places}')
    roster = {
        "run": "three-1",
        "seats": 3,
        "sites": [{"client": place, "name": name} for place, name in enumerate(NAMES)],
    }
    (folder / "roster.json").write_text(json.dumps(roster))
    for place, name in enumerate(NAMES):
        site = folder / "sites" / name
        write_rows(site / f"rows.{suffix}", 50 + 10 * place, place)
        (site / "experiment.toml").write_text(text)
        who = f'run = "three-1"\nname = "{name}"\nclient = {place}\nseats = 3\nserver = "127.0.0.1:{outside}"\n'
        (site / "site.toml").write_text(who + f'data = "rows.{suffix}"\n')
    if data == "texts":
        tokenizer = train_tokenizer(sorted(" ".join(WORDS).split()) * 2, 200)
        for place in (folder, *(folder / "sites" / name for name in NAMES)):
            (place / "tokenizer.json").write_text(tokenizer)
    write(read_deployment(folder), superlink=f"127.0.0.1:{inside}")


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@dataclass
class Network:
    """The processes of a deployment; each is started by its own script or command."""

    folder: Path
    parts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def site(self, name: str) -> None:
        self.start(
            f"site {name}", [sys.executable, "-m", "fedstill", "site", str(self.folder / "sites" / name), "--yes"]
        )

    def supernode(self, name: str, *, once: bool = False) -> None:
        self.ports.setdefault(name, free_ports(1)[0])
        script = self.folder / "sites" / name / "flower" / "supernode.sh"
        more = {"PORT": str(self.ports[name]), **({"ONCE": "1"} if once else {})}
        self.start(f"supernode {name}", ["sh", str(script)], more)

    def all_sites(self) -> None:
        for name in NAMES:
            self.site(name)
            self.supernode(name)

    def run(self) -> None:
        self.start("run", [sys.executable, "-m", "fedstill", "deploy", "run", str(self.folder)])

    def start(self, part: str, command: list[str], more: dict[str, str] | None = None) -> None:
        if part in self.parts:  # it was killed
            self.parts[part].wait(15)
        with self.log(part).open("ab") as log:
            self.parts[part] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHON_BIN": str(Path(sys.executable).parent), **(more or {})},
            )  # fmt: skip

    def log(self, part: str) -> Path:
        return self.folder / f"{part.replace(' ', '-')}.log"

    def said(self, part: str) -> str:
        return self.log(part).read_text(errors="replace")

    def wait_for(self, part: str, words: str, seconds: float = 600) -> None:
        """Wait until the log of a part holds some words."""
        ends = time.monotonic() + seconds
        while words not in self.said(part):
            assert time.monotonic() < ends, f"{part} did not say '{words}':\n{self.said(part)[-3000:]}"
            assert part != "run" or self.parts[part].poll() is None or words in self.said(part), self.said(part)[-3000:]
            time.sleep(0.2)

    def ended(self, part: str, seconds: float = 300) -> int:
        return self.parts[part].wait(seconds)

    def kill(self, words: str) -> int:
        """Send SIGKILL to the processes of this deployment whose command line has these words; return how many."""
        count = 0
        for number in os.listdir("/proc"):
            if number.isdigit() and words in (line := command_line(int(number))) and self._is_mine(int(number), line):
                os.kill(int(number), signal.SIGKILL)
                count += 1
        return count

    def _is_mine(self, number: int, line: str) -> bool:
        try:
            environment = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace")
        except OSError:
            return False
        return str(self.folder) in line or f"FEDSTILL_DEPLOYMENT={self.folder}\0" in environment + "\0"

    def end(self) -> None:
        for process in self.parts.values():
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(15)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
        for words in ("bin/flower-superlink", "deploy.flower.proxy"):  # of a run that was killed itself
            self.kill(words)


def command_line(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    made = Network(folder)
    try:
        yield made
    finally:
        made.end()


def differences(folder: Path) -> tuple[str, ...]:
    """Return the tensors of the last model that are not equal, bit for bit, to those of a run in one process."""
    deployment = read_deployment(folder)
    sites = [read_site(folder / "sites" / member.name) for member in deployment.members]
    rows = {site.client: read_rows(site.experiment, site.data).data for site in sites}
    ours: Weights = load_weights(deployment.run_dir / "last")
    return compared(ours, simulated(deployment, rows).weights)[0]


def table_of(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "server" / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
