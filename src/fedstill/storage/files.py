"""Files that are whole or absent whenever the process ends, folders that one process works in, and locks.

Somebody else may have made a folder that we write into or read. So nothing is written through a link, no link in a
folder of ours may lead out of it, and only regular files of a bounded size are read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

from fedstill.core.errors import FedstillError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".writing-"  # how the name of an unfinished file begins
INSTANT = 0.05  # seconds
RUNNING_FILE = ".running"  # held as a lock while a process works in a folder
MOST_BYTES = 1 << 28  # of a text or a table that a command reads into memory
MOST_MODEL_BYTES = 1 << 34  # of a model
MOST_OF_A_LIST = 1 << 24  # of the list of parts at the end of a zip file; in memory it takes ten times as much
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would be waited for
_working: dict[Path, int] = {}  # the thread that works in each folder


def default_cache_dir() -> Path:
    """Return the folder $FEDSTILL_CACHE, or ~/.cache/fedstill if the variable is not set."""
    return Path(os.environ.get("FEDSTILL_CACHE") or Path.home() / ".cache" / "fedstill")


def default_config_dir() -> Path:
    """Return the folder $FEDSTILL_CONFIG, or fedstill in $XDG_CONFIG_HOME or ~/.config."""
    config, shared = os.environ.get("FEDSTILL_CONFIG"), os.environ.get("XDG_CONFIG_HOME")
    return Path(config) if config else Path(shared or Path.home() / ".config") / "fedstill"


def regular(path: Path) -> IO[bytes]:
    """Open a file for reading; a folder, a pipe or a device is an OSError."""
    handle = os.open(path, os.O_RDONLY | _AT_ONCE)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; one of more than `most` bytes is an OSError, and is not read."""
    with regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it holds {size:,} bytes, and at most {most:,} are read", str(path))
        return file.read(size)  # `read` takes memory for its limit first, so not `most`


class _AtOnce:
    """A file of which no more than so many bytes are read at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.most = file, MOST_OF_A_LIST

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, size: int = -1) -> bytes:
        if size > self.most:
            raise ValueError(f"it would read {size:,} bytes at once, and at most {self.most:,} are accepted")
        return self.file.read(size)


def open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip file for reading; one whose list of parts would fill the memory is a ValueError."""
    careful = _AtOnce(file)
    archive = zipfile.ZipFile(cast(IO[bytes], careful))
    careful.most = MOST_MODEL_BYTES  # parts are read in pieces, or were bounded by others
    return archive


def read_text(path: Path) -> str:
    """Return the text in a regular file of a bounded size."""
    return read_bytes(path).decode()


def from_json(text: str | bytes) -> Any:
    """Return what a JSON text holds; one whose brackets are nested too deep is a ValueError, as any other mistake."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; a file that is none is an OSError or a ValueError."""
    return from_json(read_text(path))


def appending(path: Path) -> TextIO:
    """Open a text for more lines at its end; a link is an OSError, because it may lead anywhere."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK | _AT_ONCE, 0o666)
    return os.fdopen(handle, "a", encoding="utf-8")


def leads_out(path: Path) -> bool:
    """Return whether a path is a link to a place outside of its folder."""
    return path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve())


def check_no_way_out(folder: Path) -> None:
    """Refuse a folder in which a link leads out of it, or which holds a pipe or a device."""
    home = folder.resolve()
    for place, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = Path(place) / name
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) and not path.resolve().is_relative_to(home):
                shown = folder / path.relative_to(home)
                raise FedstillError(f"'{shown}' is a link to a place outside of '{folder}': remove it")
            if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise FedstillError(f"'{folder / path.relative_to(home)}' is neither a file nor a folder: remove it")


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Keep other processes and threads out of the folder of a run or a comparison while the block works there.

    A folder from which a link leads out is refused. A full disk is one line. A folder that did not exist is gone
    again if the block fails before it writes into it. The thread that works in a folder may enter it again.
    """
    home = folder.resolve()
    if _working.get(home) == threading.get_ident():
        yield
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    if not new:
        check_no_way_out(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / RUNNING_FILE, wait=False))
        except BlockingIOError:
            who = holder(folder / RUNNING_FILE)
            raise FedstillError(f"'{folder}' is at work already ({who}): wait for it, or use a new folder") from None
        except OSError as error:
            raise _unwritable(folder, error) from error
        _working[home] = threading.get_ident()
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise FedstillError(
                f"cannot write '{error.filename or folder}' ({error.strerror or error}): make room, and go on; what "
                "was written before is kept"
            ) from error
        finally:
            del _working[home]
            stack.close()
            for path in new:
                with suppress(OSError):
                    path.rmdir()  # it is empty, because the block failed before it wrote


def _unwritable(folder: Path, error: OSError) -> FedstillError:
    return FedstillError(f"cannot write into '{folder}' ({error.strerror or error}): choose another folder")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees its old content or all of the new one, never a part."""
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends, and is removed if the block fails.

    A pipe, a socket or a device in its place is an OSError, because root would replace it, too.
    durable: wait until the disk has the file, so that it survives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
    temporary = temporary_beside(path)
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0), 0o666)
        with os.fdopen(handle, "w+b") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable and os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def temporary_beside(path: Path) -> Path:
    """Return a path in the same folder for a file that is not whole yet; nothing is there."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{threading.get_ident()}-{path.name}")
    temporary.unlink(missing_ok=True)
    return temporary


@contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the file `path` as a lock while the block runs.

    If another process holds it, wait for it, or without `wait` raise BlockingIOError. The system frees the lock when
    its process ends in any way, so no lock is left over. The file holds the number of the process, for messages. Where
    the system has no such locks (Windows, some network drives) nothing is held.
    """
    held = _take(path, wait=wait)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the lock is free, because afterwards the file may be another process's
        held.close()


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock; False where the system has no locks."""
    try:
        with regular(path) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(path: Path) -> str:
    """Name the process that holds a lock, for a message."""
    try:
        return f"pid {int(read_text(path))}"
    except (OSError, ValueError):
        return "in another process"


def _take(path: Path, *, wait: bool) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    last_try = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_LINK | _AT_ONCE, 0o666)
        file = os.fdopen(handle, "a+", encoding="utf-8")
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if last_try:
                        raise
                    last_try = True  # perhaps `is_held` had it, which takes a lock for an instant
                    time.sleep(INSTANT)
                    file.close()
                    continue
                except OSError:
                    pass  # a drive without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.truncate(0)
                    print(os.getpid(), file=file, flush=True)
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # its holder removed the file before we had the lock: try the new file
