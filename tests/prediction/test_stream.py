"""Tables in pieces: rows keep their order and their names, and a row that cannot be read costs that row alone."""

from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

from fedstill.core.data import Dataset, InputColumn
from fedstill.core.errors import FedstillError
from fedstill.data import files
from fedstill.prediction.stream import new_samples

TASK = Dataset(
    "task",
    torch.zeros(0, 4),
    torch.zeros(0, dtype=torch.int64),
    ("ill", "well"),
    columns=(InputColumn("age", 1), InputColumn("dose", 1), InputColumn("colour", 2, ("blue", "red"))),
    label="outcome",
)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(files, "ROWS_AT_ONCE", 4)


def frame(rows=10):
    numbers = np.arange(rows)
    columns = {"colour": ["red", "blue"] * (rows // 2), "age": numbers / 8, "dose": 100 - numbers}
    return pandas.DataFrame({"case_id": [f"c{100 - row}" for row in numbers], **columns})


def write(table, path):
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", ["new.csv", "new.parquet"])
def test_rows_come_in_pieces_in_the_order_of_the_file_with_their_ids(tmp_path, name):
    parts = list(new_samples(write(frame(), tmp_path / name), TASK))
    assert [len(part.ids) for part in parts] == [4, 4, 2]
    assert [name for part in parts for name in part.ids] == [f"c{100 - row}" for row in range(10)]
    x = torch.cat([part.x for part in parts])
    expected = [[row / 8, 100 - row, row % 2, 1 - row % 2] for row in range(10)]
    assert x.tolist() == expected


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("age", "", "column 'age' has no value"),
        ("age", "NA", "column 'age' has no value"),
        ("dose", "much", "column 'dose' holds 'much', which is no finite number"),
        ("dose", "1e50", "column 'dose' is"),
        ("colour", "", "column 'colour' has no value"),
        ("colour", "mauve", "column 'colour' holds 'mauve', which is not among the task's words"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_the_reason(tmp_path, column, cell, reason):
    table = frame().astype(object)
    table.loc[5, column] = cell
    parts = list(new_samples(write(table, tmp_path / "new.csv"), TASK))
    ((skipped,),) = [part.skipped for part in parts if part.skipped]
    assert skipped.startswith(f"c95 ({reason}")
    names = [name for part in parts for name in part.ids]
    assert names == [f"c{100 - row}" for row in range(10) if row != 5]
    assert torch.cat([part.x for part in parts])[5].tolist() == [6 / 8, 94, 0, 1]


@pytest.mark.parametrize(
    ("line", "cells"), [("c95,blue,0,625,95", 5), ("c95,blue,0.625", 3), ('"c95",blue,0,62,95', 5)]
)
def test_a_row_with_more_or_fewer_cells_than_the_header_is_skipped(tmp_path, line, cells):
    lines = write(frame(), tmp_path / "new.csv").read_text().splitlines()
    lines[6] = line  # pandas would read a dose of 625, or of nothing
    lines[2] += ",,"  # a spreadsheet leaves empty cells at the end
    lines.insert(3, " ")
    (tmp_path / "new.csv").write_text("\n".join(lines))
    parts = list(new_samples(tmp_path / "new.csv", TASK))
    assert [part.skipped for part in parts] == [(), (f"c95 (has {cells} cells, and the first line has 4)",), ()]
    assert sum(len(part.ids) for part in parts) == 9


def test_a_table_with_decimal_commas_is_read_as_one_with_points(tmp_path):
    table = frame().astype({"dose": object})
    table.loc[5, "dose"] = "much"  # the other cells of this piece are looked at one by one
    table.to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    parts = list(new_samples(tmp_path / "new.csv", TASK))
    assert torch.cat([part.x for part in parts])[:, 0].tolist() == [row / 8 for row in range(10) if row != 5]
    assert parts[1].skipped[0].startswith("c95 (column 'dose' holds 'much'")


def test_a_column_in_which_every_word_is_new_is_named(tmp_path, caplog):
    columns = tuple(column._replace(unknown="zeros") for column in TASK.columns)
    table = frame().assign(colour=["0", "1"] * 5)  # the same facts, in other words
    list(new_samples(write(table, tmp_path / "new.csv"), replace(TASK, columns=columns)))
    assert caplog.records[-1].getMessage() == (
        "'new.csv': no cell of column 'colour' could be used: is it written as in the train rows?"
    )


def test_cells_that_a_rule_fills_in_are_counted_over_all_pieces_in_one_line(tmp_path, caplog):
    columns = tuple(column._replace(missing="mean", fill=2.0) for column in TASK.columns)
    table = frame().astype(object)
    table.loc[[0, 5, 9], "age"] = ""
    parts = list(new_samples(write(table, tmp_path / "new.csv"), replace(TASK, columns=columns)))
    assert torch.cat([part.x for part in parts])[[0, 5, 9], 0].tolist() == [2.0, 2.0, 2.0]
    assert [record.getMessage() for record in caplog.records] == [
        "'new.csv': 3 cells without a value are filled in (data.missing = 'mean'): age 3"
    ]


def test_a_table_of_which_no_row_can_be_read_is_an_error(tmp_path):
    table = frame()
    table["colour"] = "mauve"
    with pytest.raises(FedstillError, match=r"no row of .* can be read: c92 \(column 'colour' holds 'mauve'"):
        list(new_samples(write(table, tmp_path / "new.csv"), TASK))


def test_a_header_without_rows_is_an_error(tmp_path):
    (tmp_path / "new.csv").write_text("colour,age,dose\n")
    with pytest.raises(FedstillError, match="has a header and no rows"):
        list(new_samples(tmp_path / "new.csv", TASK))


def test_ids_that_repeat_do_not_name_rows(tmp_path, caplog):
    table = frame()
    table.loc[9, "case_id"] = "c100"  # in another piece than the first c100
    parts = list(new_samples(write(table, tmp_path / "new.csv"), TASK))
    assert [name for part in parts for name in part.ids] == [f"row/{row}" for row in range(10)]
    assert "'c100' is in row 1, 10" in caplog.text


def test_labels_in_the_table_are_the_truth(tmp_path):
    table = frame()
    table["outcome"] = ["well", "ill"] * 5
    parts = list(new_samples(write(table, tmp_path / "new.csv"), TASK))
    assert torch.cat([part.truth for part in parts]).tolist() == [1, 0] * 5


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(FedstillError, match="has no column 'dose'; did you mean 'doses'"):
        list(new_samples(write(frame().rename(columns={"dose": "doses"}), tmp_path / "new.csv"), TASK))


@pytest.mark.parametrize(("factor", "warned"), [(1, False), (1000, True)])
def test_numbers_in_other_units_are_told(tmp_path, caplog, factor, warned):
    task = replace(TASK, mean=(0.5, 95.0, 0.5, 0.5), std=(0.4, 3.0, 0.5, 0.5))
    table = frame()
    table["dose"] *= factor
    for inputs in (write(table, tmp_path / "new.csv"), table):
        caplog.clear()
        list(new_samples(inputs, task))
        assert ("'dose' in 10 of 10 rows; compare the units" in caplog.text) is warned
        assert "'age'" not in caplog.text


def test_all_gaps_of_a_dataframe_are_refused_at_once():
    table = frame().astype({"dose": float})
    table.loc[3, ["age", "dose"]] = np.nan
    with pytest.raises(FedstillError) as caught:
        list(new_samples(table, TASK))
    assert [line.split(" has no value")[0] for line in caught.value.lines] == [
        f"INPUTS: column '{name}' of the given data" for name in ("age", "dose")
    ]
