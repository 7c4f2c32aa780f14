"""Data that somebody holds in Python become the same Source as the same data in a file."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedstill
from fedstill import FedstillError, from_data
from fedstill.data.given import read_given

TABLE = pd.DataFrame(
    {
        "age": [30.0, 40.5, 50.0, 61.0] * 5,
        "visits": [1, 2, 3, 4] * 5,
        "sex": ["f", "m"] * 10,
        "ward": pd.Categorical(["a", "b", "c", "a"] * 5),
        "smokes": [True, False] * 10,
        "clinic": ["north", "south", "south", "west"] * 5,
        "state": ["well", "sick", "sick", "well"] * 5,
    },
    index=[f"p{row}" for row in range(20)],
)


def same(one, other):
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.train.y, other.train.y)
    assert torch.equal(one.test.x, other.test.x)
    assert one.train.classes == other.train.classes
    assert one.train.mean == other.train.mean


def test_a_frame_is_read_as_its_file_is(tmp_path):
    TABLE.to_csv(tmp_path / "table.csv", index=False)
    file = fedstill.load(tmp_path / "table.csv", label="state", keys=["clinic"])
    given = from_data(TABLE.astype({"smokes": str}), "state", groups="clinic")
    same(file, given)
    assert given.keys["clinic"].tolist() == file.keys["clinic"].tolist()
    assert given.train.columns == file.train.columns


def test_labels_and_owners_may_stand_beside_the_table():
    inputs = TABLE.drop(columns=["state", "clinic"])
    same(from_data(TABLE, "state", groups="clinic"), from_data(inputs, TABLE["state"], groups=TABLE["clinic"]))
    beside = from_data(inputs, TABLE["state"].tolist(), groups=TABLE["clinic"].to_numpy())
    assert (beside.train.label, list(beside.keys)) == ("y", ["owner"])


def test_a_column_of_the_table_keeps_its_name_beside_labels_of_that_name():
    source = from_data(pd.DataFrame({"y": [1.0, 2.0, 3.0, 4.0]}), pd.Series([0, 1, 0, 1], name="y"), test=None)
    assert [column.name for column in source.train.columns] == ["y"]
    assert source.train.label == "y_"


def test_arrays_tensors_and_datasets_are_read_as_from_tensors_reads_them():
    x, y = torch.arange(40.0).reshape(20, 2), torch.arange(20) % 2
    expected = fedstill.from_tensors(x, y)
    for given in (from_data(x, y), from_data(x.numpy(), y.numpy()), from_data(TensorDataset(x, y))):
        same(expected, given)


def test_without_a_test_set_no_row_is_held_out():
    source = from_data(TABLE, "state", groups="clinic", test=None)
    assert len(source.train.y) == len(TABLE)
    assert source.test is source.train


def test_names_of_classes_may_be_given():
    source = from_data(np.eye(6), [0, 1, 0, 1, 0, 1], test=None, classes=["no", "yes"])
    assert source.train.classes == ("no", "yes")


@pytest.mark.parametrize(
    ("data", "groups", "message"),
    [
        ((TABLE, "stat"), None, "y = 'stat' names no column"),
        ((TABLE, "state"), [1, 2], r"groups has the shape \(2,\)"),
        ((np.eye(4), [0, 1]), None, r"y has the shape \(2,\)"),
        ((np.eye(4),), None, "no labels"),
        ((TABLE,), None, "no labels"),
        ((TensorDataset(torch.eye(3)),), None, "cannot read TensorDataset"),
        ((np.array([["a", "b"]], object), [0]), None, "words in a DataFrame"),
        ((TensorDataset(torch.eye(3), torch.arange(3)), [0, 1, 2]), None, r"from_data\(dataset, groups=owners\)"),
        ((DataLoader(TensorDataset(torch.eye(3))),), None, "give loader.dataset"),
        (("table.csv",), None, "data.source"),
        ((TABLE, TABLE["state"].iloc[::-1]), None, r"index of y has the rows of x in another order"),
        ((TABLE, "state"), TABLE["clinic"].iloc[::-1], r"give groups.loc\[x.index\]"),
        ((TABLE.assign(day=pd.Timestamp(0)), "state"), None, "column 'day' holds datetime"),
        ((TABLE.assign(odd=[1, "x"] * 10), "state"), None, "column 'odd' mixes kinds"),
    ],
)
def test_other_data_are_refused_with_the_place(data, groups, message):
    with pytest.raises(FedstillError, match=message):
        from_data(*data, groups=groups)


def test_new_rows_are_read_by_the_task_in_their_order_with_their_index():
    task = from_data(TABLE, "state", groups="clinic", test=None)
    rows = read_given(TABLE.iloc[::-1].assign(id=range(20)), task)
    assert torch.equal(rows.x, task.train.x.flip(0))
    assert rows.ids == tuple(reversed(TABLE.index))
    with pytest.raises(FedstillError, match="learnt from column 'sex'"):
        read_given(TABLE.drop(columns="sex"), task)


def test_an_array_has_the_columns_of_a_table_by_their_places_and_the_other_way_round():
    table = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "b": [4.0, 5.0, 6.0, 9.0]})
    of_table, of_array = (from_data(x, [0, 1, 0, 1], test=None) for x in (table, table.to_numpy()))
    assert torch.equal(read_given(table.to_numpy(), of_table).x, of_table.train.x)
    assert torch.equal(read_given(table, of_array).x, of_array.train.x)
    with pytest.raises(FedstillError, match=r"2 columns, 'a' to 'b', and the array has the shape \(4, 1\)"):
        read_given(table.to_numpy()[:, :1], of_table)


def test_gaps_of_an_array_are_filled_as_those_of_a_table_are():
    table = pd.DataFrame({"a": [1.0, np.nan, 3.0, 4.0], "b": [4.0, 5.0, 6.0, 9.0]})
    of_table, of_array = (from_data(x, [0, 1, 0, 1], test=None, missing="mean") for x in (table, table.to_numpy()))
    same(of_table, of_array)
    assert torch.equal(read_given(table.to_numpy(), of_array).x, of_array.train.x)
