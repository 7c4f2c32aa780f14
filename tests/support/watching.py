"""The server of `fedstill watch` in a process of its own, and plain connections to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

START = [sys.executable, "-m", "fedstill"]


class Address(NamedTuple):
    """The address that `fedstill watch` prints, and the process that answers it."""

    text: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(urlsplit(self.text).port or 0)

    @property
    def token(self) -> str:
        return urlsplit(self.text).path.strip("/")


def start(*words: object, cache: Path, **more: str) -> subprocess.Popen[str]:
    """Start a command of fedstill; its output is text of one pipe."""
    environment = {**os.environ, "FEDSTILL_CACHE": str(cache), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        [*START, *map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@contextmanager
def watching(*folders: Path, cache: Path, port: int | None = None) -> Iterator[Address]:
    """Run `fedstill watch` while the block runs."""
    process = start("watch", *folders, *([] if port is None else ["--port", port]), cache=cache)
    assert process.stdout is not None
    try:
        yield Address(process.stdout.readline().strip(), process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            process.stdout.close()


def asked(
    port: int, path: str, *, method: str = "GET", host: str | None = None, more: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer to one request; the path goes out as it is."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {f'127.0.0.1:{port}' if host is None else host}"]
    lines += [f"{name}: {value}" for name, value in (more or {}).items()]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape"))
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *headers = head.decode("latin-1").split("\r\n")
    named = dict(line.lower().split(": ", 1) for line in headers)
    return int(first.split()[1]), named, body


def events(port: int, token: str, *, seconds: float = 20) -> Iterator[tuple[str, str]]:
    """Return kind and data of each event that the server sends, until so many seconds have passed."""
    deadline = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(f"GET /{token}/events HTTP/1.0\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
        kind = ""
        for line in connection.makefile("rb"):
            if time.monotonic() > deadline:
                return
            words = line.decode("utf-8").rstrip("\n")
            if words.startswith("event: "):
                kind = words.removeprefix("event: ")
            elif words.startswith("data: "):
                yield kind, words.removeprefix("data: ")
