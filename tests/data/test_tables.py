"""Columns become labels, numbers, one-hot words, keys and names of rows; a bad cell is named by its row."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import HUB_FEATURES, HYPOTHESIS, NOT_A_NUMBER, fails, pictures, png, rows_of, write, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.data import Source, from_csv, load, owners, read_unlabeled, split_unlabeled
from fedstill.data.tables import encode_labels


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
    text = fails(load, file, inputs=["age"])
    assert "'age'" in text
    assert "row 2, 5 " in text
    assert "'town'" in fails(load, file, inputs=["town"])
    assert len(load(file, inputs=["label"], label="label").train.y) > 0  # columns that are not used may have holes


def test_too_many_words_are_not_turned_into_columns(tmp_path: Path) -> None:
    lines = [f"name{i},{i % 2}" for i in range(150)]
    text = fails(load, write(tmp_path / "t.csv", "\n".join(["name,label", *lines])))
    assert "150 different words" in text
    assert ": to read it as text set data.tokens, else leave it out with data.drop" in text
    assert "data.keys" in text


def test_numbers_too_large_for_float32_are_refused(tmp_path: Path) -> None:
    assert "not finite in row 2" in fails(load, write(tmp_path / "t.csv", "a,label\n1,0\n1e200,1\n3,0\n"))


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2)


def test_columns_beside_images_become_keys_of_the_train_rows(tmp_path: Path) -> None:
    pixels = pictures(10)
    columns = {
        "image": [png(p) for p in pixels],
        "label": [0, 1] * 5,
        "writer": [f"w{i // 3}" for i in range(10)],
        "room": list(range(10)),
        "score": [0.5] * 10,
        "essay": ["word " * 100] * 10,
    }
    write_parquet(tmp_path / "notes.parquet", columns)
    source = load(tmp_path / "notes.parquet")
    assert set(source.keys) == {"writer", "room"}
    originals = [p.tobytes() for p in channels_first(pixels)]
    rows = [originals.index(x.numpy().tobytes()) for x in source.train.x]
    assert source.keys["room"].tolist() == rows
    assert source.keys["writer"].tolist() == [f"w{row // 3}" for row in rows]
    assert owners(source, "writer", "room").tolist() == [f"w{row // 3} / {row}" for row in rows]
    assert "did you mean 'writer'?" in fails(owners, source, "writr")
    assert "data.keys" in fails(owners, load("digits"), "writer")


def test_a_source_without_test_split_holds_out_a_fifth_and_says_so(tmp_path: Path) -> None:
    columns = {"img": [png(p) for p in pictures(20)], "label": [0, 1, 2, 0, 1] * 4}
    write_parquet(tmp_path / "train.parquet", columns, HUB_FEATURES)
    source = load(tmp_path / "train.parquet")
    assert (len(source.train.y), len(source.test.y)) == (16, 4)
    assert any("4 of 20 rows" in note for note in source.notes)
    again = load(tmp_path / "train.parquet", refresh=True)
    assert torch.equal(source.test.x, again.test.x)
    other = load(tmp_path / "train.parquet", seed=1)
    assert not torch.equal(source.test.x, other.test.x)


def test_validation_stands_in_for_a_test_split_and_others_are_left_out(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("validation", 3), ("extra", 2)):
        columns = {"img": [png(p) for p in pictures(count)], "label": [0, 1, 2] * (count // 3) or [0] * count}
        write_parquet(tmp_path / "set" / f"{split}.parquet", columns, HUB_FEATURES)
    source = load(tmp_path / "set")
    assert (len(source.train.y), len(source.test.y)) == (6, 3)
    assert any("'validation'" in note for note in source.notes)
    assert any("extra" in note for note in source.notes)


def test_hidden_test_labels_are_not_used(tmp_path: Path) -> None:
    images = [png(p) for p in pictures(10)]
    write_parquet(tmp_path / "set" / "train.parquet", {"img": images, "label": [0, 1] * 5}, HUB_FEATURES)
    write_parquet(tmp_path / "set" / "test.parquet", {"img": images, "label": [-1] * 10}, HUB_FEATURES)
    source = load(tmp_path / "set")
    assert len(source.train.y) + len(source.test.y) == 10
    assert any("no labels" in note for note in source.notes)


def test_two_label_columns_ask_for_data_label(tmp_path: Path) -> None:
    kinds = {"_type": "ClassLabel", "names": ["a", "b"]}
    columns = {"img": [png(p) for p in pictures(10)], "fine": [0, 1] * 5, "coarse": [0] * 5 + [1] * 5}
    write_parquet(tmp_path / "two.parquet", columns, {"fine": kinds, "coarse": kinds})
    text = fails(load, tmp_path / "two.parquet")
    assert "data.label" in text
    assert "fine" in text
    assert "coarse" in text
    source = load(tmp_path / "two.parquet", label="coarse")
    assert set(source.keys) == {"fine"}
    assert "did you mean 'coarse'?" in fails(load, tmp_path / "two.parquet", label="coarce")


AGES = [str(20 + i % 57) for i in range(200)]


def column_of(path: Path, name: str, cells: list[str]) -> Path:
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
    text = fails(load, column_of(tmp_path / "t.csv", "chol", with_cells(cells, changed)), label="kind")
    assert text.startswith("data.inputs: column 'chol' of t must hold numbers")
    assert told in text
    assert "correct such cells or drop their rows, or leave the column out with data.drop" in text
    assert len(text) < 350


def test_a_word_among_numbers_may_stand_in_a_column_that_is_not_learnt_from(tmp_path: Path) -> None:
    file = column_of(tmp_path / "t.csv", "chol", with_cells(AGES, {17: "5,2"}))
    assert load(file, label="kind", inputs=["other"]).train.x.shape[1] == 1
    assert load(file, label="kind", keys=["chol"]).train.x.shape[1] == 1


def test_a_word_in_the_test_split_alone_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    column_of(tmp_path / "set" / "train.csv", "age", AGES)
    column_of(tmp_path / "set" / "test.csv", "age", with_cells(AGES[:20], {3: "old"}))
    assert "holds 'old' in row 203 (counted from 1)" in fails(load, tmp_path / "set", label="kind")


@pytest.mark.parametrize("cells", [["1", "2", "A", "B"] * 10, ["1"] * 8 + ["A"], ["01", "02", "K1"] * 5])
def test_codes_stay_words(tmp_path: Path, cells: list[str]) -> None:
    source = from_csv(column_of(tmp_path / "t.csv", "stage", cells), label="kind")
    assert source.train.columns[0].words == tuple(sorted(set(cells)))


def test_words_that_a_file_declares_are_words_whatever_they_look_like(tmp_path: Path) -> None:
    features = {"grade": {"_type": "ClassLabel", "names": ["1", "2", "A"]}}
    grades = [0, 1] * 20 + [2]
    write_parquet(tmp_path / "t.parquet", {"grade": grades, "kind": ["x", "y"] * 20 + ["x"]}, features)
    assert load(tmp_path / "t.parquet", label="kind").train.columns[0].words == ("1", "2", "A")


def test_a_bad_cell_of_a_new_table_is_named_not_a_good_one(tmp_path: Path) -> None:
    task = load(column_of(tmp_path / "task.csv", "age", AGES), label="kind")
    new = column_of(tmp_path / "new.csv", "age", with_cells(["70.4"] * 30, {20: "unclear", 22: "70,1"}))
    text = fails(read_unlabeled, str(new), task)
    assert "column 'age' of new must hold numbers, as the task does, but holds 'unclear' in row 20, 22" in text
    assert "70.4" not in text


def test_numbers_that_a_new_table_stores_as_words_are_read_as_numbers(tmp_path: Path) -> None:
    task = load(column_of(tmp_path / "task.csv", "age", AGES), label="kind")
    write_parquet(tmp_path / "new.parquet", {"age": ["70.5", "71"], "other": [1, 2]})
    assert read_unlabeled(str(tmp_path / "new.parquet"), task).x[:, 0].tolist() == [70.5, 71]


@pytest.mark.parametrize(
    "clinics", [["a", "b", "", "c", " ", "a"], ["1", "2", "", "3", "NA", "1"]], ids=["words", "numbers"]
)
def test_a_row_that_nobody_owns_is_refused(tmp_path: Path, clinics: list[str]) -> None:
    file = column_of(tmp_path / "visits.csv", "clinic", clinics * 3)
    text = fails(load, file, label="kind", keys=["clinic"])
    assert text.startswith("data.keys: key column 'clinic' of visits has no value in row 3, 5, 9")
    assert "fill in their owner or drop them" in text


def test_a_text_that_nobody_owns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    file.write_text("role,text\nJuliet,what is in a name\n,that which we call\n")
    assert "'role' of plays has no value in row 2" in fails(load, file, keys=["role"], window=4)


WRITTEN = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=5)


NUMERIC = st.from_regex(r"\A[0-9]{1,22}\Z")


@pytest.fixture
def sizes(tmp_path: Path) -> Source:
    (tmp_path / "task.csv").write_text("size,kind\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(20)))
    return load(tmp_path / "task.csv", label="kind")


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


@HYPOTHESIS
@given(
    ids=st.one_of(st.sets(WRITTEN, min_size=1), st.sets(NUMERIC, min_size=1)).map(sorted), kind=st.sampled_from("cp")
)
def test_every_id_names_its_row_as_it_is_written(tmp_path: Path, sizes: Source, ids: list[str], kind: str) -> None:
    file = tmp_path / ("new.csv" if kind == "c" else "new.parquet")
    if kind == "c":
        file.write_text("id,size\n" + "".join(f"{quoted(name)},{i}\n" for i, name in enumerate(ids)), encoding="utf-8")
    else:
        pq.write_table(pa.table({"id": ids, "size": range(len(ids))}), file)
    found = read_unlabeled(str(file), sizes)
    assert {name: ids.index(name) for name in ids} == dict(zip(found.ids, found.x[:, 0].tolist(), strict=True))
    assert found.notes == ()


@pytest.mark.parametrize(
    ("written", "ordered"),
    [
        (["00010", "00002"], ["00002", "00010"]),
        (["10", "7", "07"], ["7", "07", "10"]),  # whole numbers: the short ones first
        (["2024_001", "2024_000"], ["2024_000", "2024_001"]),
        (["12345678901234567891", "12345678901234567890", "9"], ["9", "12345678901234567890", "12345678901234567891"]),
        (["1.001", "1.000"], ["1.000", "1.001"]),
        (["1E4", "0E4"], ["0E4", "1E4"]),
        (["nan", "NA", "null"], ["NA", "nan", "null"]),
        (["P-9", "P-10"], ["P-10", "P-9"]),
    ],
)
def test_ids_that_look_like_numbers_are_not_turned_into_them(
    tmp_path: Path, sizes: Source, written: list[str], ordered: list[str]
) -> None:
    (tmp_path / "new.csv").write_text("id,size\n" + "".join(f"{name},{i}\n" for i, name in enumerate(written)))
    found = read_unlabeled(str(tmp_path / "new.csv"), sizes)
    assert list(found.ids) == ordered
    assert [written[int(size)] for size in found.x[:, 0]] == ordered


def test_ids_of_parquet_are_whole_numbers_words_or_dates(tmp_path: Path, sizes: Source) -> None:
    days = [datetime.date(2024, 5, 2), datetime.date(2024, 5, 1)]
    for ids, ordered in (
        (pa.array([10, 9], pa.uint64()), ("9", "10")),
        (pa.array(["b", "a"]).dictionary_encode(), ("a", "b")),
        (pa.array(days), ("2024-05-01", "2024-05-02")),
    ):
        pq.write_table(pa.table({"ID": ids, "size": [0, 1]}), tmp_path / "new.parquet")
        found = read_unlabeled(str(tmp_path / "new.parquet"), sizes)
        assert found.ids == ordered
        assert found.x[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (["4", "", "3"], "no value in row 2 (counted from 1)"),
        (["4", " ", "3"], "no value in row 2 (counted from 1)"),
        (["P-0", "P-1", "P-0"], "'P-0' is in row 1, 3 (counted from 1)"),
        ([4, None, 3], "no value in row 2"),
        ([4, 3, 4], "'4' is in row 1, 3"),
        ([0.5, 1.5, 2.5], "does not hold words or whole numbers"),
    ],
)
def test_rows_whose_ids_will_not_do_are_not_called_like_ids_and_a_warning_says_why(
    tmp_path: Path, sizes: Source, caplog: pytest.LogCaptureFixture, ids: list, why: str
) -> None:
    file = tmp_path / ("new.csv" if isinstance(ids[0], str) else "new.parquet")
    if isinstance(ids[0], str):
        file.write_text("id,size\n" + "".join(f"{name},{i}\n" for i, name in enumerate(ids)))
    else:
        pq.write_table(pa.table({"id": ids, "size": [0, 1, 2]}), file)
    with caplog.at_level(logging.WARNING, "fedstill.run"):
        found = read_unlabeled(str(file), sizes)
    assert found.ids == ("row/0", "row/1", "row/2")
    assert found.x[:, 0].tolist() == [0, 1, 2]
    (note,) = found.notes
    assert note.startswith("column 'id' cannot name the rows: ")
    assert why in note
    assert note in caplog.text
    assert read_unlabeled(str(file), sizes).notes == found.notes  # from the cache
    assert split_unlabeled(sizes, str(file), seed=0, limit=2)[1].notes == found.notes


def test_another_id_column_takes_the_place_of_one_that_will_not_do(tmp_path: Path, sizes: Source) -> None:
    (tmp_path / "new.csv").write_text("name,id,size\nb,1,0\na,1,1\n")
    found = read_unlabeled(str(tmp_path / "new.csv"), sizes)
    assert found.ids == ("a", "b")
    assert found.notes == ()


def test_ids_are_one_set_over_all_files_and_splits(tmp_path: Path, sizes: Source) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    pq.write_table(pa.table({"id": [3, 1], "size": [0, 1]}), folder / "one.parquet")
    pq.write_table(pa.table({"id": ["x", None], "size": [2, 3]}), folder / "two.parquet")
    assert read_unlabeled(str(folder), sizes).ids == ("row/0", "row/1", "row/2", "row/3")
    pq.write_table(pa.table({"id": ["x", "2"], "size": [2, 3]}), folder / "two.parquet")
    assert read_unlabeled(str(folder), sizes).ids == ("1", "2", "3", "x")
    for old, new in (("one", "train"), ("two", "test")):
        (folder / f"{old}.parquet").rename(folder / f"{new}.parquet")
    assert read_unlabeled(str(folder), sizes).ids == ("1", "2", "3", "x")
    pq.write_table(pa.table({"id": [3, 3], "size": [0, 1]}), folder / "train.parquet")
    assert read_unlabeled(str(folder), sizes).ids == ("test/0", "test/1", "train/0", "train/1")


def test_an_input_is_encoded_as_the_tasks_and_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "task.csv").write_text("id,kind\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(20)))
    sizes = load(tmp_path / "task.csv", label="kind")
    (tmp_path / "new.csv").write_text("id\n007\n5\n")
    found = read_unlabeled(str(tmp_path / "new.csv"), sizes)
    assert found.x.tolist() == [[7], [5]]
    assert found.ids == ("0", "1")


def test_a_task_that_learns_from_ids_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("ID,a,kind\n" + "".join(f"{i},{i % 7},{'ab'[i % 2]}\n" for i in range(20)))
    source = from_csv(file, label="kind")
    assert source.train.x.shape[1] == 2  # they stay what they were
    told = [note for note in source.notes if "learnt from column 'ID'" in note]
    assert len(told) == 1
    assert "leave it out with data.drop" in told[0]
    assert not any(
        "learnt from" in note for note in from_csv(file, label="kind", inputs=["ID", "a"]).notes
    )  # asked for
    assert not any("learnt from" in note for note in from_csv(file, label="kind", keys=["ID"]).notes)
    file.write_text("name,a,kind\n" + "".join(f"{'xy'[i % 2]},{i},{'ab'[i % 2]}\n" for i in range(20)))
    assert not any("learnt from" in note for note in from_csv(file, label="kind").notes)


@pytest.mark.parametrize(
    ("name", "ids", "noted"),
    [
        *((name, range(500, 520), True) for name in ("patient_id", "PATIENT_ID", "patient-id", "Patient ID")),
        *((name, range(500, 520), True) for name in ("patientId", "PatientID", "id_patient")),
        ("patient_id", [f"P{i}" for i in range(20)], True),
        ("patient_id", [i + 0.5 for i in range(20)], False),  # measured
        ("patient_id", [i // 2 for i in range(20)], False),  # visits
        *((name, range(500, 520), False) for name in ("acid", "covid", "COVID", "lipid", "Acid", "paid", "IDH1")),
        *((name, range(500, 520), False) for name in ("idle", "width", "Idle", "humid_idx")),
    ],
)
def test_an_id_of_something_is_an_id(tmp_path: Path, name: str, ids: Sequence, noted: bool) -> None:
    file = tmp_path / "t.csv"
    file.write_text(f"{name},a,kind\n" + "".join(f"{one},{i % 7},{'ab'[i % 2]}\n" for i, one in enumerate(ids)))
    told = [note for note in from_csv(file, label="kind").notes if f"learnt from column '{name}'" in note]
    assert len(told) == noted


def test_the_id_of_something_names_rows_if_it_tells_them_apart(tmp_path: Path, sizes: Source) -> None:
    new = tmp_path / "new.csv"
    new.write_text("clinic_id,patient_id,size\n1,007,0\n1,005,1\n2,006,2\n2,004,3\n")
    found = read_unlabeled(str(new), sizes)
    assert found.ids == ("004", "005", "006", "007")
    assert found.x[:, 0].tolist() == [3, 1, 2, 0]
    assert found.notes == ()
    new.write_text("patient_id,name,size\n3,b,0\n4,a,1\n")
    assert read_unlabeled(str(new), sizes).ids == ("a", "b")
    new.write_text("patient_id,size\n3,0\n4,1\n3,2\n")
    found = read_unlabeled(str(new), sizes)
    assert found.ids == ("row/0", "row/1", "row/2")
    assert "column 'patient_id' cannot name the rows: '3' is in row 1, 3" in found.notes[0]


def gappy(folder: Path) -> Path:
    """A table of 40 rows: x is 0..39 without rows 0 and 1, kind is a word without row 2, row 3 has no label."""
    rows = [
        f"{'' if i < 2 else i},{'' if i == 2 else 'ab'[i % 2]},{i},p{i},{'' if i == 3 else i % 2}" for i in range(40)
    ]
    return write(folder / "gaps.csv", "\n".join(["x,kind,whole,patient_id,label", *rows]))


def test_mean_fills_numbers_by_the_train_rows_flags_them_and_gives_words_their_own(tmp_path: Path) -> None:
    source = load(gappy(tmp_path), missing="mean", drop=["patient_id"])
    x, kind, whole = source.train.columns
    trained = [row for row in source.rows["train"].tolist() if row > 1]
    assert x.fill == pytest.approx(sum(trained) / len(trained))
    assert (x.width, x.flag, whole.width, whole.flag) == (2, True, 1, False)  # a flag that never changes says nothing
    assert kind.words == ("(missing)", "a", "b")
    for part in ("train", "test"):
        for row, features in zip(source.rows[part].tolist(), getattr(source, part).x.tolist(), strict=True):
            assert features[:2] == pytest.approx([x.fill, 1.0] if row < 2 else [row, 0.0])
            assert features[2] == (row == 2)
    assert 3 not in source.rows["train"].tolist() + source.rows["test"].tolist()  # a row without a label
    assert any(note.startswith("1 of 40 rows are left out") for note in source.notes)
    assert any(note.startswith("3 cells without a value are filled in") for note in source.notes)


def test_skip_leaves_out_rows_with_gaps_in_train_and_in_new_data(tmp_path: Path) -> None:
    source = load(gappy(tmp_path), missing="skip", drop=["patient_id"])
    assert sorted(source.rows["train"].tolist() + source.rows["test"].tolist()) == list(range(4, 40))
    new = write(tmp_path / "new.csv", "patient_id,x,kind,whole\nq1,3,a,1\nq2,,a,1\nq3,4,,1\n")
    read = read_unlabeled(new, source)
    assert (read.ids, read.skipped) == (("q1",), ("q2", "q3"))


def test_new_rows_are_filled_by_the_fitted_mean_and_new_words_count_as_none(tmp_path: Path) -> None:
    task = load(gappy(tmp_path), missing="mean", unknown="zeros", drop=["patient_id"])
    x, _, whole = task.train.columns
    new = write(tmp_path / "new.csv", "x,kind,whole\n1000,z,\n,a,5\n")
    read = read_unlabeled(new, task)
    assert read.x[0].tolist() == pytest.approx([1000.0, 0.0, 0.0, 0.0, 0.0, whole.fill])
    assert read.x[1].tolist() == pytest.approx([x.fill, 1.0, 0.0, 1.0, 0.0, 5.0])
    assert [note.partition(" cell")[0] for note in read.notes] == ["2", "1"]  # filled in, unknown
    strict = load(gappy(tmp_path), missing="mean", drop=["patient_id"])
    assert "'z' in row 1 (counted from 1), a word that is not among the task's" in fails(read_unlabeled, new, strict)


def test_all_columns_with_gaps_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(FedstillError) as error:
        load(write(tmp_path / "t.csv", "a,b,label\n,1,x\n2,,y\n"))
    first, second = error.value.lines
    assert first.startswith("data.source: column 'a' of t has no value in row 1")
    assert second.startswith("data.source: column 'b' of t has no value in row 2")
    assert "data.missing" in first


def test_columns_to_drop_must_exist_and_have_no_other_use(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", "age,who,label\n1,a,x\n2,b,y\n")
    with pytest.raises(FedstillError) as error:
        load(file, drop=["aged", "who"], keys=["who"])
    missing, twice = error.value.lines
    assert missing == "data.drop: t has no column 'aged'; did you mean 'age'?"
    assert twice.startswith("data.drop and data.keys both name the column 'who'")


def test_classes_are_numbered_as_agreed_and_another_one_is_refused_with_its_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x,y\n1,dog\n2,cat\n3,dog\n4,cat\n5,bird\n")
    source = load(tmp_path / "a.csv", label="y", like_classes=("cat", "bird", "fish", "dog"), held_out=0.0)
    assert source.train.y.tolist() == [3, 0, 3, 0, 1]
    assert source.train.classes == ("cat", "bird", "fish", "dog")
    with pytest.raises(FedstillError, match=r"holds 'bird' in row 5 .*agreed classes are cat, dog"):
        load(tmp_path / "a.csv", label="y", like_classes=("cat", "dog"))


def test_all_rows_are_train_rows_where_none_are_held_out(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x,y\n" + "".join(f"{row},{row % 2}\n" for row in range(20)))
    source = load(tmp_path / "a.csv", label="y", held_out=0.0)
    assert source.train.x.flatten().tolist() == list(range(20))
    assert len(source.test.y) == 0
