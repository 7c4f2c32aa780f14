"""Which rows are tested on, held by the server, left to the clients: no row is in two hands."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import HYPOTHESIS, fails, hub_folder, image_folder, pictures, png, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data import (
    Source,
    central_pool,
    from_tensors,
    hold_validation,
    images,
    limit_test,
    load,
    read_unlabeled,
    split_unlabeled,
    with_test_of,
)
from fedstill.data.split import match_storage


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


def test_another_sources_test_split_takes_the_place_of_the_own(tmp_path: Path, grey: Source) -> None:
    names_ = {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["owl", "cat", "dog"]}}
    pixels = pictures(7, height=10, width=8, channels=1)
    for split, part, labels in (("train", slice(0, 4), [0, 1, 2, 0]), ("test", slice(4, 7), [0, 2, 1])):
        columns = {"img": [png(np.stack([p] * 3, -1)) for p in pixels[part]], "label": labels}
        write_parquet(tmp_path / "far" / f"{split}.parquet", columns, names_)
    crossed = with_test_of(grey, str(tmp_path / "far"))
    assert torch.equal(crossed.train.x, grey.train.x)
    assert crossed.test.x.shape == (3, 1, 5, 4)
    halved = pixels[4:].reshape(3, 5, 2, 4, 2).mean((2, 4))
    assert np.abs(crossed.test.x[:, 0].numpy() - halved).mean() < 25  # bilinear, not a box: near, but not the same
    assert crossed.test.y.tolist() == [2, 1, 0]  # owl, dog, cat by the task's numbers
    assert crossed.test.classes == grey.train.classes
    assert (crossed.test.mean, crossed.test.std) == (grey.train.mean, grey.train.std)
    assert crossed.test.name == "far"
    _, unlabeled = split_unlabeled(crossed, "test", seed=0)
    assert torch.equal(unlabeled.x, crossed.test.x)
    assert unlabeled.ids == ("test/0", "test/1", "test/2")
    assert unlabeled.truth.tolist() == [2, 1, 0]


def test_a_test_set_of_other_classes_is_refused(tmp_path: Path, grey: Source) -> None:
    image_folder(tmp_path / "two", {"cat": 4, "dog": 4}, channels=1)
    assert "(2) and of the task (3) differ in owl;" in fails(with_test_of, grey, str(tmp_path / "two"))
    image_folder(tmp_path / "cow", {"cat": 4, "dog": 4, "cow": 4}, channels=1)
    assert "differ in cow, owl; give a set of the same classes" in fails(with_test_of, grey, str(tmp_path / "cow"))
    assert "data.test: no such file" in fails(with_test_of, grey, "./nowhere")
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


def counted(rows: int) -> Source:
    """Every input is the number of its row, so that rows can be followed."""
    x = np.arange(rows, dtype=np.float32)[:, None]
    source = from_tensors(x, np.arange(rows) % 3, test=(-x[:4] - 1, [0, 1, 2, 0]))
    return source._replace(keys={"row": np.arange(rows)})


@HYPOTHESIS
@given(rows=st.integers(4, 60), seed=st.integers(0, 5), data=st.data())
def test_held_out_rows_are_in_nobody_elses_hands(rows: int, seed: int, data: st.DataObject) -> None:
    source = counted(rows)
    count = data.draw(st.integers(1, rows - 1))
    rest, unlabeled = split_unlabeled(source, count, seed=seed)
    assert unlabeled is not None
    kept, taken = set(rest.train.x[:, 0].int().tolist()), set(unlabeled.x[:, 0].int().tolist())
    assert len(taken) == len(unlabeled.x) == count
    assert unlabeled.ids == tuple(f"train/{row}" for row in sorted(taken))
    assert unlabeled.truth.tolist() == [row % 3 for row in sorted(taken)]
    assert kept.isdisjoint(taken)
    assert kept | taken == set(range(rows))
    assert rest.keys["row"].tolist() == rest.train.x[:, 0].int().tolist()
    assert rest.train.y.tolist() == (rest.train.x[:, 0].int() % 3).tolist()
    assert torch.equal(rest.test.x, source.test.x)
    again = split_unlabeled(source, str(count), seed=seed)[1]
    assert again is not None
    assert torch.equal(unlabeled.x, again.x)


def test_none_and_the_test_inputs() -> None:
    source = counted(10)
    assert split_unlabeled(source, "none", seed=0) == (source, None)
    rest, unlabeled = split_unlabeled(source, "test", seed=0)
    assert rest is source
    assert torch.equal(unlabeled.x, source.test.x)
    assert unlabeled.ids == ("test/0", "test/1", "test/2", "test/3")
    assert unlabeled.truth.tolist() == [0, 1, 2, 0]
    limited = split_unlabeled(source, "test", seed=0, limit=2)[1]
    assert len(limited.x) == len(limited.ids) == len(limited.truth) == 2
    for x, name, label in zip(limited.x, limited.ids, limited.truth, strict=True):
        row = int(name.removeprefix("test/"))
        assert torch.equal(x, source.test.x[row])
        assert label == source.test.y[row]


def test_what_cannot_be_held_out_is_refused() -> None:
    source = counted(10)
    for choice in (10, 11, -1, True):
        assert "1 to 9" in fails(split_unlabeled, source, choice, seed=0)
    assert "data.unlabeled: no such file or folder" in fails(split_unlabeled, source, "./nowhere", seed=0)


TABLE = "colour,size,weight,kind\n" + "".join(
    f"{('red', 'blue', 'green')[i % 3]},{i},{i / 4},{'ab'[i % 2]}\n" for i in range(20)
)


@pytest.fixture
def grey() -> Source:
    """A task of grey pictures, 5 high and 4 wide, with the classes cat, dog, owl."""
    return from_tensors(pictures(30, channels=1), np.arange(30) % 3, classes=("cat", "dog", "owl"))


@pytest.fixture
def table(tmp_path: Path) -> Source:
    (tmp_path / "task.csv").write_text(TABLE)
    return load(tmp_path / "task.csv", label="kind")


def folder_of(root: Path, names: list[str], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Grey pictures of the task's size under these paths; returns their pixels by name."""
    root.mkdir(exist_ok=True)
    written = dict(zip(names, pictures(len(names), channels=1, seed=seed), strict=True))
    for name, pixels in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(pixels))
    return written


@HYPOTHESIS
@given(names=st.sets(st.from_regex(r"\A([a-z]{1,2}/){0,2}[a-z0-9]{1,3}\.(png|PNG)\Z"), min_size=1, max_size=12))
def test_every_file_comes_once_under_its_path_with_its_own_pixels(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    task = from_tensors(pictures(6, channels=1), [0, 1, 0, 1, 0, 1])
    root = tmp_path_factory.mktemp("mine")
    written = folder_of(root, sorted(names))
    found = read_unlabeled(str(root), task)
    assert found.ids == tuple(sorted(names))
    assert np.array_equal(found.x[:, 0], np.stack([written[name] for name in found.ids]))
    assert found.truth is None
    assert found.skipped == ()


def test_what_cannot_be_read_is_named_and_the_rest_comes(tmp_path: Path, grey: Source) -> None:
    written = folder_of(tmp_path / "mine", ["b/2.png", "a.png", "b/1.png", "c.png"])
    (tmp_path / "mine" / "b" / "1.png").write_bytes(b"no image")
    whole = (tmp_path / "mine" / "c.png").read_bytes()
    (tmp_path / "mine" / "c.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "mine" / "photo.heic").write_bytes(b"?")
    (tmp_path / "mine" / "b" / "broken-link.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "mine" / ".hidden.png").write_bytes(b"?")
    found = read_unlabeled(str(tmp_path / "mine"), grey)
    assert found.ids == ("a.png", "b/2.png")
    assert np.array_equal(found.x[:, 0], np.stack([written["a.png"], written["b/2.png"]]))
    assert set(found.skipped) == {"b/1.png", "c.png", "b/broken-link.png", "photo.heic"}


def test_a_folder_with_nothing_to_read_is_an_error(tmp_path: Path, grey: Source) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no parquet, CSV, JSON lines or image files" in fails(read_unlabeled, str(tmp_path / "empty"), grey)
    (tmp_path / "empty" / "a.png").write_bytes(b"?")
    (tmp_path / "empty" / "b.png").write_bytes(b"")
    told = fails(read_unlabeled, str(tmp_path / "empty"), grey)
    assert told.startswith("data.unlabeled:")
    assert "no readable image (2 tried)" in told
    assert "data.unlabeled: no such file or folder" in fails(read_unlabeled, str(tmp_path / "none"), grey)


def test_links_inside_a_folder_are_followed_and_hidden_folders_are_left_out(tmp_path: Path, grey: Source) -> None:
    folder_of(tmp_path / "mine", ["a/y.png", ".thumbs/z.png"])
    (tmp_path / "mine" / "linked").symlink_to(tmp_path / "mine" / "a")
    found = read_unlabeled(str(tmp_path / "mine"), grey)
    assert found.ids == ("a/y.png", "linked/y.png")
    assert found.skipped == ()


def test_a_list_of_the_images_is_not_taken_for_the_data(tmp_path: Path, grey: Source) -> None:
    folder_of(tmp_path / "mine", ["a.png", "b.png"])
    (tmp_path / "mine" / "list.csv").write_text("file,note\na.png,good\nb.png,bad\n")
    found = read_unlabeled(str(tmp_path / "mine"), grey)
    assert found.ids == ("a.png", "b.png")
    assert found.skipped == ("list.csv",)


def test_a_parquet_list_of_the_images_is_not_taken_for_the_data(tmp_path: Path, grey: Source) -> None:
    written = folder_of(tmp_path / "mine", ["a.png", "b.png"])
    write_parquet(tmp_path / "mine" / "list.parquet", {"file": ["a.png", "b.png"], "note": ["good", "bad"]})
    write_parquet(tmp_path / "mine" / "thumbs" / "small.parquet", {"image": [png(written["a.png"])]})
    found = read_unlabeled(str(tmp_path / "mine"), grey)
    assert found.ids == ("a.png", "b.png")
    assert np.array_equal(found.x[:, 0], np.stack([written["a.png"], written["b.png"]]))
    assert found.skipped == ("list.parquet", "thumbs/small.parquet")
    write_parquet(tmp_path / "mine" / "train-00000-of-00001.parquet", {"image": [png(written["b.png"])]})
    found = read_unlabeled(str(tmp_path / "mine"), grey)  # a dataset, with pictures that show what is in it
    assert np.array_equal(found.x[:, 0], [written["b.png"]])
    assert found.skipped == ("a.png", "b.png")


def test_a_number_is_rows_and_a_name_an_embedded_set_unless_written_as_a_path(
    tmp_path: Path, grey: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("3", "digits"):
        folder_of(tmp_path / folder, ["a.png"])
        assert split_unlabeled(grey, f"./{folder}", seed=0)[1].ids == ("a.png",)
        assert read_unlabeled(Path(folder), grey).ids == ("a.png",)
    assert len(split_unlabeled(grey, "3", seed=0)[1].x) == 3
    assert len(split_unlabeled(grey, "digits", seed=0)[1].x) == 1797


def test_a_folder_that_changed_is_read_again_and_another_is_not(
    tmp_path: Path, grey: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = images.image_pixels
    monkeypatch.setattr(images, "image_pixels", lambda *args: (decoded.append(1), decode(*args))[1])
    root = tmp_path / "mine"
    folder_of(root, ["a.png", "b.png"])
    (root / "b.png").write_bytes(b"?")

    def read() -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = read_unlabeled(str(root), grey)
        assert len(found.x) == len(found.ids)
        return found.ids, found.skipped

    assert read() == read() == (("a.png",), ("b.png",))
    assert len(decoded) == 2
    (root / "notes.txt").write_text("beside the images")
    assert read() == (("a.png",), ("b.png", "notes.txt"))
    assert len(decoded) == 2
    folder_of(root, ["b.png"], seed=1)
    assert read() == (("a.png", "b.png"), ("notes.txt",))
    (root / "a.png").rename(root / "c.png")
    assert read() == (("b.png", "c.png"), ("notes.txt",))
    newer = pictures(1, channels=1, seed=2)[0]
    (root / "c.png").write_bytes(png(newer))
    os.utime(root / "c.png", ns=(5, 5))  # a clock may be coarse
    assert np.array_equal(read_unlabeled(str(root), grey).x[1, 0], newer)
    (root / "b.png").unlink()
    assert read() == (("c.png",), ("notes.txt",))


def test_images_in_parquet_are_named_by_their_id_or_their_row(tmp_path: Path, grey: Source) -> None:
    pixels = pictures(4, channels=1)
    blobs = [png(p) for p in pixels]
    blobs[1] = b"broken"
    write_parquet(tmp_path / "bare.parquet", {"picture": blobs})
    bare = read_unlabeled(str(tmp_path / "bare.parquet"), grey)
    assert bare.ids == ("0", "2", "3")
    assert bare.skipped == ("1",)
    assert np.array_equal(bare.x[:, 0], pixels[[0, 2, 3]])
    write_parquet(tmp_path / "named.parquet", {"picture": blobs, "id": [10, 7, 9, 8]})
    named = read_unlabeled(str(tmp_path / "named.parquet"), grey)
    assert named.ids == ("8", "9", "10")  # numbers by size
    assert named.skipped == ("7",)
    assert np.array_equal(named.x[:, 0], pixels[[3, 2, 0]])


def test_truth_and_names_stay_with_their_rows_when_a_part_is_drawn(tmp_path: Path, grey: Source) -> None:
    image_folder(tmp_path / "same", {"owl": 9, "cat": 9, "dog": 9}, channels=1)
    whole = read_unlabeled(str(tmp_path / "same"), grey)
    _, part = split_unlabeled(grey, str(tmp_path / "same"), seed=0, limit=5)
    assert len(part.x) == 5
    for x, name, label in zip(part.x, part.ids, part.truth.tolist(), strict=True):
        assert torch.equal(x, whole.x[whole.ids.index(name)])
        assert name.startswith(grey.train.classes[label])


def test_rows_are_named_as_in_the_file_they_came_from(tmp_path: Path, table: Source) -> None:
    """A table without a test split is cut in two; both parts count the rows of the one file."""
    lines = TABLE.splitlines()[1:]
    _, tested = split_unlabeled(table, "test", seed=0)
    _, held_out = split_unlabeled(table, 5, seed=0)
    for part, split in ((tested, "test"), (held_out, "train")):
        for x, name, label in zip(part.x, part.ids, part.truth, strict=True):
            _, size, _, kind = lines[int(name.removeprefix(f"{split}/"))].split(",")
            assert x[3] == float(size)
            assert table.train.classes[label] == kind
    again = load(tmp_path / "task.csv", label="kind")  # from the cache
    assert split_unlabeled(again, "test", seed=0)[1].ids == tested.ids
    assert again.train.columns == table.train.columns


def test_rows_of_the_digits_are_named_as_scikit_learn_numbers_them() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    _, tested = split_unlabeled(load("digits"), "test", seed=0, limit=20)
    for name, label in zip(tested.ids, tested.truth.tolist(), strict=True):
        assert bunch.target[int(name.removeprefix("test/"))] == label


def test_the_clients_own_dataset_is_not_taken_as_another_one(tmp_path: Path) -> None:
    assert "own dataset" in fails(split_unlabeled, load("digits"), "digits", seed=0)
    hub_folder(tmp_path / "pets")
    source = load(tmp_path / "pets")
    assert "own dataset" in fails(split_unlabeled, source, f"{tmp_path}/../{tmp_path.name}/pets", seed=0)


# Another source in the form of the task: pixels, columns, words and classes.


def test_fractions_beside_bytes_must_lie_between_0_and_1(tmp_path: Path) -> None:
    grey = from_tensors(pictures(6, channels=1), np.arange(6) % 2)
    pixels = pictures(3, channels=1)
    np.savez(tmp_path / "one.npz", x=pixels / 255.0)
    assert np.array_equal(read_unlabeled(str(tmp_path / "one.npz"), grey).x[:, 0], pixels)
    for scale in (1.0, 16 / 255):
        np.savez(tmp_path / "other.npz", x=pixels * scale + 0.5)
        told = fails(read_unlabeled, str(tmp_path / "other.npz"), grey)
        assert told.startswith("data.unlabeled: pixels of")
        assert "scale them to [0, 1] or give bytes (uint8)" in told
    np.savez(tmp_path / "other.npz", x=pixels / 255.0 - 0.5)  # centred
    assert "scale them to [0, 1]" in fails(read_unlabeled, str(tmp_path / "other.npz"), grey)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(png(pixels[0]))
    scaled = from_tensors(pictures(6, channels=1) / 255.0, np.arange(6) % 2)
    assert read_unlabeled(str(tmp_path / "mine"), scaled).x.max() <= 1.0
    large = from_tensors(pictures(6, channels=1) * 1.0, np.arange(6) % 2)
    assert "pixels of the task" in fails(read_unlabeled, str(tmp_path / "mine"), large)


def test_colour_becomes_grey_by_luma_as_in_pillow() -> None:
    from PIL import Image

    pixels = pictures(20)
    x = match_storage(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), torch.zeros(1, 1, 5, 4, dtype=torch.uint8))
    for got, image in zip(x, pixels, strict=True):
        wanted = np.asarray(Image.fromarray(image).convert("L")).astype(int)
        assert np.abs(got[0].numpy().astype(int) - wanted).max() <= 1


def test_halving_an_image_averages_it_and_keeps_flat_areas() -> None:
    flat = torch.full((2, 3, 8, 8), 77, dtype=torch.uint8)
    like = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    assert (match_storage(flat, like) == 77).all()
    board = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    board[:, :, ::2] = 200  # stripes of one pixel: antialiasing must not keep one of the two
    small = match_storage(board, torch.zeros(1, 1, 4, 4, dtype=torch.uint8))
    assert (small[:, :, 1:-1] - 100.0).abs().max() <= 26
    as_float = match_storage(flat, torch.zeros(1, 1, 8, 8))
    assert as_float.dtype == torch.float32
    assert as_float.max().item() == pytest.approx(77 / 255, abs=1e-3)


def test_an_image_comes_out_the_same_whatever_lies_beside_it(tmp_path: Path, grey: Source) -> None:
    wide, tall, small = np.zeros((10, 40), np.uint8), pictures(1, height=30, width=9)[0], pictures(1, channels=1)[0]
    wide[:, 16:24] = 50  # 10 x 8 has the proportions of 5 x 4
    (tmp_path / "all").mkdir()
    for name, pixels in (("wide", wide), ("tall", tall), ("small", small)):
        (tmp_path / name).mkdir()
        for folder in (name, "all"):
            (tmp_path / folder / f"{name}.png").write_bytes(png(pixels))
    together = read_unlabeled(str(tmp_path / "all"), grey)
    assert together.ids == ("small.png", "tall.png", "wide.png")
    assert together.x.shape == (3, 1, 5, 4)
    assert np.array_equal(together.x[0, 0], small)
    assert (together.x[2] == 50).all()
    for row, name in enumerate(("small", "tall", "wide")):
        alone = read_unlabeled(str(tmp_path / name), grey)
        assert torch.equal(alone.x[0], together.x[row])
        one_file = read_unlabeled(str(tmp_path / name / f"{name}.png"), grey)
        assert torch.equal(one_file.x[0], together.x[row])
        assert one_file.ids == (f"{name}.png",)


def test_a_table_is_matched_by_the_names_of_the_columns(tmp_path: Path, table: Source) -> None:
    new = tmp_path / "new.csv"
    new.write_text("note,weight,colour,size\nfree text here,1.5,green,7\nand more,0.5,blue,3\n")
    found = read_unlabeled(str(new), table)
    assert [column.name for column in table.train.columns] == ["colour", "size", "weight"]
    assert table.train.columns[0].words == ("blue", "green", "red")  # though only two of them are in the new file
    assert found.x.tolist() == [[0.0, 1.0, 0.0, 7.0, 1.5], [1.0, 0.0, 0.0, 3.0, 0.5]]
    assert found.x.dtype == table.train.x.dtype
    assert found.ids == ("0", "1")
    assert found.truth is None
    everything = read_unlabeled(str(tmp_path / "task.csv"), table)  # what it learnt from, read as new data
    rows = table.rows["train"].tolist()
    assert torch.equal(everything.x[rows], table.train.x)
    assert torch.equal(everything.x[table.rows["test"].tolist()], table.test.x)


def test_words_that_look_like_numbers_in_the_new_file_stay_words(tmp_path: Path) -> None:
    (tmp_path / "task.csv").write_text("code,y\n" + "01,a\n1,b\nx,a\n" * 5)
    task = load(tmp_path / "task.csv", label="y")
    (tmp_path / "new.csv").write_text("code\n1\n01\n")
    assert task.train.columns[0].words == ("01", "1", "x")
    assert read_unlabeled(str(tmp_path / "new.csv"), task).x.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("size,weight\n1,2\n", "no column 'colour'"),
        ("Colour,size,weight\nred,1,2\n", "did you mean 'Colour'?"),
        ("colour,size,weight\nred,1,2\nviolet,1,2\n", "'violet' in row 2 (counted from 1)"),
        (
            "colour,size,weight\nred,big,2\n",
            "column 'size' of new must hold numbers, as the task does, but holds 'big' in row 1 ",
        ),
        ("colour,size,weight\nred,,2\n", "has no value in row 1"),
        ("colour,size,weight\n", "no rows"),
    ],
)
def test_a_table_that_does_not_fit_is_told_what_is_wrong(tmp_path: Path, table: Source, text: str, told: str) -> None:
    (tmp_path / "new.csv").write_text(text)
    message = fails(read_unlabeled, str(tmp_path / "new.csv"), table)
    assert message.startswith("data.unlabeled:")
    assert told in message


def test_kinds_that_cannot_become_the_tasks_are_refused(tmp_path: Path, table: Source, grey: Source) -> None:
    folder_of(tmp_path / "mine", ["a.png"])
    assert "no column 'colour'" in fails(read_unlabeled, str(tmp_path / "mine"), table)
    (tmp_path / "mine" / "a.png").unlink()
    (tmp_path / "mine" / "t.csv").write_text("a,b\n1,x\n")
    assert "holds no images" in fails(read_unlabeled, str(tmp_path / "mine"), grey)
    (tmp_path / "plays.csv").write_text("text\n" + "to be or not to be that is the question\n" * 4)
    text = load(tmp_path / "plays.csv", window=5)
    assert "a task that reads characters" in fails(read_unlabeled, str(tmp_path / "plays.csv"), text)


def test_vectors_are_matched_by_name_and_length(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    task = from_tensors(x, np.arange(20) % 2)
    np.savez(tmp_path / "new.npz", x=x[:4])
    assert np.array_equal(read_unlabeled(str(tmp_path / "new.npz"), task).x, x[:4])
    np.savez(tmp_path / "long.npz", x=np.zeros((4, 5)))
    assert "(5,), the task's of (3,)" in fails(read_unlabeled, str(tmp_path / "long.npz"), task)


def test_labels_are_the_truth_where_classes_have_the_same_names(tmp_path: Path, grey: Source) -> None:
    image_folder(tmp_path / "same", {"owl": 2, "cat": 1, "dog": 1}, channels=1)
    found = read_unlabeled(str(tmp_path / "same"), grey)
    assert found.ids == ("cat/0.png", "dog/0.png", "owl/0.png", "owl/1.png")
    assert found.truth.tolist() == [0, 1, 2, 2]
    image_folder(tmp_path / "some", {"owl": 1, "cat": 1}, channels=1)
    assert read_unlabeled(str(tmp_path / "some"), grey).truth.tolist() == [0, 2]
    image_folder(tmp_path / "others", {"owl": 1, "camera 1": 1}, channels=1)
    assert read_unlabeled(str(tmp_path / "others"), grey).truth is None
    features = {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["owl", "cat", "dog"]}}
    blobs = [png(p) for p in pictures(3, channels=1)]
    write_parquet(tmp_path / "turned.parquet", {"img": blobs, "label": [0, 2, 1]}, features)
    assert read_unlabeled(str(tmp_path / "turned.parquet"), grey).truth.tolist() == [2, 1, 0]
    write_parquet(tmp_path / "hidden.parquet", {"img": blobs, "label": [-1, -1, -1]}, features)
    assert read_unlabeled(str(tmp_path / "hidden.parquet"), grey).truth is None


def test_the_tasks_own_label_column_is_the_truth_wherever_it_is_there(tmp_path: Path, table: Source) -> None:
    new = tmp_path / "new.csv"
    new.write_text("colour,size,weight,kind,label\nred,1,1,b,low\nred,2,2,a,high\n")  # 'label' is another's
    assert read_unlabeled(str(new), table).truth.tolist() == [1, 0]
    new.write_text("colour,size,weight,kind\nred,1,1,b\nred,2,2,b\n")  # some of the classes
    assert read_unlabeled(str(new), table).truth.tolist() == [1, 1]
    new.write_text("colour,size,weight,kind\nred,1,1,b\nred,2,2,c\n")
    assert read_unlabeled(str(new), table).truth is None
    new.write_text("colour,size,weight,class\nred,1,1,b\n")  # called like one, and holding the classes
    assert read_unlabeled(str(new), table).truth.tolist() == [1]


def test_a_class_called_unlabeled_is_not_the_truth_of_samples_without_labels(tmp_path: Path) -> None:
    task = from_tensors(pictures(6, channels=1), np.arange(6) % 2, classes=("unlabeled", "labeled"))
    folder_of(tmp_path / "mine", ["a.png", "b.png"])
    assert read_unlabeled(str(tmp_path / "mine"), task).truth is None


def test_another_dataset_is_recoloured_and_resized(tmp_path: Path) -> None:
    hub_folder(tmp_path / "pets")
    colour, digits = load(tmp_path / "pets"), load("digits")
    rest, found = split_unlabeled(digits, str(tmp_path / "pets"), seed=0)
    assert rest is digits
    assert found.x.shape == (9, 1, 8, 8)  # all rows: train and test
    assert found.x.dtype == torch.uint8
    assert found.ids == ("test/0", "test/1", *(f"train/{row}" for row in range(7)))
    _, found = split_unlabeled(colour, "digits", seed=0, limit=100)
    assert found.x.shape == (100, 3, 5, 4)
    assert torch.equal(found.x[:, 0], found.x[:, 2])
