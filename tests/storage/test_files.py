"""A file is replaced whole or not at all, and leaves nothing beside it."""

import errno
import os
import socket
import struct
from pathlib import Path

import pytest

from fedstill.core.errors import FedstillError
from fedstill.storage.files import (
    MOST_OF_A_LIST,
    RUNNING_FILE,
    appending,
    is_held,
    lock,
    open_zip,
    read_bytes,
    working_in,
    write_whole,
    writing,
)


def test_text_and_bytes_replace_the_old_content_and_make_the_folder(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, "long old content")
    write_whole(path, "é")
    assert path.read_bytes() == "é".encode()
    write_whole(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_until_the_end_the_old_content_is_read_and_after_an_error_it_stays(tmp_path, durable):
    path = tmp_path / "file"
    write_whole(path, "old")

    def write_and_fail():
        with writing(path, durable=durable) as file:
            file.write(b"half")
            file.flush()
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_while_its_block_runs_and_a_file_that_a_killed_process_left_is_not(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    with lock(path, wait=False):
        assert is_held(path)
    assert not is_held(path)
    path.write_text("12345\n")
    assert not is_held(path)
    assert path.read_text() == "12345\n"


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"12345")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            read_bytes(path)
    with pytest.raises(OSError, match="5 bytes, and at most 4 are read"):
        read_bytes(tmp_path / "long", most=4)
    assert read_bytes(tmp_path / "long", most=5) == b"12345"


@pytest.mark.parametrize(
    "write", [lambda path: appending(path).close(), lambda path: lock(path, wait=False).__enter__()]
)
def test_nothing_is_opened_through_a_link(tmp_path, write):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        write(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "link").read_text() == "new"


def test_a_list_of_parts_that_would_fill_the_memory_is_not_read(tmp_path):
    path = tmp_path / "bomb.zip"
    with path.open("wb") as file:  # the end of a zip file says that all before it is the list
        file.seek(MOST_OF_A_LIST + 1)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, MOST_OF_A_LIST + 1, 0, 0))
    with path.open("rb") as file, pytest.raises(ValueError, match="at most 16,777,216"):
        open_zip(file)


def test_the_thread_that_works_in_a_folder_may_enter_it_again(tmp_path):
    with working_in(tmp_path / "new"), working_in(tmp_path / "new"):
        assert is_held(tmp_path / "new" / RUNNING_FILE)
    assert not (tmp_path / "new").exists()
    with pytest.raises(FedstillError, match="No space left"), working_in(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_neither_a_pipe_nor_a_socket_is_replaced_by_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name in ("pipe", "socket"):
            before = os.lstat(name)
            with pytest.raises(OSError, match="no regular file"):
                write_whole(Path(name), "x")
            assert os.path.samestat(before, os.lstat(name))
    assert sorted(os.listdir()) == ["pipe", "socket"]
