"""A source comes from the cache as it was decoded, until its files or its options change."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import hub_folder, pictures, png, write_parquet

from fedstill.data import Source, files, load
from fedstill.data.source import InputColumn

LOADERS = sys.modules["fedstill.data.load"]  # `fedstill.data.load` is the function


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of sources that were decoded, in order."""
    done: list[str] = []
    assemble = LOADERS.assemble

    def counting(*args, **options) -> Source:
        done.append(options["name"])
        return assemble(*args, **options)

    monkeypatch.setattr(LOADERS, "assemble", counting)
    return done


def same(a: Source, b: Source) -> bool:
    tensors = all(
        torch.equal(p, q) and p.dtype == q.dtype
        for p, q in ((a.train.x, b.train.x), (a.train.y, b.train.y), (a.test.x, b.test.x), (a.test.y, b.test.y))
    )
    keys = set(a.keys) == set(b.keys) and all(np.array_equal(a.keys[k], b.keys[k]) for k in a.keys)
    rows = set(a.rows) == set(b.rows) and all(np.array_equal(a.rows[k], b.rows[k]) for k in a.rows)
    facts = [
        (s.train.name, s.train.classes, s.train.mean, s.train.std, s.notes, s.origin, s.columns, s.skipped)
        for s in (a, b)
    ]
    return tensors and keys and rows and facts[0] == facts[1]


def test_the_second_load_is_the_first_without_decoding(tmp_path: Path, decodings: list[str]) -> None:
    columns = {"image": [png(p) for p in pictures(10)], "label": [0, 1] * 5, "writer": [f"w{i}é" for i in range(10)]}
    write_parquet(tmp_path / "notes.parquet", columns)
    first, second = load(tmp_path / "notes.parquet"), load(tmp_path / "notes.parquet")
    assert len(decodings) == 1
    assert same(first, second)
    assert list(second.keys) == ["writer"]
    second.train.x[0] = 0  # a copy: the stored bytes stay
    assert same(first, load(tmp_path / "notes.parquet"))
    assert len(decodings) == 1


def test_columns_words_and_row_numbers_come_back_from_the_cache(tmp_path: Path, decodings: list[str]) -> None:
    (tmp_path / "t.csv").write_text("colour,size,kind\n" + "".join(f"{'rgb'[i % 3]},{i},{i % 2}\n" for i in range(10)))
    first, second = (load(tmp_path / "t.csv", label="kind") for _ in range(2))
    assert len(decodings) == 1
    assert same(first, second)
    assert second.columns == (InputColumn("colour", 3, ("b", "g", "r")), InputColumn("size", 1))
    assert sorted([*second.rows["train"], *second.rows["test"]]) == list(range(10))


def test_other_source_files_are_decoded_again(tmp_path: Path, decodings: list[str]) -> None:
    folder = tmp_path / "pets"
    hub_folder(folder)
    load(folder)
    shard = folder / "train-00001-of-00002.parquet"
    os.utime(shard, ns=(1, 1))
    load(folder)
    assert len(decodings) == 2
    shard.unlink()
    assert len(load(folder).train.y) == 4
    assert len(decodings) == 3


def test_a_file_written_again_under_its_old_size_and_date_is_decoded_again(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,y\n" + "1,0\n2,1\n" * 5)
    assert load(file).train.x.max() == 2
    date = file.stat().st_mtime_ns
    file.write_text("a,y\n" + "1,0\n7,1\n" * 5)
    os.utime(file, ns=(date, date))
    assert load(file).train.x.max() == 7


def test_options_have_entries_of_their_own(tmp_path: Path, decodings: list[str]) -> None:
    hub_folder(tmp_path / "pets")
    assert load(tmp_path / "pets").train.x.shape[2:] == (5, 4)
    assert load(tmp_path / "pets", size=2).train.x.shape[2:] == (2, 2)
    assert load(tmp_path / "pets").train.x.shape[2:] == (5, 4)
    assert len(decodings) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub_folder(tmp_path / "pets")
    (tmp_path / "file").write_text("")
    source = load(tmp_path / "pets", cache_dir=tmp_path / "file" / "cache")
    assert len(source.train.y) == 7
    assert "not kept for other runs" in caplog.text


def test_reading_is_not_even_tried_on_the_second_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_folder(tmp_path / "pets")
    load(tmp_path / "pets")

    def read_again(*_: object) -> None:
        raise AssertionError("the parquet file was read again")

    monkeypatch.setattr(files, "_read_table", read_again)
    load(tmp_path / "pets")
