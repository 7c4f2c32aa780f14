"""The server of a live page: it answers its page and its events, to this machine's reader with the token only."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from pathlib import Path

import pytest
from run_folders import row, write_run
from watching import asked, events, watching

from fedstill.core.errors import FedstillError
from fedstill.report.watch import (
    ADDRESS,
    KEY_BYTES,
    MOST_CONNECTIONS,
    MOST_READERS,
    PATIENCE,
    listen,
    make_token,
    read_key,
)

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'watch' is not installed")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, and the folder that it shows."""
    place = tmp_path_factory.mktemp("served")
    folder = write_run(place / "run", [0.5, 0.6])
    (place / "secret.txt").write_text("a password")
    with watching(folder, cache=place / "cache") as address:
        yield address, folder


def test_the_page_has_its_policy_and_is_kept_by_nobody(served):
    address, _ = served
    status, headers, body = asked(address.port, f"/{address.token}/")
    assert status == 200
    assert b"fedstill watch" in body
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "frame-ancestors 'none'" in policy
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"  # a link would give the token away
    assert address.token.encode() not in body
    assert b"a password" not in body


def refused(address, path: str, **more) -> None:
    status, headers, body = asked(address.port, path, **more)
    assert status in (400, 403, 404), status
    assert len(body) < 200
    assert "location" not in headers
    assert address.token not in str(headers) + body.decode("latin-1")


def test_other_hosts_are_refused(served):
    address, _ = served
    page, port = f"/{address.token}/", address.port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"[::1]:{port}",
        "",
        "\n",
    ):
        refused(address, page, host=host)
        refused(address, f"{page}events", host=host)
    refused(address, page, more={"Host": "evil.example"})  # two of them
    assert asked(port, page, host=f"localhost:{port}")[0] == 200


def test_other_tokens_and_paths_are_refused(served):
    address, _ = served
    token = address.token
    half, other = token[:-1], token[:-1] + ("A" if token[-1] != "A" else "B")
    for path in (
        "/",
        "//",
        f"/{half}/",
        f"/{other}/",
        f"/{other}/events",
        f"/{token.swapcase()}/",
        f"/{token}x/",
        "/x" * 999,
    ):
        refused(address, path)
    for more in (
        "",
        "/../",
        "/../secret.txt",
        "/..%2f..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/config.toml",
        "/events/",
        "/events/../../etc/passwd",
    ):
        refused(address, f"/{token}{more}")
    refused(address, f"/%00{token}/")
    refused(address, f"//{token}/")
    refused(address, "*", method="OPTIONS")
    refused(address, f"/\udcff{token}/")


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "FOO", "get"]
)
def test_methods_other_than_get_are_refused(served, method):
    address, folder = served
    before = sorted(file.name for file in folder.iterdir())
    refused(address, f"/{address.token}/", method=method)
    assert sorted(file.name for file in folder.iterdir()) == before


def test_an_upgrade_to_a_socket_of_another_kind_is_not_made(served):
    address, _ = served
    words = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    assert asked(address.port, f"/{address.token}/", more=words)[0] != 101


def test_a_round_reaches_a_reader_within_seconds(served):
    address, folder = served
    wrote = 0.0
    for kind, data in events(address.port, address.token):
        if kind == "section" and not wrote:  # the first state is all there
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row(3, 0.777, 2)) + "\n")
            wrote = time.monotonic()
        if kind == "section" and json.loads(data)["name"] == "answer" and "77.7 %" in data:
            assert time.monotonic() - wrote < 10
            return
    raise AssertionError("the round did not arrive")


def test_only_this_machine_is_listened_to():
    with listen(0) as listening:
        assert listening.getsockname()[0] == ADDRESS == "127.0.0.1"
        taken = listening.getsockname()[1]
        with pytest.raises(FedstillError, match=f"--port {taken}: .*choose another port"):
            listen(taken)


def test_a_token_comes_back_for_the_same_key_port_and_folders_only(tmp_path):
    token = make_token(b"k" * 32, 8000, [tmp_path])
    assert token == make_token(b"k" * 32, 8000, [tmp_path / "." / "x" / ".."])
    others = [(b"j" * 32, 8000, tmp_path), (b"k" * 32, 8001, tmp_path), (b"k" * 32, 8000, tmp_path / "x")]
    assert token not in {make_token(key, port, [folder]) for key, port, folder in others}
    assert len(token) == 32  # 192 bits


def test_the_key_is_for_its_user_alone_and_made_anew_where_others_could_read_it(tmp_path):
    file = tmp_path / "cache" / "watch.key"
    key = read_key(file)
    assert len(key) == KEY_BYTES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_key(file) == key
    file.chmod(0o644)
    assert read_key(file) != key
    file.write_bytes(b"short")
    assert len(read_key(file)) == KEY_BYTES


def open_connections(address, count: int, words: bytes) -> list[socket.socket]:
    made = []
    for _ in range(count):
        try:
            connection = socket.create_connection((ADDRESS, address.port), timeout=5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(words)
            made.append(connection)
        except OSError:  # dropped at once
            pass
    return made


def test_readers_beyond_the_limit_are_refused_while_others_are_served(served):
    address, _ = served
    ask = f"GET /{address.token}/events HTTP/1.1\r\nhost: 127.0.0.1:{address.port}\r\n\r\n".encode()
    readers = open_connections(address, MOST_READERS, ask)
    try:
        for reader in readers:
            assert reader.recv(12) == b"HTTP/1.1 200"
        assert asked(address.port, f"/{address.token}/events")[0] == 503
        assert asked(address.port, f"/{address.token}/")[0] == 200
    finally:
        for reader in readers:
            reader.close()
    deadline = time.monotonic() + 10
    while next(events(address.port, address.token), None) is None:  # their places are free again
        assert time.monotonic() < deadline


@pytest.fixture
def thousands_of_files():
    """Let this process open them while a test runs."""
    resource = pytest.importorskip("resource")
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


@pytest.mark.usefixtures("thousands_of_files")
@pytest.mark.parametrize("kind", ["silent", "half a request", "events unread"])
def test_a_thousand_slow_readers_do_not_keep_a_good_one_out(served, kind):
    address, _ = served
    ask = f"GET /{address.token}/events HTTP/1.1\r\nhost: 127.0.0.1:{address.port}\r\n\r\n".encode()
    words = {"silent": b"", "half a request": ask[:-2], "events unread": ask}[kind]
    files, memory = Path(f"/proc/{address.process.pid}/fd"), Path(f"/proc/{address.process.pid}/statm")
    before = int(memory.read_text().split()[1]) if memory.exists() else 0  # pages of memory in use
    crowd = open_connections(address, 1000, words)
    assert len(crowd) > 900
    try:
        begin, answers = time.monotonic(), 0
        while answers < 3:
            try:
                status, _, body = asked(address.port, f"/{address.token}/")
                answers += status == 200 and b"</html>" in body
            except (OSError, IndexError, ValueError):
                time.sleep(0.5)
            assert time.monotonic() - begin < PATIENCE / 2  # nobody waits until the slow ones are dropped
        if files.exists():
            assert len(list(files.iterdir())) < MOST_CONNECTIONS + 60
            grown = (int(memory.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE")
            assert grown < 50e6
        assert address.process.poll() is None
    finally:
        for connection in crowd:
            connection.close()
