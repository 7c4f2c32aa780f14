"""Measure seconds and bytes a round: fedstill's FedAvg over Flower, and Flower's own, by turns on one network.

    PATH=$PWD/.venv-flower/bin:$PATH OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/beside_flower.py

One SuperLink behind the proxy, three sites with 50 to 70 rows, an MLP of 52,003 numbers, one epoch a round. Flower's
own is a NumPyClient and its FedAvg with the same network and rows. A round lasts from the end of the one before it to
its own end. So the first round of each side, in which nodes connect, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import over_flower
from over_flower import NAMES, Network, free_ports, network, write_deployment

from fedstill.deploy.flower.files import CONNECTION, QUIET
from fedstill.deploy.flower.run import _flwr
from fedstill.deploy.folder import read_deployment

WIDTH, HIDDEN = 100, 500
PATIENCE = 400.0  # seconds for all rounds of one side
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "plain"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
"""
APP = """\
import csv

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


def net():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 3))


def client_fn(context):
    import torch
    from flwr.client import NumPyClient

    torch.set_num_threads(1)
    with open(context.node_config["data"]) as file:
        rows = list(csv.reader(file))[1:]
    x = torch.tensor([[float(cell) for cell in row[:-1]] for row in rows])
    y = torch.tensor(["abc".index(row[-1]) for row in rows])
    model = net()

    class Client(NumPyClient):
        def fit(self, parameters, config):
            with torch.no_grad():
                for own, sent in zip(model.parameters(), parameters):
                    own.copy_(torch.tensor(sent))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for start in range(0, len(y), 16):
                optimizer.zero_grad()
                batch = slice(start, start + 16)
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            return [own.detach().numpy() for own in model.parameters()], len(y), {}

    return Client().to_client()


client = ClientApp(client_fn=client_fn)


def server_fn(context):
    from flwr.common import ndarrays_to_parameters
    from flwr.compat.server import ServerAppComponents
    from flwr.server import ServerConfig
    from flwr.server.strategy import FedAvg

    class Noted(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            with open("LOG", "a") as file:
                file.write(f"{server_round} {len(results)}\\n")
            return super().aggregate_fit(server_round, results, failures)

    weights = ndarrays_to_parameters([own.detach().numpy() for own in net().parameters()])
    strategy = Noted(fraction_evaluate=0.0, min_fit_clients=3, min_available_clients=3, initial_parameters=weights)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


server = ServerApp(server_fn=server_fn)
"""


def seconds_between(lines: Callable[[], int], rounds: int) -> list[float]:
    """Watch a file get a line a round, and return the seconds from each line to the next."""
    times: list[float] = []
    ends = time.monotonic() + PATIENCE
    while len(times) < rounds:
        if time.monotonic() > ends:
            raise SystemExit(f"only {len(times)} of {rounds} rounds in {PATIENCE:.0f} s")
        times += [time.monotonic()] * (lines() - len(times))
        time.sleep(0.05)
    return [after - before for before, after in pairwise(times)]


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def plain_supernode(net: Network, name: str) -> None:
    """Start Flower's own SuperNode with the key of a site."""
    folder = net.folder / "sites" / name
    net.start(f"plain {name}", [
        str(Path(sys.executable).parent / "flower-supernode"), "--superlink", read_deployment(net.folder).address,
        "--root-certificates", str(folder / "flower" / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "flower" / "node"), "--node-config", f'data="{folder}/rows.csv"',
        "--host", "127.0.0.1", "--port", str(free_ports(1)[0]),
    ], {"FLWR_HOME": str(folder / "plain"), **QUIET})  # fmt: skip


def play_both(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Play fedstill's rounds, then Flower's own on the same SuperLink; return the seconds of each."""
    write_deployment(folder, "fedavg", rounds=rounds, deadline=180, model=f'name = "mlp"\nhidden = [{HIDDEN}]')
    log, app = folder / "plain.rounds", folder / "plain"
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    text = APP.replace("WIDTH", str(WIDTH)).replace("HIDDEN", str(HIDDEN)).replace("ROUNDS", str(rounds))
    (app / "app.py").write_text(text.replace("LOG", str(log)))
    with network(folder) as net:
        for part in ("superlink", "proxy"):
            net.start(part, ["sh", str(folder / "server" / "flower" / f"{part}.sh")], {"ONCE": "1"})
        net.all_sites()
        net.run()
        ours = seconds_between(lambda: line_count(folder / "server" / "run" / "metrics.jsonl"), rounds)
        if net.ended("run", 60) != 0:
            raise SystemExit(net.said("run"))
        for name in NAMES:
            os.killpg(net.parts[f"supernode {name}"].pid, signal.SIGTERM)
            net.parts[f"supernode {name}"].wait(30)
            plain_supernode(net, name)
        _flwr(folder, "run", str(app), CONNECTION)
        flowers = seconds_between(lambda: line_count(log), rounds)
        time.sleep(8)  # until Flower has counted
        for run in json.loads(_flwr(folder, "list", CONNECTION, "--format", "json").stdout)["runs"]:
            up, down = (run["network-traffic"][f"{way}-bytes"] / rounds for way in ("inbound", "outbound"))
            client_app = run["compute-time"]["clientapp-seconds"] / rounds / len(NAMES)
            print(f"{run['fab-name']}: {up:,.0f} bytes up and {down:,.0f} down a round, a ClientApp {client_app:.1f} s")
    return {"fedstill": ours, "Flower's own": flowers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    chosen = parser.parse_args()
    over_flower.FEATURES = WIDTH
    seconds: dict[str, list[float]] = {}
    for turn in range(chosen.turns):
        with tempfile.TemporaryDirectory() as folder:
            for side, taken in play_both(Path(folder) / f"turn{turn}", chosen.rounds).items():
                seconds.setdefault(side, []).extend(taken)
                print(f"turn {turn + 1}, {side}: {', '.join(f'{value:.1f}' for value in taken)}", flush=True)
    for side, taken in seconds.items():
        print(
            f"{side}: median {statistics.median(taken):.1f} s of {len(taken)} rounds, "
            f"{min(taken):.1f} to {max(taken):.1f}"
        )
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
