"""Tables: CSV parsing, label numbering, one-hot words, and the one-line refusals."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import HYPOTHESIS, fails, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data import from_csv, load, read_unlabeled, stratified_holdout
from fedstill.data.files import read_csv
from fedstill.data.tables import encode_labels

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp")), min_size=1, max_size=6)
NOT_A_NUMBER = WORDS.filter(lambda word: not any(c.isdigit() for c in word)).filter(
    lambda word: word.strip().lower() not in {"na", "n/a", "nan", "null", "inf", "+inf", "-inf", "infinity"}
)
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False, width=32)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(source) -> tuple[torch.Tensor, list[str]]:
    """All inputs and the class name of each, train then test."""
    names = [source.train.classes[y] for y in torch.cat([source.train.y, source.test.y])]
    return torch.cat([source.train.x, source.test.x]), names


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


@HYPOTHESIS
@given(st.lists(NOT_A_NUMBER, min_size=1, max_size=10), st.lists(NOT_A_NUMBER, max_size=10))
def test_labels_of_words_can_be_read_back(train: list[str], test: list[str]) -> None:
    y, classes = encode_labels(np.array(train + test, dtype=object), None, "label", "a set")
    assert [classes[label] for label in y] == train + test
    assert set(classes) == {*train, *test}


@HYPOTHESIS
@given(
    st.lists(st.integers(-5, 12), min_size=1, max_size=30),
    st.sampled_from([np.int64, np.int16, np.float32, np.float64, str]),
)
def test_labels_of_whole_numbers_are_numbered_by_size(values: list[int], kind: type) -> None:
    column = np.array([str(v) for v in values], dtype=object) if kind is str else np.array(values, dtype=kind)
    y, classes = encode_labels(column, None, "label", "a set")
    assert [int(classes[i]) for i in y] == values
    assert [int(c) for c in classes] == sorted(set(values))


def test_labels_that_are_no_classes_are_refused() -> None:
    assert "fractions" in fails(encode_labels, np.array([0.5, 1.0]), None, "price", "houses")
    assert "differs in every row" in fails(encode_labels, np.arange(100), None, "id", "houses")
    assert "no value in row 2" in fails(encode_labels, np.array([1.0, np.nan]), None, "y", "houses")
    assert "outside 0..1" in fails(encode_labels, np.array([0, 2]), ("a", "b"), "y", "houses")


def test_a_csv_gives_numbers_as_they_are_and_words_one_hot(tmp_path: Path) -> None:
    lines = [f"{i},{i / 4},{'red' if i % 3 else 'blue'},{'yes' if i % 2 else 'no'}" for i in range(20)]
    file = write(tmp_path / "t.csv", "\n".join(["count, share ,colour,label", *lines]))
    source = load(file)
    x, names = rows_of(source)
    assert source.train.classes == ("no", "yes")
    assert x.shape == (20, 4)
    for row, name in zip(x, names, strict=True):
        i = int(row[0])
        blue = 0.0 if i % 3 else 1.0
        assert row.tolist() == [i, i / 4, blue, 1.0 - blue]  # words in alphabetical order
        assert name == ("yes" if i % 2 else "no")
    assert torch.equal(from_csv(file).train.x, source.train.x)


def test_columns_can_be_chosen_and_kept_as_keys(tmp_path: Path) -> None:
    lines = [f"{i},user{i % 4},{i % 2},{i}" for i in range(20)]
    file = write(tmp_path / "t.csv", "\n".join(["a,user,grade,b", *lines]))
    source = from_csv(file, label="grade", keys=["user"])
    assert source.train.x.shape[1] == 2
    assert source.keys["user"].tolist() == [f"user{int(a) % 4}" for a in source.train.x[:, 0]]
    assert from_csv(file, label="grade", inputs=["b"]).train.x.shape[1] == 1
    assert "did you mean 'user'?" in fails(from_csv, file, label="grade", keys=["usr"])
    assert "data.inputs" in fails(from_csv, file, label="grade", inputs=["c"])


def test_a_csv_without_an_obvious_label_lists_the_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", "a,b,c\n1,2,3\n4,5,6\n")
    text = fails(load, file)
    assert text.startswith("data.label:")
    assert "a, b, c" in text


def test_missing_values_name_the_column_and_the_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", "age,town,label\n1,x,0\n,x,1\n3,NA,0\n4,x,1\nnan,x,0\n6,x,1\n")
    text = fails(load, file)
    assert "'age'" in text
    assert "row 2, 5 " in text
    assert "'town'" in fails(load, file, inputs=["town"])
    assert len(load(file, inputs=["label"], label="label").train.y) > 0  # columns that are not used may have holes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name every column once"),
        ("a,a,label\n1,2,0\n", "name every column once"),
        ("a,,label\n1,2,0\n", "name every column once"),
        ("1.5,2,0\n2.5,3,1\n", "no header"),
        ("a,label\n", "no rows"),
        ("a,label\n1,0\n1,2,3\n", "line 3"),
        ('a,label\n"open,0\n', "CSV"),
    ],
)
def test_a_malformed_csv_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    assert words in fails(load, write(tmp_path / "t.csv", text))


def test_a_csv_in_another_encoding_is_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("a,label\n\xe9,0\n".encode("latin-1"))
    assert "UTF-8" in fails(load, tmp_path / "latin.csv")
    (tmp_path / "excel.csv").write_bytes("\ufefflabel;a\r\n0;1\r\n\r\n1;2\r\n0;3\r\n".encode())
    assert load(tmp_path / "excel.csv").train.classes == ("0", "1")


def test_too_many_words_are_not_turned_into_columns(tmp_path: Path) -> None:
    lines = [f"name{i},{i % 2}" for i in range(150)]
    text = fails(load, write(tmp_path / "t.csv", "\n".join(["name,label", *lines])))
    assert "150 different words" in text
    assert ": to read it as text set data.tokens, else leave it out with data.inputs" in text
    assert "data.keys" in text


def test_numbers_too_large_for_float32_are_refused(tmp_path: Path) -> None:
    assert "not finite in row 2" in fails(load, write(tmp_path / "t.csv", "a,label\n1,0\n1e200,1\n3,0\n"))


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


@HYPOTHESIS
@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.floats(0.05, 0.95), st.integers(0, 3))
def test_a_held_out_part_is_disjoint_complete_and_stratified(labels: list[int], share: float, seed: int) -> None:
    y = np.array(labels)
    kept, held = stratified_holdout(y, share, seed=seed)
    assert sorted([*kept, *held]) == list(range(len(y)))
    assert len(held) == min(max(1, round(share * len(y))), len(y) - 1)
    for label in set(labels):
        wanted = len(held) / len(y) * (y == label).sum()
        assert abs((y[held] == label).sum() - wanted) <= 1 + 1e-9
    again = stratified_holdout(y, share, seed=seed)
    assert np.array_equal(kept, again[0])


def test_rare_classes_stay_in_the_train_part() -> None:
    y = np.array([0] * 10 + [1, 2, 3, 4, 5])  # shares of three rows: 2, and five times 0.2
    kept, held = stratified_holdout(y, 0.2)
    assert y[held].tolist() == [0, 0, 0]
    assert set(y[kept]) == set(range(6))


def test_a_part_cannot_be_held_out_of_one_row() -> None:
    assert "give a test split" in fails(stratified_holdout, np.array([0]), 0.2)
    assert "give a test split" in fails(stratified_holdout, np.array([0, 1]), 1.5)
