"""A file is replaced whole or not at all, and leaves nothing beside it."""

import pytest

from fedstill.storage.files import is_held, lock, write_whole, writing


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
