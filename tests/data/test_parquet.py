from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedstill.core.errors import FedstillError
from fedstill.data import load
from fedstill.data.parquet import ParquetFile, _chunks, read_json_lines
from fedstill.data.source import Reading

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Y = [0, 1] * 10


def written(path: Path, columns: dict, **how) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path, **how)
    return path


def png(grey: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), grey, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("at_once", [1, 3, 20, 50])
def test_pieces_have_as_many_rows_as_asked_for_and_hold_every_row(tmp_path: Path, at_once: int):
    file = written(tmp_path / "x.parquet", {"a": list(range(20)), "b": ["x", "y"] * 10}, row_group_size=7)
    pieces = list(ParquetFile(file).pieces(["a"], at_once))
    assert [row for piece in pieces for row in piece["a"].to_pylist()] == list(range(20))
    assert [len(piece) for piece in pieces[:-1]] == [at_once] * (len(pieces) - 1)


def test_a_word_that_stands_once_for_many_rows_is_counted_in_each(tmp_path: Path):
    words = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(2000, np.int32)), arrow.array(["x" * 500_000]))
    file = written(tmp_path / "x.parquet", {"word": words, "label": [0, 1] * 1000})
    with pytest.raises(FedstillError, match=r"would take .* of memory"), ParquetFile(file) as opened:
        opened.table()


def test_rows_of_a_few_bytes_are_counted(tmp_path: Path):
    file = written(tmp_path / "x.parquet", {"a": np.zeros(4_000_000, np.int8)})
    assert file.stat().st_size < 100_000
    with pytest.raises(FedstillError, match=r"would take 288.0 MB of memory"):
        ParquetFile(file)


def test_a_cell_names_an_image_of_the_folder_and_no_other_file(tmp_path: Path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "good.png").write_bytes(png(5))
    (tmp_path / "private.png").write_bytes(png(9))
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "private.png")

    def read(path: str):
        images = [{"bytes": None, "path": path}, {"bytes": png(1), "path": path}] * 10
        written(tmp_path / "set" / "train.parquet", {"image": images, "label": Y})
        return load(tmp_path / "set" / "train.parquet", cache_dir=tmp_path / "cache")

    assert set(read("good.png").train.x.flatten().tolist()) == {1, 5}
    outside = (
        "../private.png",
        str(tmp_path / "private.png"),
        "link.png",
        "../set/../private.png",
        "/dev/zero",
        "a\0b",
    )
    for path in outside:
        with pytest.raises(FedstillError, match="not in the data's folder"):
            read(path)


@pytest.mark.parametrize("stated", ["ab", [1, 2], ["a", "a"]])
def test_class_names_are_different_words(tmp_path: Path, stated):
    about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": stated}}}}
    table = arrow.table({"x": Y, "label": Y}).replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(FedstillError, match="the class names of column 'label'"):
        load(tmp_path / "x.parquet", cache_dir=tmp_path / "cache")


def test_a_name_of_one_line_is_an_empty_cell_of_all_others(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text("".join(f'{{"n{number}": 1}}\n' for number in range(6000)))
    with pytest.raises(FedstillError, match="write the same names in every line"):
        read_json_lines(file)
    file.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(FedstillError, match=r"line 2 of .* is no JSON object"):
        read_json_lines(file)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_the_footer_says_what_pyarrow_reads_in_it(tmp_path: Path, compression: str):
    file = written(
        tmp_path / "x.parquet", {"a": list(range(20)), "b": ["x", None] * 10}, row_group_size=7, compression=compression
    )
    metadata = parquet.read_metadata(file)
    expected = [metadata.row_group(group).column(column) for group in range(3) for column in range(2)]
    found = _chunks(file)
    assert [chunk.unpacked for chunk in found] == [chunk.total_uncompressed_size for chunk in expected]
    assert [chunk.values for chunk in found] == [chunk.num_values for chunk in expected]
    assert [chunk.start for chunk in found] == [chunk.dictionary_page_offset for chunk in expected]


def test_a_footer_whose_statistics_are_wrong_does_not_end_the_process(tmp_path: Path):
    """pyarrow 26 ends the process where a histogram has another length than the column's levels say."""
    pictures = [{"bytes": png(grey), "path": "a.png"} for grey in range(20)]
    file = written(tmp_path / "x.parquet", {"image": pictures, "label": Y})
    whole = file.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    for place in range(len(whole) - 8 - length, len(whole) - 8, 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with contextlib.suppress(FedstillError):
            ParquetFile(file)


CLASS = {"_type": "ClassLabel", "names": ["a", "b"]}


@pytest.mark.parametrize("kind", ["words", "arrays", "arrays of a task by its id", "half floats", "huge"])
def test_a_column_of_another_kind_than_its_name_or_description_says_is_read_as_what_it_is(tmp_path: Path, kind: str):
    columns = {
        "words": {"x": ["p", "q"] * 10, "label": Y},
        "arrays": {"x": [[1.0, 2.0]] * 20, "label": Y},
        "arrays of a task by its id": {"id": [[row, 1] for row in range(20)], "label": Y},
        "half floats": {"x": list(range(20)), "label": arrow.array(np.array(Y, np.float16))},
    }.get(kind, {"x": [1.7e308] * 20, "label": Y})
    table = arrow.table(columns)
    about = {"info": {"features": {"x": CLASS}}} if kind in ("words", "arrays") else {}
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / "x.parquet")
    reading = Reading(label="label", missing="mean")
    if kind == "huge":
        with pytest.raises(FedstillError, match="is not finite"):
            load(tmp_path / "x.parquet", reading, cache_dir=tmp_path / "cache")
        return
    train = load(tmp_path / "x.parquet", reading, cache_dir=tmp_path / "cache").train
    assert (tuple(train.x.shape), train.classes) == ((16, 1 if kind == "half floats" else 2), ("0", "1"))


def test_a_cell_with_a_name_that_is_too_long_for_a_file_is_an_image_that_cannot_be_read(tmp_path: Path):
    images = [{"bytes": None, "path": "9" * 400}, *({"bytes": png(grey), "path": None} for grey in range(19))]
    file = written(tmp_path / "x.parquet", {"image": images, "label": Y})
    with pytest.raises(FedstillError, match="is not a readable image"):
        load(file, cache_dir=tmp_path / "cache")
    assert len(load(file, Reading(missing="skip"), cache_dir=tmp_path / "cache").train.x) == 15
