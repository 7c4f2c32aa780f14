"""Certificates and keys of a deployment over Flower: a CA, the server's certificate, and a key pair for each node.

Files that are there are kept, so that an operator may bring his own.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.storage.files import write_whole

DAYS = 365
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def pem_of(key: str) -> bytes:
    """Return a public key as the PEM that Flower reports of a node. key: a line of OpenSSH, or PEM."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    load = form.load_pem_public_key if key.lstrip().startswith("-----") else form.load_ssh_public_key
    try:
        public = load(key.strip().encode())
    except ValueError as error:
        raise FedstillError(
            f"'{key[:40]}...' is no public key ({error}): make one with ssh-keygen -t ecdsa -b 384"
        ) from None
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise FedstillError(f"'{key[:40]}...' is no ECDSA key: Flower's nodes need one: ssh-keygen -t ecdsa -b 384")
    return bytes(public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo).strip())


def make_node_key(path: Path) -> str:
    """Return the public key `path`.pub of a node; make the pair first if there is neither."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    public = path.with_name(f"{path.name}.pub")
    if not public.exists():
        if not path.exists():
            pair = ec.generate_private_key(ec.SECP384R1())
            write_secret(path, pair.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
        loaded = form.load_ssh_private_key(path.read_bytes(), None)
        line = loaded.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        write_whole(public, line + b"\n")
    return public.read_text(encoding="utf-8").strip()


def make_authority(folder: Path) -> None:
    """Write ca.crt and ca.key, by which sites know the server, if there is no ca.crt."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    if (folder / "ca.crt").exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    name, no = _named("fedstill deployment"), dict.fromkeys(_USES, False)
    extensions = [x509.BasicConstraints(True, 0), x509.KeyUsage(**no | {"key_cert_sign": True, "crl_sign": True})]
    made = _signed(name, key.public_key(), (name, key), extensions, days=10 * DAYS)
    write_secret(folder / "ca.key", _private(key))
    write_whole(folder / "ca.crt", made.public_bytes(form.Encoding.PEM))


def make_certificate(folder: Path, authority: Path, hosts: list[str], *, days: int = DAYS) -> None:
    """Write server.crt and server.key for these hosts, signed by the authority, if there is no server.crt."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    if (folder / "server.crt").exists():
        return
    if not (authority / "ca.key").exists():
        raise FedstillError(
            f"{authority} holds ca.crt and no ca.key, so that nothing can be signed: put server.crt and server.key, "
            f"which your own authority signed for {', '.join(hosts)}, into {folder}"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    signer: Any = form.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes()).subject
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    use = x509.KeyUsage(**dict.fromkeys(_USES, False) | {"digital_signature": True})
    extensions = [names, x509.BasicConstraints(False, None), use]
    made = _signed(_named(hosts[0]), key.public_key(), (issuer, signer), extensions, days=days)
    write_secret(folder / "server.key", _private(key))
    write_whole(folder / "server.crt", made.public_bytes(form.Encoding.PEM))


def check_certificate(path: Path) -> None:
    """Refuse a certificate that is not valid today."""
    from cryptography import x509

    try:
        made = x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise FedstillError(f"there is no {path}: put it back") from None
    except ValueError as error:
        raise FedstillError(f"{path} is no certificate ({error})") from None
    first, last, now = made.not_valid_before_utc, made.not_valid_after_utc, datetime.now(UTC)
    if not first <= now <= last:
        raise FedstillError(
            f"{path} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}, and not today: remove it and its key, "
            "and `fedstill deploy run` writes them anew"
        )


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _named(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _signed(subject: Any, public: Any, by: tuple[Any, Any], extensions: list[Any], *, days: int) -> Any:
    """Return a certificate. by: name and private key of who signs it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    issuer, signer = by
    identifiers = [
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ]
    began = datetime.now(UTC) - timedelta(days=1)  # clocks differ
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(began, began + timedelta(days=days)))
        .not_valid_after(began + timedelta(days=days + 1))
    )
    for extension in [*extensions, *identifiers]:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA384())


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    data: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return data
