"""Single bad cells: a word among numbers, a row that nobody owns; errors name them, and codes stay words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_files import fails, pictures, png, write_parquet

from fedstill.data import Source, from_csv, load, owners, read_unlabeled, split_unlabeled
from fedstill.partition import PARTITIONS

AGES = [str(20 + i % 57) for i in range(200)]


def table(path: Path, name: str, cells: list[str]) -> Path:
    lines = [f'"{cell}",{row % 7},{"ab"[row % 2]}' for row, cell in enumerate(cells)]
    path.write_text("\n".join([f"{name},other,kind", *lines]), encoding="utf-8")
    return path


def with_cells(cells: list[str], changed: dict[int, str]) -> list[str]:
    """The cells with others in some rows, counted from 1."""
    return [changed.get(row, cell) for row, cell in enumerate(cells, 1)]


@pytest.mark.parametrize(
    ("cells", "changed", "told"),
    [
        (AGES, {17: "5,2"}, "must hold numbers but holds '5,2' in row 17 (counted from 1);"),
        (AGES, {17: "5,2", 30: "?", 31: "?"}, "'5,2' in row 17, 30, 31 (counted from 1);"),
        (AGES, dict.fromkeys(range(1, 21), "unknown"), "'unknown' in row 1, 2, 3, 4, 5 and 15 more (counted from 1)"),
        ([str(i / 8) for i in range(150)], {4: "high"}, "'high' in row 4"),  # too many values for one-hot words
        (["1"] * 11, {3: "see\nbelow " + "and on " * 40}, "'see below and on"),  # one short line
    ],
)
def test_a_word_among_numbers_is_refused_by_its_row(
    tmp_path: Path, cells: list[str], changed: dict[int, str], told: str
) -> None:
    text = fails(load, table(tmp_path / "t.csv", "chol", with_cells(cells, changed)), label="kind")
    assert text.startswith("data.inputs: column 'chol' of t must hold numbers")
    assert told in text
    assert "correct such cells or drop their rows, or leave the column out with data.inputs" in text
    assert len(text) < 350


def test_a_word_among_numbers_may_stand_in_a_column_that_is_not_learnt_from(tmp_path: Path) -> None:
    file = table(tmp_path / "t.csv", "chol", with_cells(AGES, {17: "5,2"}))
    assert load(file, label="kind", inputs=["other"]).train.x.shape[1] == 1
    assert load(file, label="kind", keys=["chol"]).train.x.shape[1] == 1


def test_a_word_in_the_test_split_alone_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    table(tmp_path / "set" / "train.csv", "age", AGES)
    table(tmp_path / "set" / "test.csv", "age", with_cells(AGES[:20], {3: "old"}))
    assert "holds 'old' in row 203 (counted from 1)" in fails(load, tmp_path / "set", label="kind")


@pytest.mark.parametrize("cells", [["1", "2", "A", "B"] * 10, ["1"] * 8 + ["A"], ["01", "02", "K1"] * 5])
def test_codes_stay_words(tmp_path: Path, cells: list[str]) -> None:
    source = from_csv(table(tmp_path / "t.csv", "stage", cells), label="kind")
    assert source.columns[0].words == tuple(sorted(set(cells)))


def test_words_that_a_file_declares_are_words_whatever_they_look_like(tmp_path: Path) -> None:
    features = {"grade": {"_type": "ClassLabel", "names": ["1", "2", "A"]}}
    grades = [0, 1] * 20 + [2]
    write_parquet(tmp_path / "t.parquet", {"grade": grades, "kind": ["x", "y"] * 20 + ["x"]}, features)
    assert load(tmp_path / "t.parquet", label="kind").columns[0].words == ("1", "2", "A")


def test_a_bad_cell_of_a_new_table_is_named_not_a_good_one(tmp_path: Path) -> None:
    task = load(table(tmp_path / "task.csv", "age", AGES), label="kind")
    new = table(tmp_path / "new.csv", "age", with_cells(["70.4"] * 30, {20: "unclear", 22: "70,1"}))
    text = fails(read_unlabeled, str(new), task)
    assert "column 'age' of new must hold numbers, as the task does, but holds 'unclear' in row 20, 22" in text
    assert "70.4" not in text


def test_numbers_that_a_new_table_stores_as_words_are_read_as_numbers(tmp_path: Path) -> None:
    task = load(table(tmp_path / "task.csv", "age", AGES), label="kind")
    write_parquet(tmp_path / "new.parquet", {"age": ["70.5", "71"], "other": [1, 2]})
    assert read_unlabeled(str(tmp_path / "new.parquet"), task).x[:, 0].tolist() == [70.5, 71]


@pytest.mark.parametrize(
    "clinics", [["a", "b", "", "c", " ", "a"], ["1", "2", "", "3", "NA", "1"]], ids=["words", "numbers"]
)
def test_a_row_that_nobody_owns_is_refused(tmp_path: Path, clinics: list[str]) -> None:
    file = table(tmp_path / "visits.csv", "clinic", clinics * 3)
    text = fails(load, file, label="kind", keys=["clinic"])
    assert text.startswith("data.keys: key column 'clinic' of visits has no value in row 3, 5, 9")
    assert "fill in their owner or drop them" in text


def test_a_text_that_nobody_owns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    file.write_text("role,text\nJuliet,what is in a name\n,that which we call\n")
    assert "'role' of plays has no value in row 2" in fails(load, file, keys=["role"], window=4)


def without_some_owners(tmp_path: Path) -> Source:
    """Images beside a column that nobody asked for: a key all the same."""
    columns = {"img": [png(p) for p in pictures(20)], "label": [0, 1] * 10, "site": ["x", "y", "x", "y", ""] * 4}
    write_parquet(tmp_path / "t.parquet", columns, {"img": {"_type": "Image"}})
    return load(tmp_path / "t.parquet")


def test_a_key_that_nobody_asked_for_is_looked_at_when_it_is_used(tmp_path: Path) -> None:
    source = without_some_owners(tmp_path)
    source, _ = split_unlabeled(source, 4, seed=0)
    empty = [row for row in source.rows["train"].tolist() if row % 5 == 4]
    text = fails(owners, source, "site")
    assert f"key column 'site' of t has no value in row {empty[0] + 1}" in text  # of the file


@pytest.mark.parametrize(
    "keys", [["a", "", "b", " "], [1.0, np.nan, 2.0, np.nan], np.array(["a", None, "b", float("nan")], object)]
)
def test_the_natural_split_makes_no_client_of_rows_without_an_owner(keys: list) -> None:
    text = fails(PARTITIONS["natural"], np.zeros(4, int), 0, seed=0, keys=np.asarray(keys))
    assert "partition.keys has no value for 2 of 4 rows, the first is row 2 (counted from 1)" in text
