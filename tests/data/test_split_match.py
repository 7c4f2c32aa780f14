"""Another source in the form of the task: pixels, columns, words and classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import fails, hub_folder, image_folder, pictures, png, write_parquet

from fedstill.data import Source, from_tensors, load, read_unlabeled, split_unlabeled
from fedstill.data.split import match_storage


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


TABLE = "colour,size,weight,kind\n" + "".join(
    f"{('red', 'blue', 'green')[i % 3]},{i},{i / 4},{'ab'[i % 2]}\n" for i in range(20)
)


@pytest.fixture
def grey() -> Source:
    """A task of grey pictures, 5 high and 4 wide, with the classes cat, dog, owl."""
    x = pictures(30, channels=1)
    return from_tensors(x, np.arange(30) % 3, classes=("cat", "dog", "owl"))


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
    assert [column.name for column in table.columns] == ["colour", "size", "weight"]
    assert table.columns[0].words == ("blue", "green", "red")  # though only two of them are in the new file
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
    assert task.columns[0].words == ("01", "1", "x")
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
