"""The contract of a run with its data: it survives JSON, and every change of the data is named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.data import from_csv, hold_client_tests, make_federation
from fedstill.data.contract import as_json, contract_of, differences, from_json

ROWS = [
    ("a", 1.5, "yes"),
    ("b", 2.5, "no"),
    ("a", 3.0, "no"),
    ("c", 0.1, "yes"),
    ("b", 7.0, "yes"),
    ("c", 4.0, "no"),
] * 5


def federation(tmp_path, rows=ROWS, header="town,age,ill") -> Federation:
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    source = from_csv(tmp_path / "t.csv", label=header.rpartition(",")[2])
    return make_federation(source, np.array_split(np.arange(len(source.train.y)), 3))


def test_a_contract_reads_the_same_from_json(tmp_path):
    made = contract_of(federation(tmp_path))
    again = from_json(json.loads(json.dumps(as_json(made))), where="here")
    assert (again.rows, again.owners, again.population) == (made.rows, made.owners, made.population)
    assert differences(made, again) == []
    assert (again.data.mean, again.data.std, again.data.columns) == (made.data.mean, made.data.std, made.data.columns)
    assert again.data.x.shape == made.data.x.shape == (0, 4)


@given(st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_json_keeps_every_bit_of_a_float(numbers):
    assert json.loads(json.dumps(numbers)) == numbers


@pytest.mark.parametrize(
    ("rows", "header", "named"),
    [
        (ROWS + [("a", 9.0, "yes")] * 5, "town,age,ill", "train has 28 rows and had 24"),
        (ROWS[:25], "town,age,ill", "train has 20 rows and had 24"),
        ([("z" if t == "a" else t, a, y) for t, a, y in ROWS], "town,age,ill", "without 'a' with new 'z'"),
        ([(t, a * 1000, y) for t, a, y in ROWS], "town,age,ill", "mean or deviation moved in 1 of 2: 'age'"),
        ([(t, f"x{a}", y) for t, a, y in ROWS], "town,age,ill", "column 'age' held numbers and holds words"),
        ([(t, a, "maybe" if y == "no" else y) for t, a, y in ROWS], "town,age,ill", "classes differ: without 'no'"),
        ([(t, a, {"no": "yes", "yes": "no"}[y]) for t, a, y in ROWS], "town,age,ill", "labels of the same 24 inputs"),
        (ROWS, "city,age,ill", "columns differ: without 'town' with new 'city'"),
        (ROWS, "town,age,sick", "the label column was 'ill' and is 'sick'"),
        ([(a, t, y) for t, a, y in ROWS], "age,town,ill", "the column names are in another order"),
    ],
)  # fmt: skip
def test_a_change_of_a_table_is_named(tmp_path, rows, header, named):
    then, now = contract_of(federation(tmp_path)), contract_of(federation(tmp_path, rows, header))
    assert named in "; ".join(differences(then, now))


def test_other_test_rows_of_clients_are_told(tmp_path):
    first = federation(tmp_path)
    choices = [(0.25, 0), (0.25, 1), (0.5, 0)]
    held, other, more = (contract_of(hold_client_tests(first, share, seed=seed)) for share, seed in choices)
    assert differences(contract_of(first), held)[0] == "there was no client_test set"
    assert differences(held, other)[0] == "client_test: inputs of its 6 rows differ"
    assert differences(held, more)[0] == "client_test has 12 rows and had 6"


def test_rows_in_another_order_and_other_owners_are_told_apart(tmp_path):
    first = federation(tmp_path)
    order = torch.arange(len(first.train.y)).flip(0)
    turned = replace(first, train=replace(first.train, x=first.train.x[order], y=first.train.y[order]))
    assert differences(contract_of(first), contract_of(turned)) == ["train: the same 24 rows stand in another order"]
    moved = replace(first, indices=first.indices.roll(1))
    assert differences(contract_of(first), contract_of(moved)) == ["the rows belong to other clients"]
    renamed = [contract_of(replace(first, names=names)) for names in (("a", "b", "c"), ("a", "b", "d"))]
    assert differences(*renamed) == ["the rows belong to other clients"]
    changed = replace(first, train=replace(first.train, x=first.train.x + 1e-6))
    assert differences(contract_of(first), contract_of(changed)) == ["train: inputs of its 24 rows differ"]


@pytest.mark.parametrize("tree", [{}, {"format": 99}, {"format": 1, "sample": 3}])
def test_json_that_is_no_contract_is_refused_with_its_place(tree):
    with pytest.raises(FedstillError, match=r"^run/contract\.json: "):
        from_json(tree, where="run/contract.json")
