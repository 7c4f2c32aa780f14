"""Files and folders as people have them: CSV, parquet, JSON lines, npz, class folders, Hugging Face objects."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import (
    HYPOTHESIS,
    NOT_A_NUMBER,
    fails,
    hub_folder,
    image_folder,
    pictures,
    png,
    rows_of,
    write,
    write_parquet,
)
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedstill.data import files, from_hf, load, read_unlabeled, tokenise
from fedstill.data.files import read_csv

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@HYPOTHESIS
@given(
    rows=st.lists(st.tuples(NUMBERS, st.integers(-(2**62), 2**62), NOT_A_NUMBER), min_size=2, max_size=20),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
)
def test_what_is_written_to_a_csv_is_read_back(tmp_path: Path, rows: list[tuple], delimiter: str) -> None:
    file = tmp_path / "t.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, delimiter=delimiter).writerows([("real", "whole", "word"), *rows])
    frame = read_csv(file)
    assert frame.columns["real"].astype(np.float64).tolist() == [row[0] for row in rows]
    assert frame.columns["whole"].tolist() == [row[1] for row in rows]  # exact beyond 2**53: keys may be long numbers
    assert frame.columns["word"].tolist() == [row[2] for row in rows]


CELLS = ["1", "-2", "007", "2.5", " 3 ", "1e3", "inf", "9" * 19, "9" * 25, "", "NA", "nAn", " null ", "true", " a"]


def cells_by_the_rule(cells: list[str]) -> list:
    """Read a column cell by cell: whole numbers, else numbers with gaps, else words without spaces around them."""
    with contextlib.suppress(ValueError):
        if all(abs(int(cell)) < 2**63 for cell in cells):
            return [int(cell) for cell in cells]
    words = ["" if cell.strip().lower() in ("", "na", "n/a", "nan", "null") else cell.strip() for cell in cells]
    try:
        return [float(word or "nan") for word in words]
    except ValueError:
        return words


@HYPOTHESIS
@given(cells=st.lists(st.sampled_from(CELLS), min_size=1, max_size=12), rows=st.integers(1, 5))
def test_a_column_is_whole_numbers_else_numbers_else_words(tmp_path: Path, cells: list[str], rows: int) -> None:
    file = tmp_path / "t.csv"
    file.write_text("\n".join(["key,cell", *(f"k{place},{cell}" for place, cell in enumerate(cells))]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "ROWS_AT_ONCE", rows)
        column, expected = read_csv(file).columns["cell"], cells_by_the_rule(cells)
    assert {"i": int, "f": float, "O": str}[column.dtype.kind] is type(expected[0])
    np.testing.assert_array_equal(column, np.array(expected, column.dtype))


def test_numbers_with_decimal_commas_are_numbers_where_another_sign_separates_cells(tmp_path: Path) -> None:
    text = "a;b;note\n32,1;1;4,5 mg\n-0,25;2;none\n;3;7,5\n"
    frame = read_csv(write(tmp_path / "t.csv", text))
    np.testing.assert_array_equal(frame.columns["a"], [32.1, -0.25, np.nan])
    assert frame.columns["b"].tolist() == [1, 2, 3]
    assert frame.columns["note"].tolist() == ["4,5 mg", "none", "7,5"]
    assert read_csv(write(tmp_path / "t.csv", "a,b\n1,2\n")).columns["a"].tolist() == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name every column once"),
        ("a,label\n1,5,0\n1,2\n", "row 1 (counted from 1) has 3 cells, and the first line has 2"),
        ("a,label,b\n1,0,1\n1,2\n", "row 2 (counted from 1) has 2 cells, and the first line has 3"),
        ("a,a,label\n1,2,0\n", "name every column once"),
        ("a,,label\n1,2,0\n", "name every column once"),
        ("1.5,2,0\n2.5,3,1\n", "no header"),
        ("a,label\n", "no rows"),
        ("a,label\n1,0\n\n1,2,3\n", "row 2 (counted from 1) has 3 cells"),
        ('a,label\n"open,0\n', "CSV"),
    ],
)
def test_a_malformed_csv_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    assert words in fails(load, write(tmp_path / "t.csv", text))


def test_a_csv_in_another_encoding_is_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("a,label\n\xe9,0\n".encode("latin-1"))
    assert "save it as UTF-8" in fails(load, tmp_path / "latin.csv")
    (tmp_path / "excel.csv").write_bytes("\ufefflabel;a\r\n0;1\r\n\r\n1;2\r\n0;3\r\n".encode())
    assert load(tmp_path / "excel.csv").train.classes == ("0", "1")


def test_a_folder_with_train_and_test_csv_keeps_them_apart(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.csv", "a,c,label\n1,x,0\n2,y,1\n3,x,0\n")
    write(folder / "test.csv", "a,c,label\n9,z,1\n")
    source = load(folder)
    assert source.train.x.tolist() == [[1, 1, 0, 0], [2, 0, 1, 0], [3, 1, 0, 0]]
    assert source.test.x.tolist() == [[9, 0, 0, 1]]
    write(folder / "test.csv", "a,d,label\n9,z,1\n")
    assert "'c'" in fails(load, folder)


def test_a_parquet_table_is_read_like_a_csv(tmp_path: Path) -> None:
    columns = {
        "a": [1, None, 3, 4],
        "flag": [True, False, True, True],
        "kind": [0, 1, 1, 0],
        "pair": [[1.0, 2.0]] * 4,
        "label": ["n", "y", "n", "y"],
    }
    features = {"kind": {"_type": "ClassLabel", "names": ["p", "q"]}, "label": {"_type": "Value", "dtype": "string"}}
    write_parquet(tmp_path / "t.parquet", columns, features)
    assert "row 2 " in fails(load, tmp_path / "t.parquet", label="label")
    source = load(tmp_path / "t.parquet", label="label", inputs=["flag", "kind", "pair"])
    x, names = rows_of(source)
    assert sorted([*row, name] for row, name in zip(x.tolist(), names, strict=True)) == sorted(
        [[1, 1, 0, 1, 2, "n"], [0, 0, 1, 1, 2, "y"], [1, 0, 1, 1, 2, "n"], [1, 1, 0, 1, 2, "y"]]
    )


def test_json_lines_are_read_like_a_csv(tmp_path: Path) -> None:
    rows = [
        {"id": f"{i:02d}", "size": i / 3, "colour": "red" if i % 3 else "blue", "label": "ab"[i % 2]} for i in range(20)
    ]
    write(tmp_path / "t.jsonl", "\n".join(json.dumps(row) for row in rows))
    source = load(tmp_path / "t.jsonl", inputs=["size", "colour"])
    x, names = rows_of(source)
    for (size, blue, red), name in zip(x.tolist(), names, strict=True):
        i = round(size * 3)
        assert (size, blue, red) == (np.float32(i / 3), i % 3 == 0, i % 3 != 0)
        assert name == "ab"[i % 2]
    assert read_unlabeled(tmp_path / "t.jsonl", source).ids == tuple(f"{i:02d}" for i in range(20))
    del rows[2]["size"]
    write(tmp_path / "t.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert "column 'size' of t has no value in row 3" in fails(load, tmp_path / "t.jsonl", inputs=["size"])
    write(tmp_path / "t.jsonl", '{"a": 1,')
    assert "t.jsonl' is not readable JSON lines" in fails(load, tmp_path / "t.jsonl")


def test_a_table_without_rows_is_refused_in_one_line_and_an_empty_file_beside_others_is_not(tmp_path: Path) -> None:
    full = pa.table({"a": range(8), "label": [0, 1] * 4})
    pq.write_table(full[:0], tmp_path / "t.parquet")
    assert "t has no rows" in fails(load, tmp_path / "t.parquet")
    assert "t has no rows" in fails(load, tmp_path / "t.parquet", inputs=["a"], window=3)
    days = pa.table({"day": [datetime.date(2024, 1, 1)]})
    pq.write_table(days, tmp_path / "days.parquet")
    assert "days has no column of numbers, words or images" in fails(load, tmp_path / "days.parquet")
    (tmp_path / "set").mkdir()
    for shard, part in enumerate((full[:5], full[:0], full[5:])):
        pq.write_table(part, tmp_path / "set" / f"train-{shard:05d}-of-00003.parquet")
    pq.write_table(full[:0], tmp_path / "set" / "test.parquet")
    source = load(tmp_path / "set")
    assert sorted(rows_of(source)[0].flatten().tolist()) == list(range(8))
    assert any("has no labelled test split" in note for note in source.notes)


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("prefix", ["train", "train_subset"])
def test_hub_layout_parquet_gives_pixels_labels_and_class_names(tmp_path: Path, prefix: str) -> None:
    pixels, labels = hub_folder(tmp_path / "pets", prefix=prefix)
    source = load(tmp_path / "pets")
    assert np.array_equal(source.train.x, channels_first(pixels[:7]))
    assert np.array_equal(source.test.x, channels_first(pixels[7:]))
    assert source.train.y.tolist() == labels[:7].tolist()
    assert source.test.y.tolist() == labels[7:].tolist()
    assert source.train.classes == ("cat", "dog", "owl")
    assert source.train.name == "pets"
    assert source.notes == ()


def test_parquet_in_the_only_sub_folder_is_found(tmp_path: Path) -> None:
    hub_folder(tmp_path / "pets" / "plain_text")
    assert len(load(str(tmp_path / "pets")).train.y) == 7
    hub_folder(tmp_path / "pets" / "second")
    assert "plain_text, second" in fails(load, tmp_path / "pets")


def test_missing_shards_are_noted(tmp_path: Path) -> None:
    hub_folder(tmp_path / "pets")
    (tmp_path / "pets" / "train-00001-of-00002.parquet").unlink()
    source = load(tmp_path / "pets")
    assert len(source.train.y) == 4
    assert any("1 of 2 files" in note for note in source.notes)


def test_image_folder_with_class_folders(tmp_path: Path) -> None:
    written = image_folder(tmp_path / "zoo", {"owl": 5, "cat": 10, "10": 5})
    (tmp_path / "zoo" / "readme.txt").write_text("not an image")
    source = load(tmp_path / "zoo")
    assert source.train.classes == ("10", "cat", "owl")
    assert (len(source.train.y), len(source.test.y)) == (16, 4)
    for x, y in zip(source.train.x, source.train.y, strict=True):
        assert any(np.array_equal(x, p.transpose(2, 0, 1)) for p in written[source.train.classes[y]])


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_image_folder_with_splits_keeps_them_apart(tmp_path: Path, held_out: str) -> None:
    layout = {"train/cat": 3, "train/owl": 2, f"{held_out}/owl": 1, f"{held_out}/cat": 1}
    written = image_folder(tmp_path / "zoo", layout, channels=1)
    source = load(tmp_path / "zoo")
    assert source.train.classes == ("cat", "owl")
    expected = np.concatenate([written["train/cat"], written["train/owl"]])[:, None]
    assert np.array_equal(source.train.x, expected)
    assert source.test.y.tolist() == [0, 1]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    image_folder(tmp_path / "vehicles", {"train": 5, "tram": 5})
    assert load(tmp_path / "vehicles").train.classes == ("train", "tram")


def test_numbered_class_folders_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    image_folder(tmp_path / "zoo", {str(i): 2 for i in range(11)})
    assert load(tmp_path / "zoo").train.classes == tuple(str(i) for i in range(11))


def test_the_name_of_a_table_in_a_folder_is_a_key_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "clinics").mkdir()
    for name, rows in {"north": 10, "south": 20}.items():
        lines = [f"{row},{row % 2}" for row in range(rows)]
        write(tmp_path / "clinics" / f"{name}.csv", "\n".join(["age,label", *lines]))
    source = load(tmp_path / "clinics", keys=["file"], held_out=0.0)
    assert source.keys["file"].tolist() == ["north"] * 10 + ["south"] * 20
    assert source.train.x.shape == (30, 1)
    assert not load(tmp_path / "clinics").keys


def test_a_column_called_file_keeps_its_cells(tmp_path: Path) -> None:
    (tmp_path / "clinics").mkdir()
    lines = ["age,file,label", *(f"{row},of {row},{row % 2}" for row in range(6))]
    for name in ("north", "south"):
        write(tmp_path / "clinics" / f"{name}.csv", "\n".join(lines))
    source = load(tmp_path / "clinics", keys=["file"], held_out=0.0)
    assert source.keys["file"].tolist() == [f"of {i}" for i in range(6)] * 2


def test_levels_of_folders_are_columns(tmp_path: Path) -> None:
    counts = {"north/ill": 3, "north/well": 4, "south/ill": 5, "south/well": 6}
    image_folder(tmp_path / "a", counts)
    image_folder(tmp_path / "b", {f"{split}/{folder}": 2 for split in ("train", "test") for folder in counts})
    by_owner = load(tmp_path / "a", label="folder2", keys=["folder1"])
    owned = Counter(zip(by_owner.keys["folder1"], [by_owner.train.classes[y] for y in by_owner.train.y], strict=True))
    assert by_owner.train.classes == ("ill", "well")
    assert all(owned[(owner, name)] <= counts[f"{owner}/{name}"] for owner, name in owned)
    assert sum(owned.values()) == len(by_owner.train.y)
    assert load(tmp_path / "a").train.classes == ("north", "south")  # the first level, if nobody says otherwise
    split = load(tmp_path / "b", label="folder2")
    assert sorted(split.keys["folder1"]) == ["north"] * 4 + ["south"] * 4
    assert len(split.test.y) == 8
    assert "has no key column 'folder3'; did you mean 'folder" in fails(load, tmp_path / "a", keys=["folder3"])


def test_a_level_that_some_files_do_not_have_is_no_column(tmp_path: Path) -> None:
    image_folder(tmp_path / "zoo", {"cat": 5, "dog/big": 5})
    assert set(load(tmp_path / "zoo").keys) == {"folder1"}


def test_images_without_class_folder_have_no_label(tmp_path: Path) -> None:
    image_folder(tmp_path / "zoo", {"a": 2})
    (tmp_path / "zoo" / "stray.png").write_bytes(png(pictures(1)[0]))
    assert "stray.png" in fails(load, tmp_path / "zoo")


@pytest.mark.parametrize(
    "names",
    [("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels")],
)
def test_npz_in_the_layouts_of_keras_and_medmnist(tmp_path: Path, names: tuple[str, ...]) -> None:
    pixels = pictures(8)
    arrays = (pixels[:6], np.array([[3], [5], [3], [5], [5], [3]]), pixels[6:], np.array([[5], [3]]))
    np.savez(tmp_path / "set.npz", **dict(zip(names, arrays, strict=True)))
    source = load(tmp_path / "set.npz")
    assert np.array_equal(source.train.x, channels_first(pixels[:6]))
    assert source.train.classes == ("3", "5")
    assert source.train.y.tolist() == [0, 1, 0, 1, 1, 0]
    assert source.test.y.tolist() == [1, 0]


def test_npz_with_other_names_says_what_is_expected(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", data=np.zeros((3, 2)))
    text = fails(load, tmp_path / "set.npz")
    assert "data" in text
    assert "x_train,y_train" in text
    (tmp_path / "bad.npz").write_bytes(b"not a zip")
    assert "bad.npz" in fails(load, tmp_path / "bad.npz")


def test_unreadable_parquet_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").symlink_to(tmp_path / "gone.parquet")
    assert "cannot read" in fails(load, tmp_path / "set")
    assert "cannot read" in fails(load, "x" * 5000)
    assert "empty" in fails(load, " ")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 nonsense")
    assert "not readable parquet" in fails(load, tmp_path / "train.parquet")


def test_hugging_face_objects_equal_the_folder_they_would_be(tmp_path: Path) -> None:
    import datasets

    pixels, labels = hub_folder(tmp_path / "pets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])})

    def split(rows: slice) -> datasets.Dataset:
        columns = {"img": [Image.fromarray(p) for p in pixels[rows]], "label": labels[rows].tolist()}
        return datasets.Dataset.from_dict(columns, features=features)

    folder = load(tmp_path / "pets")
    both = from_hf(datasets.DatasetDict({"train": split(slice(0, 7)), "test": split(slice(7, 9))}))
    assert torch.equal(both.train.x, folder.train.x)
    assert torch.equal(both.test.y, folder.test.y)
    assert both.train.classes == folder.train.classes
    chosen = split(slice(0, 9)).select([8, 1, 3, 5, 6])
    alone = from_hf(chosen)
    seen = {x.numpy().tobytes() for x in torch.cat([alone.train.x, alone.test.x])}
    assert seen == {channels_first(pixels)[i].tobytes() for i in (8, 1, 3, 5, 6)}


def test_hugging_face_images_that_are_paths(tmp_path: Path) -> None:
    import datasets

    written = image_folder(tmp_path / "zoo", {"a": 5})["a"]
    rows = {"image": [str(tmp_path / "zoo" / "a" / f"{i}.png") for i in range(5)], "label": [0, 1, 0, 1, 0]}
    source = from_hf(datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()))
    seen = {x.numpy().tobytes() for x in torch.cat([source.train.x, source.test.x])}
    assert seen == {image.tobytes() for image in channels_first(written)}


def test_hugging_face_vectors_arrays_and_words() -> None:
    import datasets

    vectors = datasets.Dataset.from_dict({"v": [[float(i), 1.0] for i in range(10)], "label": ["a", "b"] * 5})
    source = from_hf(vectors)
    assert source.train.x.shape == (8, 2)
    assert source.train.classes == ("a", "b")
    shape = datasets.Array2D(shape=(3, 2), dtype="uint8")
    arrays = datasets.Dataset.from_dict(
        {"pixels": [[[i, 0], [1, 2], [3, 4]] for i in range(10)], "label": [0, 1] * 5},
        features=datasets.Features({"pixels": shape, "label": datasets.Value("int64")}),
    )
    source = from_hf(arrays)
    assert source.train.x.shape == (8, 1, 3, 2)
    assert source.train.x.dtype == torch.uint8
    assert sorted(torch.cat([source.train.x, source.test.x])[:, 0, 0, 0].tolist()) == list(range(10))
    assert "DatasetDict" in fails(from_hf, [1, 2, 3])


def test_a_mistyped_number_with_a_decimal_comma_is_named_as_one_with_a_point(tmp_path: Path) -> None:
    for mark, separator in ((",", ";"), (".", ",")):
        cells = [f"{row}{mark}5" for row in range(20)]
        cells[7] = "?"
        lines = [f"{cell}{separator}{row % 2}" for row, cell in enumerate(cells)]
        file = write(tmp_path / "t.csv", "\n".join([f"glucose{separator}label", *lines]))
        assert "column 'glucose' of t must hold numbers but holds '?' in row 8" in fails(load, file)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_words_in_one_table_of_a_folder_are_words_in_all(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "clinics"
    folder.mkdir()
    wards = {"north": ["01", "x2"], "south": ["01", "02"]}  # in the south alone they would be the numbers 1 and 2
    for name, cells in wards.items():
        rows = [(cells[row % 2], row, row % 2) for row in range(10)]
        if suffix == "csv":
            write(folder / f"{name}.csv", "\n".join(["ward,age,label", *(f"{w},{a},{y}" for w, a, y in rows)]))
        else:
            coded = [w if name == "north" else int(w) for w, _, _ in rows]
            lines = [json.dumps({"ward": w, "age": a, "label": y}) for w, (_, a, y) in zip(coded, rows, strict=True)]
            write(folder / f"{name}.jsonl", "\n".join(lines))
    (ward, age) = load(folder).train.columns
    assert ward.words == (("01", "02", "x2") if suffix == "csv" else ("01", "1", "2", "x2"))
    assert age.words == ()


def test_the_folder_of_a_run_among_the_data_is_not_read(tmp_path: Path) -> None:
    image_folder(tmp_path / "zoo", {"cat": 5, "owl": 5})
    (tmp_path / "zoo" / "run").mkdir()
    for name in ("config.toml", "metrics.jsonl", "curves.png"):
        (tmp_path / "zoo" / "run" / name).write_bytes(b"?")
    source = load(tmp_path / "zoo")
    assert source.train.classes == ("cat", "owl")
    assert len(source.train.y) + len(source.test.y) == 10


def test_a_table_needs_pandas_and_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    told = fails(load, write(tmp_path / "t.csv", "a,label\n1,0\n2,1\n"))
    assert told == "pandas is not installed; run: pip install 'fedstill[data]'"


def test_a_csv_read_in_parts_is_the_table_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["1,1,,6", "2,2.5,b,6", "3,na,b,7", "4,4,01,7", "5,5,a,7", "6,1,b,z"]  # 'late' begins as numbers
    file = write(tmp_path / "t.csv", "\n".join(["whole,number,w,late", *rows]))
    whole = read_csv(file).columns
    monkeypatch.setattr(files, "ROWS_AT_ONCE", 2)
    parts = read_csv(file).columns
    assert [column.dtype for column in parts.values()] == [column.dtype for column in whole.values()]
    for name, column in whole.items():
        np.testing.assert_array_equal(parts[name], column)
    assert whole["late"].tolist() == ["6", "6", "7", "7", "7", "z"]


def test_texts_in_class_folders_are_whole_files_for_the_task_and_for_new_data(tmp_path: Path) -> None:
    for number in range(10):
        for word in ("good", "bad"):
            (tmp_path / "task" / word).mkdir(parents=True, exist_ok=True)
            write(tmp_path / "task" / word / f"{number}.txt", f"{word} day\nnumber {number}")
    write(tmp_path / "task" / "README.txt", "about these texts")
    (tmp_path / "task" / "bad" / "broken.txt").write_bytes(b"\xff\xfe\xff")
    assert "broken.txt' is not UTF-8 text" in fails(load, tmp_path / "task", text=True)
    source = load(tmp_path / "task", text=True, missing="skip")
    assert source.train.classes == ("bad", "good")
    assert set(source.texts) == {f"{word} day number {number}" for number in range(10) for word in ("good", "bad")}
    assert any(note.startswith("1 of 21 rows are left out") for note in source.notes)
    task, _ = tokenise(source, length=8, vocabulary=100, cache_dir=tmp_path / "cache")
    (tmp_path / "new" / "deep").mkdir(parents=True)
    write(tmp_path / "new" / "deep" / "a.txt", "good day\nnumber 1")
    write(tmp_path / "new" / "b.txt", "bad day")
    assert read_unlabeled(tmp_path / "new", task).ids == ("b.txt", "deep/a.txt")
