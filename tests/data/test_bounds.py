from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedstill.core.errors import FedstillError
from fedstill.data import bounds, load


def image(path: Path, grey: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), grey, np.uint8)).save(path)
    return path


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for place in range(4):
        image(tmp_path / "set" / "ab"[place % 2] / f"{place}.png", place)
    return tmp_path / "set"


def test_a_small_file_may_become_the_floor_and_a_larger_one_its_multiple():
    bounds.check_size(bounds.FLOOR, 10, "'x'", "cure")
    bounds.check_size(bounds.RATIO * 10 * bounds.FLOOR, 10 * bounds.FLOOR, "'x'", "cure")
    with pytest.raises(FedstillError, match=r"^data.source: 'x' would take 14.8 GB of memory, .*300 bytes.*: cure$"):
        bounds.check_size(14.8e9, 300, "'x'", "cure")


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_followed(classes: Path, tmp_path: Path):
    (classes / "a" / "inside.png").symlink_to(classes / "b" / "1.png")
    assert len(load(classes, cache_dir=tmp_path / "cache").train.x) == 4
    (classes / "a" / "outside.png").symlink_to(image(tmp_path / "private.png"))
    with pytest.raises(FedstillError, match=r"outside.png' is a link to a place outside of the data's folder"):
        load(classes, cache_dir=tmp_path / "cache")


def test_a_pipe_is_refused_and_not_waited_for(classes: Path, tmp_path: Path):
    os.mkfifo(classes / "a" / "pipe.png")
    with pytest.raises(FedstillError, match="is a pipe or a device"):
        load(classes, cache_dir=tmp_path / "cache")


def test_a_snapshot_of_the_hub_is_links_into_the_folder_of_its_dataset(tmp_path: Path):
    blob = image(tmp_path / "datasets--me--set" / "blobs" / "0a1b.png")
    snapshot = tmp_path / "datasets--me--set" / "snapshots" / "77"
    snapshot.mkdir(parents=True)
    (snapshot / "x.png").symlink_to(blob)
    assert bounds.is_inside(snapshot / "x.png", snapshot)
    assert not bounds.is_inside(image(tmp_path / "other.png"), snapshot)


def test_a_line_without_an_end_is_found_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "LONGEST_LINE", 100)
    monkeypatch.setattr(bounds, "BLOCK", 16)
    file = tmp_path / "x.csv"
    file.write_bytes((b"a" * 90 + b"\n") * 9)
    bounds.check_lines(file)
    file.write_bytes(b"a" * 90 + b"\n" + b"a" * 130)
    with pytest.raises(FedstillError, match="has a line of more than 100 bytes"):
        bounds.check_lines(file)


def test_too_many_columns_are_refused():
    bounds.check_columns(bounds.MOST_COLUMNS, "'x'")
    with pytest.raises(FedstillError, match="100,001 columns"):
        bounds.check_columns(bounds.MOST_COLUMNS + 1, "'x'")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (EOFError(), "'x' is not npz .EOFError."),
        (MemoryError(), "does not fit into the memory"),
        (KeyError("a\nb"), "npz"),
    ],
)
def test_every_failure_of_a_reader_is_one_line(error, line):
    with pytest.raises(FedstillError, match=line) as caught, bounds.readable("x", "npz"):
        raise error
    assert len(str(caught.value).splitlines()) == 1


def test_the_reason_of_the_system_stays():
    with pytest.raises(PermissionError), bounds.readable("x", "npz"):
        raise PermissionError(13, "denied")
