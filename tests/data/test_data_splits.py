"""Which rows are tested on, kept by the server, left to the clients: nobody's rows are another's."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import HYPOTHESIS, fails, image_folder, pictures, png, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data import (
    Source,
    central_pool,
    from_tensors,
    hold_validation,
    limit_test,
    load,
    split_unlabeled,
    with_test_of,
)
from fedstill.experiment.build import build_federation, load_source
from fedstill.experiment.config import Experiment
from fedstill.experiment.run_folder import read_description, write_description


def numbered(train: int, test: int) -> Source:
    """Inputs are 0, 1, 2, ... over train and then test, labels the number mod 3, so that rows can be followed."""
    x = np.arange(train + test, dtype=np.float32)[:, None]
    y = np.arange(train + test) % 3
    source = from_tensors(x[:train], y[:train], test=(x[train:], y[train:]), classes=("a", "b", "c"))
    return source._replace(keys={"row": np.arange(train)})


def rows(x: torch.Tensor) -> list[int]:
    return x[:, 0].int().tolist()


def names(numbers: list[int], train: int) -> tuple[str, ...]:
    return tuple(f"train/{n}" if n < train else f"test/{n - train}" for n in numbers)


@HYPOTHESIS
@given(train=st.integers(5, 60), test=st.integers(3, 40), data=st.data())
def test_every_row_is_a_clients_or_tested_or_unlabeled(train: int, test: int, data: st.DataObject) -> None:
    source, kept = numbered(train, test), data.draw(st.integers(1, train))
    pooled = central_pool(source, kept, test_share=data.draw(st.sampled_from([0.01, 0.2, 0.5, 0.99])))
    clients, tested, central = rows(pooled.train.x), rows(pooled.test.x), pooled.central
    assert len(clients) == kept
    assert max(clients) < train  # none of them was a test row
    assert sorted(clients + tested + rows(central.x)) == list(range(train + test))
    assert tested
    assert central.ids == names(rows(central.x), train)
    for x, y in ((pooled.train.x, pooled.train.y), (pooled.test.x, pooled.test.y), (central.x, central.truth)):
        assert y.tolist() == [row % 3 for row in rows(x)]
    assert pooled.keys["row"].tolist() == clients
    assert split_unlabeled(pooled, "test", seed=0)[1].ids == names(tested, train)
    rest, held_out = split_unlabeled(pooled, 1, seed=0) if kept > 1 else (pooled, None)
    assert held_out is None or set(rows(held_out.x)) <= set(clients) - set(rows(rest.train.x))


def test_the_arrangement_of_the_paper_has_its_sizes() -> None:
    """50,000 train and 10,000 test images: 20,000 for clients, of the other 40,000 8,000 to test, 32,000 unlabeled."""
    pooled = central_pool(numbered(50_000, 10_000), 20_000, test_share=0.2)
    assert (len(pooled.train.y), len(pooled.test.y), len(pooled.central.x)) == (20_000, 8_000, 32_000)
    former_test = np.mean(np.array(rows(pooled.test.x)) >= 50_000)
    assert former_test == pytest.approx(10_000 / 60_000, abs=0.02)  # as in the order of all rows, which it heads


def test_more_labels_for_clients_are_tested_on_the_same_rows() -> None:
    source = numbered(5_000, 1_000)
    few = central_pool(source, 2_000, test_share=0.2)  # 800 of 4,000
    more = central_pool(source, 4_000, test_share=0.4)  # 800 of 2,000
    assert rows(few.test.x) == rows(more.test.x)
    assert set(rows(few.train.x)) < set(rows(more.train.x))
    smaller = central_pool(source, 4_000, test_share=0.2)
    assert set(rows(smaller.test.x)) < set(rows(few.test.x))
    everything = central_pool(source, 5_000, test_share=0.2)  # not possible here: all train rows are the clients'
    assert min(rows(everything.test.x)) >= 5_000
    order = np.array(rows(few.test.x))
    assert np.std(np.histogram(order, bins=6, range=(0, 6_000))[0]) < 40  # drawn from all over: 133 each, give or take


def test_what_clients_cannot_leave_is_refused() -> None:
    assert "has 10 train rows" in fails(central_pool, numbered(10, 3), 11, test_share=0.2)
    assert "leaves 1 row" in fails(central_pool, numbered(10, 1), 10, test_share=0.2)
    assert "set data.client_rows" in fails(split_unlabeled, numbered(10, 3), "central", seed=0)


def test_a_limited_test_set_is_a_fixed_random_part() -> None:
    source = numbered(10, 1_000)
    part = limit_test(source, 100)
    tested = rows(part.test.x)
    assert len(set(tested)) == 100
    assert tested == sorted(tested)
    assert part.test.y.tolist() == [row % 3 for row in tested]
    assert 300 < np.mean(tested) - 10 < 700  # from all of it, not its first rows
    assert split_unlabeled(part, "test", seed=5)[1].ids == names(tested, 10)
    assert rows(limit_test(source, 100).test.x) == tested
    assert limit_test(source, 1_000) is source


@HYPOTHESIS
@given(train=st.integers(6, 80), seed=st.integers(0, 5), data=st.data())
def test_validation_rows_are_stratified_and_nobody_elses(train: int, seed: int, data: st.DataObject) -> None:
    source = numbered(train, 4)
    rest, unlabeled = split_unlabeled(source, data.draw(st.integers(1, train - 4)), seed=seed)
    count = data.draw(st.integers(1, len(rest.train.y) - 1))
    clients, (x, y) = hold_validation(rest, count, seed=seed)
    assert len(y) == count
    assert y.tolist() == [row % 3 for row in rows(x)]
    assert sorted(rows(x) + rows(clients.train.x) + rows(unlabeled.x)) == list(range(train))
    assert clients.keys["row"].tolist() == rows(clients.train.x)
    shares = np.bincount(rest.train.y, minlength=3) * count / len(rest.train.y)
    assert np.abs(np.bincount(y, minlength=3) - shares).max() <= 1
    again = hold_validation(rest, count, seed=seed)[1]
    assert torch.equal(again[0], x)


def test_validation_may_be_none_and_cannot_be_all() -> None:
    source = numbered(10, 3)
    assert hold_validation(source, 0, seed=0) == (source, None)
    assert "give 1 to 9" in fails(hold_validation, source, 10, seed=0)
    draws = {tuple(rows(hold_validation(source, 4, seed=seed)[1][0])) for seed in range(8)}
    assert len(draws) > 1


def grey_task() -> Source:
    return from_tensors(pictures(30, channels=1), np.arange(30) % 3, classes=("cat", "dog", "owl"))


def test_another_sources_test_split_takes_the_place_of_the_own(tmp_path: Path) -> None:
    names_ = {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["owl", "cat", "dog"]}}
    pixels = pictures(7, height=10, width=8, channels=1)
    for split, part, labels in (("train", slice(0, 4), [0, 1, 2, 0]), ("test", slice(4, 7), [0, 2, 1])):
        columns = {"img": [png(np.stack([p] * 3, -1)) for p in pixels[part]], "label": labels}
        write_parquet(tmp_path / "far" / f"{split}.parquet", columns, names_)
    task = grey_task()
    crossed = with_test_of(task, str(tmp_path / "far"))
    assert torch.equal(crossed.train.x, task.train.x)
    assert crossed.test.x.shape == (3, 1, 5, 4)
    halved = pixels[4:].reshape(3, 5, 2, 4, 2).mean((2, 4))
    assert np.abs(crossed.test.x[:, 0].numpy() - halved).mean() < 25  # bilinear, not a box: near, but not the same
    assert crossed.test.y.tolist() == [2, 1, 0]  # owl, dog, cat by the task's numbers
    assert crossed.test.classes == task.train.classes
    assert (crossed.test.mean, crossed.test.std) == (task.train.mean, task.train.std)
    assert crossed.test.name == "far"
    _, unlabeled = split_unlabeled(crossed, "test", seed=0)
    assert torch.equal(unlabeled.x, crossed.test.x)
    assert unlabeled.ids == ("test/0", "test/1", "test/2")
    assert unlabeled.truth.tolist() == [2, 1, 0]


def test_a_test_set_of_other_classes_is_refused(tmp_path: Path) -> None:
    image_folder(tmp_path / "two", {"cat": 4, "dog": 4}, channels=1)
    assert "(2) and of the task (3) differ in owl;" in fails(with_test_of, grey_task(), str(tmp_path / "two"))
    image_folder(tmp_path / "cow", {"cat": 4, "dog": 4, "cow": 4}, channels=1)
    assert "differ in cow, owl; give a set of the same classes" in fails(
        with_test_of, grey_task(), str(tmp_path / "cow")
    )
    assert "data.test: no such file" in fails(with_test_of, grey_task(), "./nowhere")
    image_folder(tmp_path / "own", {"cat": 4, "dog": 4, "owl": 4}, channels=1)
    assert "own dataset" in fails(with_test_of, load(tmp_path / "own"), str(tmp_path / "own"))


def test_another_table_is_tested_on_by_the_names_of_its_columns(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("a,b,ill\n" + "".join(f"{i},{'uv'[i % 2]},{i % 2}\n" for i in range(20)))
    (tmp_path / "south.csv").write_text("b,note,ill,a\n" + "".join(f"v,-,{i % 2},{-i}\n" for i in range(10)))
    task = load(tmp_path / "north.csv", label="ill")
    crossed = with_test_of(task, str(tmp_path / "south.csv"), label="ill")
    assert crossed.test.x.shape == (2, 3)  # a fifth, as always where there is no test split
    assert crossed.test.x[:, 1:].tolist() == [[0, 1], [0, 1]]
    assert (crossed.test.x[:, 0] <= 0).all()
    assert crossed.test.y.tolist() == [int(-a) % 2 for a in crossed.test.x[:, 0]]


def digits_of(**data: object) -> Experiment:
    return Experiment(cohort=2, data={"source": "digits", **data}, partition={"scheme": "iid", "clients": 4})


def test_seeds_share_one_test_set_and_differ_in_what_clients_and_server_hold() -> None:
    one = digits_of(client_rows=600, unlabeled="central", validation=50, test_limit=100)
    two = one.replace(seed=1)
    first, second = build_federation(one), build_federation(two)
    assert torch.equal(first.test.x, second.test.x)
    assert len(first.test.y) == 100
    assert first.unlabeled_ids == second.unlabeled_ids
    assert len(first.indices) == len(first.train.y) == 550
    assert len(first.validation[0]) == 50
    assert not torch.equal(first.validation[0], second.validation[0])
    assert len(first.unlabeled) == len(first.unlabeled_ids) == len(first.unlabeled_truth)
    # 1,797 digits: 600 for clients, of 1,197 others 239 to test (100 of them looked at) and 958 unlabeled
    assert len(first.unlabeled) == 1_797 - 600 - round(0.2 * 1_197)


def test_a_federation_is_the_same_from_a_source_that_was_loaded_before() -> None:
    one = digits_of(client_rows=600, unlabeled="central", unlabeled_limit=10)
    source = load_source(one)
    assert build_federation(one, source).unlabeled_ids == build_federation(one).unlabeled_ids
    assert len(source.central.ids) == 958


def test_rows_the_server_holds_do_not_change_by_asking_for_validation() -> None:
    plain, watched = (build_federation(digits_of(unlabeled=200, validation=count)) for count in (0, 20))
    assert plain.unlabeled_ids == watched.unlabeled_ids
    assert plain.validation is None
    assert len(watched.train.y) == len(plain.train.y) - 20


def test_places_are_written_by_their_full_path_and_words_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("test", "central", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for number, data in enumerate(({"unlabeled": "test", "test": "test"}, {"unlabeled": "central", "client_rows": 9})):
        write_description(digits_of(**data), tmp_path / "mine" / str(number))
    first, second = (read_description(tmp_path / "mine" / name).data for name in "01")
    assert (first.unlabeled, first.test) == ("test", str(tmp_path / "test"))
    assert (second.unlabeled, second.source) == ("central", "digits")


def test_files_that_a_run_cannot_read_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image_folder(tmp_path / "web", {"x": 3}, height=8, width=8, channels=1)
    (tmp_path / "web" / "x" / "1.png").write_bytes(b"?")
    with caplog.at_level(logging.WARNING, logger="fedstill.run"):
        federation = build_federation(digits_of(unlabeled=str(tmp_path / "web")))
    assert federation.unlabeled_ids == ("x/0.png", "x/2.png")
    assert "data.unlabeled: 1 of 3 files or rows cannot be read and are left out: x/1.png" in caplog.text
