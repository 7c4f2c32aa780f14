"""Keys and certificates, checked by OpenSSL's and OpenSSH's own programs where these are there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.keys import check_certificate, make_authority, make_certificate, make_node_key, pem_of

pytestmark = pytest.mark.flower


def made(folder, hosts=("fl.example.org", "127.0.0.1"), **how):
    make_authority(folder / "authority")
    make_certificate(folder, folder / "authority", list(hosts), **how)
    return folder


def test_a_node_key_is_private_and_its_public_key_is_what_flower_reports(tmp_path):
    line = make_node_key(tmp_path / "node")
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o600
    assert line == (tmp_path / "node.pub").read_text().strip()
    assert line.startswith("ecdsa-sha2-nistp384 ")
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    pair = load_ssh_private_key((tmp_path / "node").read_bytes(), None)
    assert pem_of(line) == public_key_to_bytes(pair.public_key()).strip()


def test_a_public_key_is_the_same_in_both_forms(tmp_path):
    pem = pem_of(make_node_key(tmp_path / "node"))
    assert pem_of(pem.decode()) == pem


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not here")
def test_a_site_may_make_its_own_key(tmp_path):
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", tmp_path / "node"]
    subprocess.run(command, check=True)
    assert make_node_key(tmp_path / "node") == (tmp_path / "node.pub").read_text().strip()
    (tmp_path / "node").unlink()  # the operator has the public key alone
    assert pem_of(make_node_key(tmp_path / "node"))
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("key", ["", "ssh-rsa AAAA", "-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----"])
def test_another_text_is_no_key(key):
    with pytest.raises(FedstillError, match="ssh-keygen -t ecdsa -b 384"):
        pem_of(key)


def openssl_takes(folder, *host):
    command = ["openssl", "verify", "-x509_strict", "-CAfile", folder / "authority" / "ca.crt", *host]
    return subprocess.run([*command, folder / "server.crt"], capture_output=True).returncode == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_openssl_takes_the_certificate_for_the_servers_hosts_alone(tmp_path):
    folder = made(tmp_path)
    assert openssl_takes(folder, "-verify_hostname", "fl.example.org")
    assert openssl_takes(folder, "-verify_ip", "127.0.0.1")
    assert not openssl_takes(folder, "-verify_hostname", "other.org")
    assert not openssl_takes(made(tmp_path / "old", days=-30))


def test_secrets_can_be_read_by_their_user_alone(tmp_path):
    folder = made(tmp_path)
    for path in (folder / "authority" / "ca.key", folder / "server.key"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_there_is_kept(tmp_path):
    folder = made(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    made(tmp_path)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_with_an_authority_of_his_own_the_operator_brings_the_certificate(tmp_path):
    made(tmp_path / "other")
    (tmp_path / "authority").mkdir()
    shutil.copy(tmp_path / "other" / "authority" / "ca.crt", tmp_path / "authority" / "ca.crt")
    with pytest.raises(FedstillError, match="your own authority signed for fl"):
        make_certificate(tmp_path, tmp_path / "authority", ["fl.example.org"])


def test_only_a_certificate_that_is_valid_today_is_used(tmp_path):
    check_certificate(made(tmp_path / "good") / "server.crt")
    with pytest.raises(FedstillError, match="and not today"):
        check_certificate(made(tmp_path / "old", days=-30) / "server.crt")
    with pytest.raises(FedstillError, match="there is no"):
        check_certificate(tmp_path / "none.crt")
