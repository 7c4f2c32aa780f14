"""Rows have one owner; the server's unlabeled rows have none."""

from __future__ import annotations

import time

import numpy as np
import torch
from data_files import HYPOTHESIS, fails, pictures
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data import (
    Source,
    federation_from_tensors,
    from_tensors,
    hold_validation,
    make_federation,
    split_unlabeled,
)


def numbered(rows: int) -> Source:
    """Every input is the number of its row, so that rows can be followed."""
    x = np.arange(rows, dtype=np.float32)[:, None]
    source = from_tensors(x, np.arange(rows) % 3, test=(-x[:4] - 1, [0, 1, 2, 0]))
    return source._replace(keys={"row": np.arange(rows)})


@HYPOTHESIS
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_each_client_gets_its_own_rows_in_order(sizes: list[int], spare: int) -> None:
    total = sum(sizes)
    source = numbered(total + spare + 3)
    rows = np.random.default_rng(0).permutation(total + spare + 3)[:total]
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    federation = make_federation(source, parts, partition="by hand")
    assert federation.population == len(sizes)
    assert federation.partition == "by hand"
    for k, part in enumerate(parts):
        mine = federation.indices[federation.offsets[k] : federation.offsets[k + 1]]
        assert mine.tolist() == part.tolist()
    assert federation.indices.dtype == federation.offsets.dtype == torch.int64


def test_a_hundred_thousand_clients_are_put_together_in_a_moment() -> None:
    source = numbered(200_000)
    parts = list(np.arange(200_000).reshape(100_000, 2))
    start = time.monotonic()
    federation = make_federation(source, parts)
    assert time.monotonic() - start < 2.0
    assert federation.population == 100_000


def test_clients_may_be_empty_and_may_share_rows_where_the_procedure_says_so() -> None:
    source = numbered(6)
    empty = np.array([], np.int64)
    assert make_federation(source, [np.array([0, 1]), empty]).offsets.tolist() == [0, 2, 2]
    shared = make_federation(source, [np.array([0, 1]), np.array([1, 2])], shared_rows=True)
    assert shared.indices.tolist() == [0, 1, 1, 2]


def test_rows_that_cannot_be_shared_out_so_are_refused() -> None:
    source = numbered(6)
    a = np.array([0, 1])
    assert "row 1 belongs to clients 0 and 2" in fails(make_federation, source, [a, np.array([2]), np.array([1, 3])])
    assert "no client holds" in fails(make_federation, source, [np.array([], np.int64)])
    assert "row 6 is not in 0..5" in fails(make_federation, source, [a, np.array([6])])
    assert "row -1" in fails(make_federation, source, [np.array([-1])])
    assert "no client" in fails(make_federation, source, [])
    assert "integers" in fails(make_federation, source, [np.array([0.5])])
    assert "data.unlabeled" in fails(make_federation, source, [a], unlabeled=torch.zeros(3, 2))


def test_a_federation_carries_names_and_truth_of_what_the_server_holds() -> None:
    source = numbered(10)
    rest, unlabeled = split_unlabeled(source, 4, seed=0)
    rest, validation = hold_validation(rest, 3, seed=0)
    federation = make_federation(rest, [np.arange(3)], unlabeled=unlabeled, validation=validation)
    assert torch.equal(federation.unlabeled, unlabeled.x)
    assert federation.unlabeled_ids == unlabeled.ids
    assert federation.unlabeled_truth.tolist() == [int(x) % 3 for x in federation.unlabeled[:, 0]]
    assert federation.validation is validation
    plain = make_federation(source, [np.arange(3)], unlabeled=unlabeled.x)
    assert plain.unlabeled_ids == ("0", "1", "2", "3")
    assert plain.unlabeled_truth is None
    assert plain.validation is None
    wrong = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    assert "data.validation" in fails(make_federation, source, [np.arange(3)], validation=wrong)


def test_a_federation_from_one_pair_a_client() -> None:
    pixels = pictures(9)
    clients = [(pixels[:2], [5, 7]), (torch.from_numpy(pixels[2:6]), torch.tensor([7, 7, 5, 5])), (pixels[6:7], [5])]
    federation = federation_from_tensors(clients, test=(pixels[7:], [7, 5]), unlabeled=pixels[:3])
    assert federation.population == 3
    assert federation.offsets.tolist() == [0, 2, 6, 7]
    assert np.array_equal(federation.train.x[federation.indices], pixels[:7].transpose(0, 3, 1, 2))
    assert federation.train.classes == ("5", "7")
    assert federation.unlabeled is not None
    assert federation.unlabeled.shape == (3, 3, 5, 4)
    wrong = [(pixels[:2], [5, 7]), (pixels[:2, :3], [5, 7])]
    assert "client 1" in fails(federation_from_tensors, wrong, test=(pixels[7:], [7, 5]))
    assert "none" in fails(federation_from_tensors, [], test=(pixels[7:], [7, 5]))
