"""Orders and answers over a unix socket of one machine: from the process that faces the network to the one with data.

A frame is 8 bytes of length and as many bytes. A caller sends two frames, the common part of an order and the client's
own, and reads one, the answer. Each order has a connection of its own.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from fedstill.core.errors import FedstillError

# as in population/desk.py and population/remote.py, which this module does not import because they load torch
LARGEST_ORDER = LARGEST_ANSWER = 1 << 30
LENGTH = struct.Struct(">Q")
OWN_LIMIT = 1 << 20  # bytes of a client's own part of an order
PATIENCE = 30.0  # seconds without a byte after which a connection is closed, so that a dead peer holds nothing
CONNECTIONS = 16  # at a time; more wait
PIECE = 1 << 20
LONGEST_PATH = 100  # bytes: systems refuse longer names of sockets (108 on Linux, 104 on macOS)
INSTANT = 0.2  # seconds between looks at whether to stop


class NotThere(FedstillError):
    """Raised where no service answers at a socket, or where it ended; it may be started again."""


class Answers(Protocol):
    """A desk, as this module needs it."""

    def answer(self, common: bytes, own: bytes) -> bytes: ...


def serve(
    desk: Answers,
    path: Path,
    *,
    stop: threading.Event | None = None,
    group: str = "",
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer orders at the socket `path` until `stop` is set. One order is worked on at a time.

    The socket has the mode 0600 in a folder of the mode 0700, so that only this user reaches it.
    group: lets a group of the system reach it, too (0660 in 0710): the user of the process that faces the network.
    ready: called once it listens.
    """
    stop = threading.Event() if stop is None else stop
    one_at_a_time, free = threading.Lock(), threading.BoundedSemaphore(CONNECTIONS)

    def attend(peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(PATIENCE)
                common, own = _read(peer, LARGEST_ORDER), _read(peer, OWN_LIMIT)
                with one_at_a_time:
                    answer = desk.answer(common, own)
                _write(peer, answer)
        except (OSError, FedstillError):
            pass  # a peer that died, was silent or sent no frames: nothing was done, or nobody hears of it
        finally:
            free.release()

    with _listening(path, group) as listener:
        ready()
        while not stop.is_set():
            if not free.acquire(timeout=INSTANT):
                continue
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                free.release()
                continue
            threading.Thread(target=attend, args=(peer,), daemon=True).start()
    with one_at_a_time:  # an order that is under way is answered
        return


def hand_over(path: Path, common: bytes, own: bytes, *, timeout: float) -> bytes:
    """Hand an order to the service at the socket `path`, and return its answer.

    timeout: seconds for all of it. A FedstillError says why there is no answer, in one line without a folder's name,
    because a transport may send it to the server.
    """
    end = time.monotonic() + timeout
    try:
        with _address(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(timeout)
            peer.connect(address)
            _write(peer, common)
            _write(peer, own)
            return _read(peer, LARGEST_ANSWER, end)
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotThere("the site's service is not there: start `fedstill site`") from None
    except PermissionError:
        raise FedstillError("the site's socket may not be opened by this user: see socket_group in site.toml") from None
    except TimeoutError:
        raise FedstillError(f"the site's service gave no answer within {timeout:g} seconds") from None
    except OSError as error:
        raise NotThere(f"the site's service ended before it answered ({error.strerror or error})") from None


class Sockets:
    """A transport to services of this machine, each behind a socket. It waits `deadline` seconds for the answers."""

    def __init__(self, paths: Mapping[int, Path], *, deadline: float) -> None:
        self.paths, self.deadline = paths, deadline

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        end = time.monotonic() + self.deadline
        pool = ThreadPoolExecutor(max(1, len(each)))
        try:
            asked = {pool.submit(self._ask, client, common, own): client for client, own in each.items()}
            while asked:
                done, _ = wait(asked, timeout=end - time.monotonic(), return_when=FIRST_COMPLETED)
                if not done:
                    return
                for call in sorted(done, key=lambda future: asked[future]):
                    client, error = asked.pop(call), call.exception()
                    if error is None:
                        yield client, call.result()
                    else:
                        yield client, error if isinstance(error, Exception) else FedstillError("stopped")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, client: int, common: bytes, own: bytes) -> bytes:
        if client not in self.paths:
            raise FedstillError("this client is away")
        return hand_over(self.paths[client], common, own, timeout=self.deadline)


@contextmanager
def _listening(path: Path, group: str) -> Iterator[socket.socket]:
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.chmod(folder, 0o710 if group else 0o700)
        _remove_stale(path)
        with _address(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            before = os.umask(0o177)  # from its first instant nobody else may connect
            try:
                listener.bind(address)
            finally:
                os.umask(before)
            if group:
                _give_to_group(folder, path, group)
            listener.listen(CONNECTIONS)
            listener.settimeout(INSTANT)
            try:
                yield listener
            finally:
                with suppress(OSError):
                    path.unlink()
    except OSError as error:
        raise FedstillError(
            f"socket: cannot listen at '{path}' ({error.strerror or error}): name another one"
        ) from error


def _give_to_group(folder: Path, path: Path, group: str) -> None:
    import shutil

    try:
        shutil.chown(folder, group=group)
        shutil.chown(path, group=group)
    except (LookupError, PermissionError):
        raise FedstillError(
            f"socket_group = '{group}': there is no such group, or this user is no member of it: see docs/deploy.md"
        ) from None
    os.chmod(path, 0o660)


def _remove_stale(path: Path) -> None:
    """Remove the socket that a service left which was killed; one that somebody answers at is refused."""
    if not path.is_socket():
        return
    with _address(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(INSTANT)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (FileNotFoundError, TimeoutError):
            return
    raise FedstillError(f"socket: another service listens at '{path}' already: end it first, or name another socket")


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a name of the socket that the system accepts; a long one goes through its open folder where it can."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise FedstillError(
            f"socket: '{path}' is longer than {LONGEST_PATH} letters, which this system refuses: name a shorter one"
        )
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _write(peer: socket.socket, data: bytes) -> None:
    peer.sendall(LENGTH.pack(len(data)))
    if data:  # a peer that has all it waits for may be gone, and then even nothing cannot be sent
        peer.sendall(data)


def _read(peer: socket.socket, limit: int, end: float | None = None) -> bytes:
    (length,) = LENGTH.unpack(_exactly(peer, LENGTH.size, end))
    if length > limit:
        raise FedstillError(f"the site's service was sent or gave {length:,} bytes: at most {limit:,} are accepted")
    return _exactly(peer, length, end)


def _exactly(peer: socket.socket, count: int, end: float | None) -> bytes:
    parts, missing = [], count
    while missing:
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            peer.settimeout(left)
        part = peer.recv(min(PIECE, missing))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
