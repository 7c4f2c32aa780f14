"""The files of a deployment over Flower."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from deployments import a_deployment
from over_flower import write_deployment

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower import files as module
from fedstill.deploy.flower.files import checked_address, read_addresses, superlink_command, write
from fedstill.deploy.folder import read_deployment


@pytest.mark.flower
def test_each_site_gets_a_key_and_the_roster_names_it(tmp_path):
    write_deployment(tmp_path, "fedavg")
    for member in read_deployment(tmp_path).members:
        folder = tmp_path / "sites" / member.name / "flower"
        assert member.public_key == (folder / "node.pub").read_text().strip()
        assert (folder / "node").stat().st_mode & 0o777 == 0o600
        assert (folder / "ca.crt").read_bytes() == (
            tmp_path / "server" / "flower" / "authority" / "ca.crt"
        ).read_bytes()


@pytest.mark.flower
def test_no_site_gets_a_secret_of_another_or_of_the_server(tmp_path):
    write_deployment(tmp_path, "fedavg")
    secret = [path.read_bytes() for path in tmp_path.rglob("*.key")]
    secret += [(tmp_path / "sites" / name / "flower" / "node").read_bytes() for name in ("south", "west")]
    assert len(secret) == 4
    assert not [
        path for path in (tmp_path / "sites" / "north").rglob("*") if path.is_file() and path.read_bytes() in secret
    ]


@pytest.mark.flower
def test_writing_again_changes_nothing_and_says_nothing(tmp_path):
    write_deployment(tmp_path, "fedavg")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert write(read_deployment(tmp_path)) == []
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.flower
def test_a_site_that_made_its_own_key_gets_none(tmp_path):
    write_deployment(tmp_path, "fedavg")
    for path in (tmp_path / "sites" / "north" / "flower").iterdir():
        if path.is_file():
            path.unlink()
    write(read_deployment(tmp_path))
    assert not (tmp_path / "sites" / "north" / "flower" / "node").exists()


@pytest.mark.flower
def test_the_superlink_is_never_started_without_tls_and_node_authentication(tmp_path):
    write_deployment(tmp_path, "fedavg")
    command = superlink_command(tmp_path)
    assert "--enable-supernode-auth" in command
    assert {"--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"} <= set(command)
    for script in tmp_path.rglob("*.sh"):
        assert "--insecure" not in script.read_text()
        subprocess.run(["sh", "-n", str(script)], check=True)


@pytest.mark.flower
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_finds_no_fault_in_a_unit_but_programs_that_are_not_installed_here(tmp_path):
    (tmp_path / "a folder").mkdir()
    deployment = a_deployment(tmp_path / "a folder")
    units = sorted(deployment.folder.rglob("*.service"))
    assert len(units) == 3 + 2 * len(deployment.members)
    said = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True).stderr.splitlines()
    assert [line for line in said if "Command /srv/fedstill/" not in line] == []


@pytest.mark.flower
def test_a_deployments_folder_may_move(tmp_path):
    write_deployment(tmp_path / "old", "fedavg")
    (tmp_path / "old").rename(tmp_path / "new")
    write(read_deployment(tmp_path / "new"))
    parts = [tmp_path / "new/server/flower" / name for name in ("superlink.sh", "proxy.sh", "home/config.toml")]
    assert not [path for path in parts if str(tmp_path / "old") in path.read_text()]


def test_without_flower_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    (line,) = write(None)
    assert "Install it in an environment of its own, as docs/flower.md says" in line
    with pytest.raises(FedstillError, match="Flower is not installed"):
        module.need_flower()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fl.example.org:9443", ("fl.example.org", 9443)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:9443", ("::1", 9443)),
    ],
)
def test_an_address_is_host_and_port(text, found):
    assert checked_address(text, "address") == found


@pytest.mark.parametrize("text", ["host", "host:0", "host:99999", ":80", "a b:80", "https://host:80", None, 80])
def test_another_text_is_no_address(text):
    with pytest.raises(FedstillError, match=r"address = .* is no address: write host:port"):
        checked_address(text, "address")


def test_addresses_stand_in_one_file(tmp_path):
    with pytest.raises(FedstillError, match=r"there is no .*flower.toml"):
        read_addresses(tmp_path)
    path = tmp_path / "server" / "flower" / "flower.toml"
    path.parent.mkdir(parents=True)
    path.write_text('listen = "0.0.0.0:9443"\nsuperlink = "127.0.0.1:18443"\n')
    assert read_addresses(tmp_path) == ("0.0.0.0:9443", "127.0.0.1:18443")
    path.write_text('listen = "0.0.0.0:9443"\n')
    with pytest.raises(FedstillError, match="must say listen and superlink"):
        read_addresses(tmp_path)
