"""Deployments over Flower: a SuperLink with TLS and node authentication, a proxy, three SuperNodes, three sites."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_site
import pytest
from over_flower import BERT, MIXED, NAMES, Network, differences, free_ports, network, table_of, write_deployment

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.files import CONNECTION, read_addresses
from fedstill.deploy.flower.keys import make_certificate, make_node_key
from fedstill.deploy.flower.run import Watch, environment, run_deployment
from fedstill.deploy.folder import read_deployment

pytestmark = pytest.mark.flower
MOMENTS = {1: 0.2, 3: 2.0, 5: 5.0}  # seconds after the end of these rounds at which a part is killed
ROUNDS = 6
MANY = 500  # more rounds than a test waits for


REFINED = "student.steps=5, student.batch_size=8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "how"),
    [
        (f"fedlmd+scaffold+mrtf({REFINED})", {}),
        (f"fedaux({REFINED})", {}),
        (f"scaffold until 1 then fedaux({REFINED})", {}),
        ("scaffold", {"local": 'part = "head"'}),
        ("fedftg(iterations=2, student.steps=2, batch_size=8, generator.noise=6)", {}),
        (f"feddf({REFINED})", {"model": MIXED}),
        ("scaffold", {"model": BERT, "data": "texts"}),
    ],
    ids=["mixture", "fedaux", "phases", "head", "fedftg", "mixed", "texts"],
)
def test_three_sites_train_to_the_same_bits_as_in_one_process(method, how, tmp_path):
    write_deployment(tmp_path, method, rounds=2, deadline=300.0, **how)
    with network(tmp_path) as parts:
        parts.all_sites()
        parts.run()
        assert parts.ended("run", 600) == 0, parts.said("run")
    assert [row["accepted"] for row in table_of(tmp_path)] == [3, 3]
    assert differences(tmp_path) == ()
    for name in ("last", "best", "config.toml", "contract.json", "metrics.jsonl"):
        assert (tmp_path / "server" / "run" / name).exists(), name


def wait_until_over(parts: Network, number: int) -> None:
    """Wait for a round by its row, because nobody tells of a round that ends while `fedstill deploy run` is dead."""
    table = parts.folder / "server" / "run" / "metrics.jsonl"
    ends = time.monotonic() + 600
    while not table.exists() or table.read_bytes().count(b"\n") < number:
        assert time.monotonic() < ends, parts.said("run")[-3000:]
        time.sleep(0.05)


def kill_of(part: str, parts: Network) -> None:
    """Kill one part with -9 and do what a system does for a process that died: start it again, if nothing else does."""
    folder = parts.folder
    if part == "site":
        assert parts.kill(f"fedstill site {folder / 'sites' / 'north'}") == 1
        time.sleep(3)
        parts.site("north")
    elif part == "supernode":
        assert parts.kill(f"deploy.flower.supernode {folder / 'sites' / 'south'}") == 1  # its script starts it again
    elif part == "server app":
        assert parts.kill("flwr-serverapp") == 1
    elif part == "superlink":
        assert parts.kill("bin/flower-superlink") == 1
    elif part == "proxy":
        assert parts.kill("deploy.flower.proxy") == 1
    elif part == "run":
        assert parts.kill("fedstill deploy run") == 1
        time.sleep(3)
        parts.run()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["site", "supernode", "server app", "superlink", "proxy", "run"])
def test_whatever_part_is_killed_at_three_moments_the_run_goes_on_to_the_same_bits(part, tmp_path):
    write_deployment(tmp_path, "fedlmd+scaffold", rounds=ROUNDS, deadline=240.0)
    with network(tmp_path) as parts:
        parts.all_sites()
        parts.run()
        for number, seconds in MOMENTS.items():
            wait_until_over(parts, number)
            time.sleep(seconds)
            kill_of(part, parts)
        assert parts.ended("run", 600) == 0, parts.said("run")
    assert [row["accepted"] for row in table_of(tmp_path)] == [3] * ROUNDS
    assert differences(tmp_path) == ()


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """A deployment whose run goes on while the tests of this file look at it; its last site is hostile."""
    folder = tmp_path_factory.mktemp("standing")
    write_deployment(folder, "fedavg", rounds=MANY, deadline=90.0)
    with network(folder) as parts:
        for name in NAMES:
            parts.supernode(name)
        for name in NAMES[:2]:
            parts.site(name)
        command = [sys.executable, hostile_site.__file__, str(folder / "sites" / NAMES[2])]
        parts.start("hostile", command)
        parts.run()
        parts.wait_for("run", f"round 1 of {MANY}: 3 of 3")
        yield parts


def goes_on(parts: Network, rounds: int = 1) -> None:
    """Wait until more rounds are over."""
    so_far = len(table_of(parts.folder))
    parts.wait_for("run", f"round {so_far + rounds} of {MANY}")


def audit_of(parts: Network) -> list[dict[str, object]]:
    return [json.loads(line) for line in (parts.folder / "server" / "run" / "audit.jsonl").read_text().splitlines()]


def test_each_attack_of_a_site_is_refused_and_noted_and_the_round_goes_on(standing):
    standing.wait_for("run", f"round {len(hostile_site.ATTACKS) + 1} of {MANY}", 400)
    records = [(hostile_site.attack_of(line["round"]), line["client"], line["reason"]) for line in audit_of(standing)]
    for attack, words in {
        "garbage": "these bytes are no parcel",
        "nan": "NaN",
        "oversized": "at most",
        "replayed": "it answered another order",
        "forged": "the answer's client is '0', and '2' was expected",
    }.items():
        assert any(attack == kind and client == 2 and words in reason for kind, client, reason in records), records
    for row in table_of(standing.folder)[1 : len(hostile_site.ATTACKS) + 1]:
        assert row["accepted"] == 2


def flwr(parts: Network, *words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "flwr")
    how = environment(parts.folder) | ({} if home is None else {"FLWR_HOME": str(home)})
    return subprocess.run([program, *words], env=how, capture_output=True, text=True)


def test_from_outside_nobody_registers_a_node_or_starts_a_run(standing, tmp_path):
    server = standing.folder / "server" / "flower"
    outside = (server / "home" / "config.toml").read_text()
    addresses = read_addresses(standing.folder)
    (tmp_path / "config.toml").write_text(outside.replace(addresses.superlink, addresses.listen))
    make_node_key(tmp_path / "node")
    register = ("supernode", "register", str(tmp_path / "node.pub"), CONNECTION)
    for command in (register, ("run", str(server / "app"), CONNECTION), ("list", CONNECTION)):
        done = flwr(standing, *command, home=tmp_path)
        assert done.returncode != 0
        assert "404" in done.stdout + done.stderr, done


def test_a_node_with_an_unregistered_key_is_refused(standing, tmp_path):
    own = tmp_path / "flower"
    shutil.copytree(standing.folder / "sites" / "north" / "flower", own, ignore=shutil.ignore_patterns("node*", "home"))
    make_node_key(own / "node")
    standing.start("thief", ["sh", str(own / "supernode.sh")], {"ONCE": "1", "PORT": str(free_ports(1)[0])})
    assert standing.ended("thief", 180) != 0
    assert "Failed to initialize the connection" in standing.said("thief")
    goes_on(standing)


def test_a_site_runs_no_other_app_than_its_own(standing, tmp_path):
    other, proof = tmp_path / "app", tmp_path / "proof"
    shutil.copytree(standing.folder / "server" / "flower" / "app", other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "client_app.py").open("a") as file:
        file.write(f"\nopen({str(proof)!r}, 'w').close()\n")
    (other / "server_app.py").write_text(OTHER_SERVER)
    assert flwr(standing, "run", str(other), CONNECTION).returncode == 0
    for name in NAMES:
        standing.wait_for(f"supernode {name}", "refused to run: the app that arrived has another", 120)
    goes_on(standing)
    assert not proof.exists()


OTHER_SERVER = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    for node in grid.get_node_ids():
        grid.push_messages([Message(RecordDict({}), node, "train", ttl=60)])
    import time
    time.sleep(60)
"""


def test_a_deployment_with_an_expired_certificate_is_not_started(tmp_path):
    write_deployment(tmp_path, "fedavg")
    expire(tmp_path)
    with pytest.raises(FedstillError, match="and not today"):
        run_deployment(tmp_path, print)


def expire(folder: Path) -> None:
    server = folder / "server" / "flower"
    (server / "server.crt").unlink()
    (server / "server.key").unlink()
    make_certificate(server, server / "authority", ["127.0.0.1", "localhost"], days=-30)


def test_a_site_does_not_talk_to_a_server_with_an_expired_certificate(tmp_path):
    write_deployment(tmp_path, "fedavg")
    expire(tmp_path)
    with network(tmp_path) as parts:
        for name in ("superlink", "proxy"):
            parts.start(name, ["sh", str(tmp_path / "server" / "flower" / f"{name}.sh")], {"ONCE": "1"})
        address, own = read_deployment(tmp_path).address, tmp_path / "sites" / "north" / "flower"
        parts.start("supernode north", [
            sys.executable, "-m", "fedstill.deploy.flower.supernode", str(own / "app"), "--superlink", address,
            "--root-certificates", str(own / "ca.crt"), "--auth-supernode-private-key", str(own / "node"),
            "--port", str(free_ports(1)[0]), "--max-wait-time", "15",
        ])  # fmt: skip
        assert parts.ended("supernode north", 120) != 0
        assert "certificate has expired" in parts.said("supernode north")


def test_each_round_is_told_once_and_again_when_it_is_played_again(tmp_path):
    deployment: Any = SimpleNamespace(
        run_dir=tmp_path, experiment=SimpleNamespace(rounds=9), names=("north", "south", "west")
    )
    said: list[str] = []
    watch = Watch(deployment, said.append)

    def look(*rounds: int, torn: str = "") -> list[str]:
        rows = [{"round": number, "accepted": 2, "cohort": 3, "seconds": 1.26} for number in rounds]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
        said.clear()
        watch.look()
        return [line.partition(":")[0] for line in said]

    watch.look()
    assert look(1, 2, torn='{"round"') == ["round 1 of 9", "round 2 of 9"]
    assert said[0] == "round 1 of 9: 2 of 3 sites, 1.3 s"
    assert look(1, 2, 3) == ["round 3 of 9"]
    assert look(1, 2, 3) == []
    assert look(1) == []  # resumed from an earlier checkpoint
    assert look(1, 2) == ["round 2 of 9"]


def test_who_is_left_out_is_told_before_the_round(tmp_path):
    deployment: Any = SimpleNamespace(
        run_dir=tmp_path, experiment=SimpleNamespace(rounds=9), names=("north", "south", "west")
    )
    (tmp_path / "log.txt").write_text("2026-01-01 00:00:00,000 WARNING of an earlier call\n")
    said: list[str] = []
    watch = Watch(deployment, said.append)
    with (tmp_path / "log.txt").open("a") as log:
        log.write(
            "2026-01-01 00:00:01,000 WARNING round 1: client 1: no answer\n2026-01-01 00:00:02,000 INFO round 1\n"
        )
    row = {"round": 1, "accepted": 2, "cohort": 3, "seconds": 1.26, "accuracy": 0.5, "measured_by": 2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    watch.look()
    watch.look()
    assert said == [
        "round 1: client south: no answer",
        "round 1 of 9: 2 of 3 sites, accuracy 0.5000 on the rows of 2 sites, 1.3 s",
    ]


def test_a_finished_run_is_not_played_again(tmp_path):
    write_deployment(tmp_path, "fedavg")
    (tmp_path / "server" / "flower" / "outcome.json").write_text('{"finished": true}')
    said: list[str] = []
    assert run_deployment(tmp_path, said.append) == tmp_path / "server" / "run"
    assert said == [f"this run is finished: see {tmp_path / 'server' / 'run'}"]
