"""The files of a deployment over Flower, beside those of the deployment itself. Files that are there are kept.

server/flower/
    flower.toml           where the proxy and the SuperLink listen
    authority/            ca.crt and ca.key: sites know the server by them. With your own ca.crt, bring server.crt, too
    server.crt, server.key
    app/                  the app of this run, the same as each site's
    home/config.toml      where Flower's commands find the SuperLink (FLWR_HOME)
    superlink.sh, proxy.sh, run.sh      and a unit of systemd for each
sites/NAME/flower/
    ca.crt, node, node.pub              node: the site's private key; only node.pub where the site made its own
    app/                                the only app that its SuperNode runs
    supernode.sh, site.sh               and a unit of systemd for each
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.keys import make_authority, make_certificate, make_node_key
from fedstill.deploy.folder import Deployment, with_public_keys
from fedstill.storage.files import write_whole
from fedstill.storage.toml import read_toml

FLOWER = "flower"  # the folder of these files, of the server and of each site
SETTINGS_FILE = "flower.toml"
AUTHORITY, APP, HOME, STATE_FILE = "authority", "app", "home", "state.db"
CONNECTION = "deployment"  # the name of the SuperLink in Flower's own configuration
SERVER_USER = "a user that may write the folder of the deployment"
SITE_USER = "a user that may use the socket (see socket_group in site.toml), and may not read the rows"
VERSIONS = "flwr>=1.41,<1.43"
MISSING = "Install it in an environment of its own, as docs/flower.md says, because its pins clash with others"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
DEPLOYMENT = "FEDSTILL_DEPLOYMENT"  # environment of the SuperLink: the deployment's folder
PATIENCE = "120"  # seconds without the server after which a SuperNode says why, and ends; its script starts it again
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")

PROJECT = f"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstill-deployment"
version = "1.0.0"
dependencies = ["{VERSIONS}"]

[tool.flwr.app]
publisher = "fedstill"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
"""
SERVER_APP = '''\
"""Plays the rounds. All of it is in the installed package fedstill."""

from fedstill.deploy.flower.server_app import server_app

app = server_app()
'''
CLIENT_APP = '''\
"""Hands an order to the site's daemon, and its answer back. All of it is in the installed package fedstill."""

from fedstill.deploy.flower.client_app import client_app

app = client_app()
'''


class Addresses(NamedTuple):
    """host:port of the proxy, as it listens, and of the SuperLink behind it."""

    listen: str
    superlink: str


def server_folder(deployment: Path) -> Path:
    return deployment / "server" / FLOWER


def site_folder(deployment: Path, name: str) -> Path:
    return deployment / "sites" / name / FLOWER


def read_addresses(deployment: Path) -> Addresses:
    """Read flower.toml of a deployment."""
    path = server_folder(deployment) / SETTINGS_FILE
    if not path.exists():
        raise FedstillError(f"there is no {path}: write Flower's files with `fedstill deploy init`")
    table = read_toml(path)
    if table.keys() != {"listen", "superlink"}:
        raise FedstillError(f"{path} must say listen and superlink, and nothing else")
    for key, address in table.items():
        checked_address(address, f"{path}: {key}")
    return Addresses(**table)


def checked_address(address: object, where: str) -> tuple[str, int]:
    """Return host and port of an address; another form is refused."""
    match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise FedstillError(f"{where} = {address!r} is no address: write host:port, e.g. fl.example.org:9443")
    return match[1].strip("[]"), int(match[2])


def write(deployment: Deployment, *, superlink: str = "127.0.0.1:18443") -> list[str]:
    """Write what is missing of Flower's files, and public keys into the roster; return what is to be done next."""
    if find_spec("flwr") is None:
        return [f"missing: keys, certificates and Flower's app. {MISSING}, and call `fedstill deploy run`"]
    host, port = checked_address(deployment.address, "address")
    server = server_folder(deployment.folder)
    local, _ = checked_address(superlink, "superlink")
    listen = f"127.0.0.1:{port}" if host in ("127.0.0.1", "localhost") else f"0.0.0.0:{port}"
    _write_once(server / SETTINGS_FILE, _settings(listen, superlink))
    make_authority(server / AUTHORITY)
    make_certificate(server, server / AUTHORITY, list(dict.fromkeys([host, "localhost", "127.0.0.1", local])))
    authority = (server / AUTHORITY / "ca.crt").read_text(encoding="utf-8")
    _write_app(server / APP)
    connection = _connection(server, read_addresses(deployment.folder).superlink)
    write_whole(server / HOME / "config.toml", connection)  # again, because the folder that it names may have moved
    _write_server_scripts(deployment.folder)
    keys: dict[str, str] = {}
    for place, member in enumerate(deployment.members):
        folder = site_folder(deployment.folder, member.name)
        if member.public_key:
            _write_once(folder / "node.pub", member.public_key + "\n")  # the site made its own pair
        keys[member.name] = make_node_key(folder / "node")
        _write_once(folder / "ca.crt", authority)
        _write_app(folder / APP)
        _write_supernode_script(deployment, folder, member.name, port=19094 + place)
    new = sorted(member.name for member in deployment.members if member.public_key != keys[member.name])
    if not new:
        return []
    with_public_keys(deployment, keys)
    return [f"keys were made for {', '.join(new)}: send each site its folder on a way that keeps it secret"]


def need_flower() -> None:
    """Refuse to go on without Flower."""
    if find_spec("flwr") is None:
        raise FedstillError(f"Flower is not installed. {MISSING}")


def _settings(listen: str, superlink: str) -> str:
    return f"""\
# Where sites reach this machine. Open this port in the firewall, and no other.
listen = "{listen}"
# Where the SuperLink listens. Only this machine may reach it, because who does can send orders to all sites.
superlink = "{superlink}"
"""


def _connection(server: Path, superlink: str) -> str:
    certificate = (server / AUTHORITY / "ca.crt").resolve()
    return f"""\
[superlink]
default = "{CONNECTION}"

[superlink.{CONNECTION}]
address = "{superlink}"
root-certificates = "{certificate}"
"""


def _write_app(folder: Path) -> None:
    for name, text in (("pyproject.toml", PROJECT), ("server_app.py", SERVER_APP), ("client_app.py", CLIENT_APP)):
        _write_once(folder / name, text)


def superlink_command(folder: Path) -> list[str]:
    """Return the command that starts the SuperLink of a deployment, with TLS and node authentication."""
    server = server_folder(folder).resolve()
    host, port = checked_address(read_addresses(folder).superlink, "superlink")
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(server / AUTHORITY / "ca.crt")),
        *("--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key")),
        "--enable-supernode-auth",
        *("--database", str(server / STATE_FILE), "--disable-runtime-dependency-installation"),
        *("--host", host, "--port", str(port)),
    ]


def _write_server_scripts(folder: Path) -> None:
    server = server_folder(folder).resolve()
    variables = {"FLWR_HOME": f"$HERE/{HOME}", DEPLOYMENT: "$HERE/../..", **QUIET}
    # the SuperLink starts the ServerApp, which writes the folder of the run
    superlink = Unit("the SuperLink: keeps messages between server and sites", SERVER_USER, server, server.parent)
    proxy = Unit("the proxy: lets sites reach the SuperLink's fleet API, and nothing else", SERVER_USER, server, server)
    command = [word.replace(str(server), "$HERE") for word in superlink_command(folder)]
    _write_part(server / "superlink.sh", superlink, command, variables)
    command = ["python", "-m", "fedstill.deploy.flower.proxy", "$HERE/../.."]
    _write_part(server / "proxy.sh", proxy, command, variables)


def _write_supernode_script(deployment: Deployment, folder: Path, name: str, *, port: int) -> None:
    """The script finds its files beside itself, because the site's folder travels."""
    command = [
        "python", "-m", "fedstill.deploy.flower.supernode", "$HERE/app",
        "--superlink", deployment.address, "--root-certificates", "$HERE/ca.crt",
        "--auth-supernode-private-key", "$HERE/node", "--node-config", 'socket="$HERE/../socket/desk.sock"',
        "--host", "127.0.0.1", "--port", f"${{PORT:-{port}}}",
        "--max-wait-time", PATIENCE,
    ]  # fmt: skip
    about = f"the SuperNode of site {name}: fetches orders, and hands them to `fedstill site`"
    at_site = Path("/srv/fedstill") / name / FLOWER
    _write_part(
        folder / "supernode.sh", Unit(about, SITE_USER, at_site, at_site), command,
        {"FLWR_HOME": f"$HERE/{HOME}", **QUIET},
    )  # fmt: skip


class Unit(NamedTuple):
    """What a unit of systemd says of a part: what it is, its user, the folder of its script, and what it may write."""

    about: str
    user: str
    folder: Path
    writes: Path


def _write_part(path: Path, unit: Unit, command: list[str], variables: Mapping[str, str]) -> None:
    """Write a script that starts a part again whenever it ends, and a unit of systemd that does the same."""
    quoted = " ".join(_quoted(word) for word in command)
    settings = " ".join(f"{name}={_quoted(value)}" for name, value in variables.items())
    if path.exists():
        return
    write_whole(path, f"""\
#!/bin/sh
# Starts {unit.about}.
# The environment that fedstill is installed in must be active, or PYTHON_BIN must name its folder bin.
# With ONCE=1 the part is not started again when it ends, because systemd does that.
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
export PATH="${{PYTHON_BIN:+$PYTHON_BIN:}}$PATH" {settings}
[ -z "${{ONCE:-}}" ] || exec {quoted}
while true; do
  {quoted}
  sleep 5
done
""")  # fmt: skip
    path.chmod(0o755)
    _write_once(path.with_name(f"fedstill-{path.stem}.service"), f"""\
# /etc/systemd/system/fedstill-{path.stem}.service: write the user and the folders of your machine
[Unit]
Description=fedstill: {unit.about}
After=network-online.target
Wants=network-online.target

[Service]
# {unit.user}
User=fedstill
Environment=ONCE=1 PYTHON_BIN=/srv/fedstill/venv/bin
ExecStart={_in_unit(unit.folder / path.name)}
Restart=always
RestartSec=5
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=yes
ReadWritePaths={_in_unit(unit.writes)}

[Install]
WantedBy=multi-user.target
""")  # fmt: skip


def _in_unit(path: Path) -> str:
    """Return a path as a unit has it: there a space ends a path, and % begins a word for something else."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _quoted(word: str) -> str:
    """Quote a word for the shell; $HERE and ${PORT:-...} stay variables."""
    if "$HERE" not in word and not word.startswith("${PORT"):
        return shlex.quote(word)
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _write_once(path: Path, text: str) -> None:
    if not path.exists():
        write_whole(path, text)
