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
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.keys import make_authority, make_certificate, make_node_key
from fedstill.storage.files import write_whole
from fedstill.storage.toml import read_toml

if TYPE_CHECKING:
    from fedstill.deploy.folder import Deployment

FLOWER = "flower"  # the folder of these files, of the server and of each site
SETTINGS_FILE = "flower.toml"
AUTHORITY, APP, HOME, STATE_FILE = "authority", "app", "home", "state.db"
CONNECTION = "deployment"  # the name of the SuperLink in Flower's own configuration
VERSIONS = "flwr>=1.41,<1.43"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
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


@dataclass(frozen=True)
class Addresses:
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
    found = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 0 < int(found[2]) < 65536:
        raise FedstillError(f"{where} = {address!r} is no address: write host:port, e.g. fl.example.org:9443")
    return found[1].strip("[]"), int(found[2])


def write(deployment: Deployment, *, superlink: str = "127.0.0.1:18443") -> Mapping[str, str]:
    """Write what is missing of Flower's files, and return the public key of each site by its name."""
    need_flower()
    host, port = checked_address(deployment.address, "address")
    server = server_folder(deployment.folder)
    local, _ = checked_address(superlink, "superlink")
    listen = f"127.0.0.1:{port}" if host in ("127.0.0.1", "localhost") else f"0.0.0.0:{port}"
    _write_once(server / SETTINGS_FILE, _settings(listen, superlink))
    make_authority(server / AUTHORITY)
    make_certificate(server, server / AUTHORITY, list(dict.fromkeys([host, "localhost", "127.0.0.1", local])))
    authority = (server / AUTHORITY / "ca.crt").read_bytes()
    _write_app(server / APP)
    _write_once(server / HOME / "config.toml", _connection(server, superlink))
    _write_server_scripts(deployment, server)
    keys: dict[str, str] = {}
    for place, member in enumerate(deployment.members):
        folder = site_folder(deployment.folder, member.name)
        _write_once(folder / "ca.crt", authority.decode())
        if member.public_key:
            _write_once(folder / "node.pub", member.public_key + "\n")  # the site made its own pair
        keys[member.name] = make_node_key(folder / "node")
        _write_app(folder / APP)
        _write_site_scripts(deployment, folder, member.name, port=19094 + place)
    return keys


def need_flower() -> None:
    """Refuse to go on without Flower."""
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise FedstillError("Flower is not installed: pip install 'fedstill[flower]', with constraints-flower.txt")


def _settings(listen: str, superlink: str) -> str:
    return f"""\
# Where sites reach this machine. Open this port in the firewall, and no other.
listen = "{listen}"
# Where the SuperLink listens. It must be reached from this machine alone: who reaches it can start programs at all sites.
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


def _write_server_scripts(deployment: Deployment, server: Path) -> None:
    folder = deployment.folder.resolve()
    variables = {"FLWR_HOME": str(server.resolve() / HOME), "FEDSTILL_DEPLOYMENT": str(folder), **QUIET}
    parts = {
        "superlink": ("the SuperLink: keeps messages between server and sites", superlink_command(folder)),
        "proxy": ("the proxy: lets sites reach the SuperLink's fleet API, and nothing else", [
            "python", "-m", "fedstill.deploy.flower.proxy", str(folder),
        ]),
        "run": ("the run: starts what does not run yet, watches it, and goes on after a failure", [
            "python", "-m", "fedstill", "deploy", "run", str(folder),
        ]),
    }  # fmt: skip
    for name, (about, command) in parts.items():
        _write_script(server / f"{name}.sh", about, command, variables, again=name != "run")
        _write_unit(server / f"fedstill-{name}.service", f"fedstill: {about}", server / f"{name}.sh")


def _write_site_scripts(deployment: Deployment, folder: Path, name: str, *, port: int) -> None:
    """The site's scripts find their files beside themselves, because the folder travels."""
    socket = '$HERE/../socket/desk.sock'
    supernode = [
        "python", "-m", "fedstill.deploy.flower.supernode", "$HERE/app",
        "--superlink", deployment.address, "--root-certificates", "$HERE/ca.crt",
        "--auth-supernode-private-key", "$HERE/node", "--node-config", f'socket="{socket}"',
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    about = f"the SuperNode of site {name}: fetches orders, and hands them to the site's daemon"
    _write_script(folder / "supernode.sh", about, supernode, {"FLWR_HOME": "$HERE/home", **QUIET}, again=True)
    daemon = ["python", "-m", "fedstill", "site", "$HERE/.."]
    about = f"the daemon of site {name}: holds the data, and answers orders at a socket"
    _write_script(folder / "site.sh", about, daemon, {}, again=True)
    for part in ("supernode", "site"):
        _write_unit(folder / f"fedstill-{part}.service", f"fedstill: {part} of {name}", Path(f"/srv/fedstill/{name}/flower/{part}.sh"))


def _write_script(path: Path, about: str, command: list[str], variables: Mapping[str, str], *, again: bool) -> None:
    """A script for people without systemd: it starts its part again when that ends."""
    quoted = " ".join(_quoted(word) for word in command)
    lines = [
        "#!/bin/sh",
        f"# Starts {about}.",
        "# The environment that fedstill is installed in must be active, or PYTHON_BIN must name its folder bin.",
        "set -u",
        'HERE=$(cd "$(dirname "$0")" && pwd)',
        'PATH="${PYTHON_BIN:+$PYTHON_BIN:}$PATH"',
        "export PATH " + " ".join(f"{name}={_quoted(value)}" for name, value in variables.items()),
    ]
    if again:
        lines += ['[ -z "${ONCE:-}" ] || exec ' + quoted, "while true; do", f"  {quoted}", "  sleep 5", "done"]
    else:
        lines += [f"exec {quoted}"]
    if not path.exists():
        write_whole(path, "\n".join(lines) + "\n")
        path.chmod(0o755)


def _quoted(word: str) -> str:
    """Quote a word for the shell; $HERE stays a variable."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' if "$HERE" in word else shlex.quote(word)


def _write_unit(path: Path, about: str, script: Path) -> None:
    _write_once(path, f"""\
# Copy to /etc/systemd/system, and write the user and the folders of this machine.
[Unit]
Description={about}
After=network-online.target
Wants=network-online.target

[Service]
User=fedstill
Environment=ONCE=1 PYTHON_BIN={Path(sys.prefix) / "bin"}
ExecStart={script}
Restart=always
RestartSec=5
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={script.parent.parent}

[Install]
WantedBy=multi-user.target
""")


def _write_once(path: Path, text: str) -> None:
    if not path.exists():
        write_whole(path, text)
