"""What a worker is given, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from elsewhere import RecipeOf
from method_rows import federation

from fedstill.population.worker import HERE, Failed, Kit, Worker, outline_of, rows_of, with_rows

DATA = federation()


def kit_of(**changes):
    return Kit(RecipeOf("fedavg"), outline_of(DATA), "cpu", 7, 1)._replace(**changes)


def test_a_worker_knows_the_rows_of_clients_and_nothing_that_the_server_holds():
    again = with_rows(outline_of(DATA), rows_of(DATA))
    assert torch.equal(again.train.x, DATA.train.x)
    assert torch.equal(again.offsets, DATA.offsets)
    assert again.population == DATA.population
    assert (again.unlabeled, again.validation, again.client_test, len(again.test.x)) == (None, None, None, 0)


def test_an_outline_carries_no_row_along():
    """A view would travel with all of its memory."""
    outline = outline_of(replace(DATA, train=replace(DATA.train, x=torch.zeros(1000, 6))))
    assert outline.train.x.untyped_storage().nbytes() == 0


def test_rows_are_not_copied_even_where_they_are_read_only():
    rows = rows_of(DATA)
    rows["x"].flags.writeable = False
    assert with_rows(outline_of(DATA), rows).train.x.data_ptr() == rows["x"].ctypes.data


def test_a_worker_of_another_version_refuses_in_one_line():
    said = Worker(kit_of(versions={**HERE, "torch": "1.0"}), rows_of(DATA), "cpu").begin()
    assert isinstance(said, Failed)
    assert "install the same" in said.lines[0]
    assert not said.traceback


def test_a_worker_that_was_started_again_does_its_first_task_without_being_begun():
    orders = {"round": 1, "question": "none", "tensors": {}}
    said = Worker(kit_of(), rows_of(DATA), "cpu").do("answer", orders, [0], 1)
    assert isinstance(said, Failed)
    assert "KeyError" in said.lines[0]  # it was built: fedavg asks no question
    assert np.array_equal(rows_of(DATA)["y"], DATA.train.y.numpy())
