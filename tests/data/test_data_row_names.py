"""What rows of an unlabeled table are called: their ids as they are written, or nothing that looks like an id."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import HYPOTHESIS
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data import Source, from_csv, load, read_unlabeled, split_unlabeled

WRITTEN = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=5)
NUMERIC = st.from_regex(r"\A[0-9]{1,22}\Z")


@pytest.fixture
def task(tmp_path: Path) -> Source:
    (tmp_path / "task.csv").write_text("size,kind\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(20)))
    return load(tmp_path / "task.csv", label="kind")


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


@HYPOTHESIS
@given(
    ids=st.one_of(st.sets(WRITTEN, min_size=1), st.sets(NUMERIC, min_size=1)).map(sorted), kind=st.sampled_from("cp")
)
def test_every_id_names_its_row_as_it_is_written(tmp_path: Path, task: Source, ids: list[str], kind: str) -> None:
    file = tmp_path / ("new.csv" if kind == "c" else "new.parquet")
    if kind == "c":
        file.write_text("id,size\n" + "".join(f"{quoted(name)},{i}\n" for i, name in enumerate(ids)), encoding="utf-8")
    else:
        pq.write_table(pa.table({"id": ids, "size": range(len(ids))}), file)
    found = read_unlabeled(str(file), task)
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
    tmp_path: Path, task: Source, written: list[str], ordered: list[str]
) -> None:
    (tmp_path / "new.csv").write_text("id,size\n" + "".join(f"{name},{i}\n" for i, name in enumerate(written)))
    found = read_unlabeled(str(tmp_path / "new.csv"), task)
    assert list(found.ids) == ordered
    assert [written[int(size)] for size in found.x[:, 0]] == ordered


def test_ids_of_parquet_are_whole_numbers_words_or_dates(tmp_path: Path, task: Source) -> None:
    days = [datetime.date(2024, 5, 2), datetime.date(2024, 5, 1)]
    for ids, ordered in (
        (pa.array([10, 9], pa.uint64()), ("9", "10")),
        (pa.array(["b", "a"]).dictionary_encode(), ("a", "b")),
        (pa.array(days), ("2024-05-01", "2024-05-02")),
    ):
        pq.write_table(pa.table({"ID": ids, "size": [0, 1]}), tmp_path / "new.parquet")
        found = read_unlabeled(str(tmp_path / "new.parquet"), task)
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
    tmp_path: Path, task: Source, caplog: pytest.LogCaptureFixture, ids: list, why: str
) -> None:
    file = tmp_path / ("new.csv" if isinstance(ids[0], str) else "new.parquet")
    if isinstance(ids[0], str):
        file.write_text("id,size\n" + "".join(f"{name},{i}\n" for i, name in enumerate(ids)))
    else:
        pq.write_table(pa.table({"id": ids, "size": [0, 1, 2]}), file)
    with caplog.at_level(logging.WARNING, "fedstill.run"):
        found = read_unlabeled(str(file), task)
    assert found.ids == ("row/0", "row/1", "row/2")
    assert found.x[:, 0].tolist() == [0, 1, 2]
    (note,) = found.notes
    assert note.startswith("column 'id' cannot name the rows: ")
    assert why in note
    assert note in caplog.text
    assert read_unlabeled(str(file), task).notes == found.notes  # from the cache
    assert split_unlabeled(task, str(file), seed=0, limit=2)[1].notes == found.notes


def test_another_id_column_takes_the_place_of_one_that_will_not_do(tmp_path: Path, task: Source) -> None:
    (tmp_path / "new.csv").write_text("name,id,size\nb,1,0\na,1,1\n")
    found = read_unlabeled(str(tmp_path / "new.csv"), task)
    assert found.ids == ("a", "b")
    assert found.notes == ()


def test_ids_are_one_set_over_all_files_and_splits(tmp_path: Path, task: Source) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    pq.write_table(pa.table({"id": [3, 1], "size": [0, 1]}), folder / "one.parquet")
    pq.write_table(pa.table({"id": ["x", None], "size": [2, 3]}), folder / "two.parquet")
    assert read_unlabeled(str(folder), task).ids == ("row/0", "row/1", "row/2", "row/3")
    pq.write_table(pa.table({"id": ["x", "2"], "size": [2, 3]}), folder / "two.parquet")
    assert read_unlabeled(str(folder), task).ids == ("1", "2", "3", "x")
    for old, new in (("one", "train"), ("two", "test")):
        (folder / f"{old}.parquet").rename(folder / f"{new}.parquet")
    assert read_unlabeled(str(folder), task).ids == ("1", "2", "3", "x")
    pq.write_table(pa.table({"id": [3, 3], "size": [0, 1]}), folder / "train.parquet")
    assert read_unlabeled(str(folder), task).ids == ("test/0", "test/1", "train/0", "train/1")


def test_an_input_is_encoded_as_the_tasks_and_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "task.csv").write_text("id,kind\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(20)))
    task = load(tmp_path / "task.csv", label="kind")
    (tmp_path / "new.csv").write_text("id\n007\n5\n")
    found = read_unlabeled(str(tmp_path / "new.csv"), task)
    assert found.x.tolist() == [[7], [5]]
    assert found.ids == ("0", "1")


def test_a_task_that_learns_from_ids_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("ID,a,kind\n" + "".join(f"{i},{i % 7},{'ab'[i % 2]}\n" for i in range(20)))
    source = from_csv(file, label="kind")
    assert source.train.x.shape[1] == 2  # they stay what they were
    told = [note for note in source.notes if "learnt from column 'ID'" in note]
    assert len(told) == 1
    assert "leave it out with data.inputs" in told[0]
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


def test_the_id_of_something_names_rows_if_it_tells_them_apart(tmp_path: Path, task: Source) -> None:
    new = tmp_path / "new.csv"
    new.write_text("clinic_id,patient_id,size\n1,007,0\n1,005,1\n2,006,2\n2,004,3\n")
    found = read_unlabeled(str(new), task)
    assert found.ids == ("004", "005", "006", "007")
    assert found.x[:, 0].tolist() == [3, 1, 2, 0]
    assert found.notes == ()
    new.write_text("patient_id,name,size\n3,b,0\n4,a,1\n")
    assert read_unlabeled(str(new), task).ids == ("a", "b")
    new.write_text("patient_id,size\n3,0\n4,1\n3,2\n")
    found = read_unlabeled(str(new), task)
    assert found.ids == ("row/0", "row/1", "row/2")
    assert "column 'patient_id' cannot name the rows: '3' is in row 1, 3" in found.notes[0]


def test_two_thousand_rows_keep_their_ids_whatever_their_order(tmp_path: Path, task: Source) -> None:
    ids = np.random.default_rng(0).permutation(2000)
    (tmp_path / "new.csv").write_text("size,id\n" + "".join(f"{i},{i:04d}\n" for i in ids))
    found = read_unlabeled(str(tmp_path / "new.csv"), task)
    assert found.ids == tuple(f"{i:04d}" for i in range(2000))
    assert found.x[:, 0].tolist() == list(range(2000))
