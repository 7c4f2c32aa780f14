"""Owners of rows, the held-out part, and the constants that inputs are normalised by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_files import HYPOTHESIS, fails, hub_folder, pictures, png, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.data import Source, from_tensors, load, owners, split_unlabeled, stratified_holdout
from fedstill.data.source import Reading
from fedstill.partition import PARTITIONS


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


def test_normalisation_is_measured_on_the_train_split() -> None:
    pixels, labels = pictures(30), [0, 1, 2] * 10
    source = from_tensors(pixels, labels, test=(pictures(5, seed=9), [0] * 5))
    scaled = pixels.astype(np.float64) / 255
    assert source.train.mean == pytest.approx(scaled.mean((0, 1, 2)))
    assert source.train.std == pytest.approx(scaled.std((0, 1, 2)))
    assert source.test.mean == source.train.mean
    rows = np.array([[1.0, 7.0], [3.0, 7.0], [1.0, 7.0], [3.0, 7.0]])
    table = from_tensors(rows, [0, 1, 0, 1], test=(rows, [0, 1, 0, 1]))
    assert table.train.mean == pytest.approx((2.0, 7.0))
    assert table.train.std == pytest.approx((1.0, 1.0))  # a constant feature is not divided by zero


@pytest.mark.parametrize(
    ("name", "mean"), [("cifar10", 0.4914), ("CIFAR-100", 0.5071), ("fashion_mnist", None), ("pets", None)]
)
def test_known_names_give_the_published_constants_if_the_channels_fit(
    tmp_path: Path, name: str, mean: float | None
) -> None:
    hub_folder(tmp_path / name)
    source = load(tmp_path / name)
    if mean is None:
        assert source.train.mean == pytest.approx((source.train.x.double() / 255).mean((0, 2, 3)).tolist())
    else:
        assert source.train.mean[0] == mean


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


def test_an_image_has_no_larger_side_than_memory():
    with pytest.raises(FedstillError, match=r"data\.size = 99999 is too large"):
        Reading(size=99_999)
