"""Every way to give a dataset ends in the same Source; every wrong way ends in one line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import HUB_FEATURES, fails, hub_folder, image_folder, pictures, png, write_parquet
from PIL import Image

from fedstill.data import describe_datasets, load, owners

CIFAR10 = Path(__file__).parents[3] / "shared" / "data" / "cifar10"


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2)


def test_digits_keep_every_image_and_label() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    scaled = np.floor(bunch.images.reshape(1797, 64) * 255 / 16 + 0.5).astype(int)
    expected = sorted((*row, label) for row, label in zip(scaled.tolist(), bunch.target.tolist(), strict=True))
    source = load("digits")
    x = torch.cat([source.train.x, source.test.x]).reshape(1797, 64)
    y = torch.cat([source.train.y, source.test.y])
    assert sorted((*row, label) for row, label in zip(x.tolist(), y.tolist(), strict=True)) == expected
    assert source.train.x.shape[1:] == (1, 8, 8)
    assert source.train.classes == tuple("0123456789")


def test_fashion_mini_has_six_hundred_and_a_hundred_of_each_class() -> None:
    source = load("fashion_mini")
    assert torch.bincount(source.train.y).tolist() == [600] * 10
    assert torch.bincount(source.test.y).tolist() == [100] * 10
    assert source.train.x.dtype == torch.uint8
    assert source.train.mean == (0.2860,)  # of the full set, of which these are the first tenth
    assert source.train.x.float().mean().item() / 255 == pytest.approx(0.2860, abs=0.005)


def test_embedded_sets_take_the_same_options_as_files() -> None:
    source = load("digits", size=4)
    assert source.train.x.shape[1:] == (1, 4, 4)
    assert source.train.x.dtype == torch.uint8
    for small, image in zip(source.train.x[:50], load("digits").train.x[:50], strict=True):
        by_pillow = np.asarray(Image.fromarray(image[0].numpy()).resize((4, 4), Image.Resampling.BILINEAR))
        assert np.abs(small[0].numpy().astype(int) - by_pillow).max() <= 1
    assert "did you mean 'label'?" in fails(load, "digits", label="lable")
    assert "data.size" in fails(load, "digits", size=0)


def test_listing_is_true_of_what_is_loaded() -> None:
    listings = describe_datasets()
    for listing in listings:
        if listing.rows is not None:
            source = load(listing.name)
            assert (len(source.train.y), len(source.test.y)) == listing.rows
            assert tuple(source.train.x.shape[1:]) == listing.shape
            assert len(source.train.classes) == listing.classes
    assert {"digits", "fashion-mini"} <= {listing.name for listing in listings}
    assert any("hub id" in listing.summary for listing in listings)


@pytest.mark.parametrize("prefix", ["train", "train_subset"])
def test_hub_layout_parquet_gives_pixels_labels_and_class_names(tmp_path: Path, prefix: str) -> None:
    pixels, labels = hub_folder(tmp_path / "pets", prefix=prefix)
    source = load(tmp_path / "pets")
    assert np.array_equal(source.train.x, channels_first(pixels[:7]))
    assert np.array_equal(source.test.x, channels_first(pixels[7:]))
    assert source.train.y.tolist() == labels[:7].tolist()
    assert source.test.y.tolist() == labels[7:].tolist()
    assert source.train.classes == ("cat", "dog", "owl")
    assert source.train.name == "pets"
    assert source.notes == ()


def test_parquet_in_the_only_sub_folder_is_found(tmp_path: Path) -> None:
    hub_folder(tmp_path / "pets" / "plain_text")
    assert len(load(str(tmp_path / "pets")).train.y) == 7
    hub_folder(tmp_path / "pets" / "second")
    assert "plain_text, second" in fails(load, tmp_path / "pets")


def test_missing_shards_are_noted(tmp_path: Path) -> None:
    hub_folder(tmp_path / "pets")
    (tmp_path / "pets" / "train-00001-of-00002.parquet").unlink()
    source = load(tmp_path / "pets")
    assert len(source.train.y) == 4
    assert any("1 of 2 files" in note for note in source.notes)


def test_columns_beside_images_become_keys_of_the_train_rows(tmp_path: Path) -> None:
    pixels = pictures(10)
    columns = {
        "image": [png(p) for p in pixels],
        "label": [0, 1] * 5,
        "writer": [f"w{i // 3}" for i in range(10)],
        "room": list(range(10)),
        "score": [0.5] * 10,
        "essay": ["word " * 100] * 10,
    }
    write_parquet(tmp_path / "notes.parquet", columns)
    source = load(tmp_path / "notes.parquet")
    assert set(source.keys) == {"writer", "room"}
    originals = [p.tobytes() for p in channels_first(pixels)]
    rows = [originals.index(x.numpy().tobytes()) for x in source.train.x]
    assert source.keys["room"].tolist() == rows
    assert source.keys["writer"].tolist() == [f"w{row // 3}" for row in rows]
    assert owners(source, "writer", "room").tolist() == [f"w{row // 3} / {row}" for row in rows]
    assert "did you mean 'writer'?" in fails(owners, source, "writr")
    assert "data.keys" in fails(owners, load("digits"), "writer")


def test_a_source_without_test_split_holds_out_a_fifth_and_says_so(tmp_path: Path) -> None:
    columns = {"img": [png(p) for p in pictures(20)], "label": [0, 1, 2, 0, 1] * 4}
    write_parquet(tmp_path / "train.parquet", columns, HUB_FEATURES)
    source = load(tmp_path / "train.parquet")
    assert (len(source.train.y), len(source.test.y)) == (16, 4)
    assert any("4 of 20 rows" in note for note in source.notes)
    again = load(tmp_path / "train.parquet", refresh=True)
    assert torch.equal(source.test.x, again.test.x)
    other = load(tmp_path / "train.parquet", seed=1)
    assert not torch.equal(source.test.x, other.test.x)


def test_validation_stands_in_for_a_test_split_and_others_are_left_out(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("validation", 3), ("extra", 2)):
        columns = {"img": [png(p) for p in pictures(count)], "label": [0, 1, 2] * (count // 3) or [0] * count}
        write_parquet(tmp_path / "set" / f"{split}.parquet", columns, HUB_FEATURES)
    source = load(tmp_path / "set")
    assert (len(source.train.y), len(source.test.y)) == (6, 3)
    assert any("'validation'" in note for note in source.notes)
    assert any("extra" in note for note in source.notes)


def test_hidden_test_labels_are_not_used(tmp_path: Path) -> None:
    images = [png(p) for p in pictures(10)]
    write_parquet(tmp_path / "set" / "train.parquet", {"img": images, "label": [0, 1] * 5}, HUB_FEATURES)
    write_parquet(tmp_path / "set" / "test.parquet", {"img": images, "label": [-1] * 10}, HUB_FEATURES)
    source = load(tmp_path / "set")
    assert len(source.train.y) + len(source.test.y) == 10
    assert any("no labels" in note for note in source.notes)


def test_two_label_columns_ask_for_data_label(tmp_path: Path) -> None:
    kinds = {"_type": "ClassLabel", "names": ["a", "b"]}
    columns = {"img": [png(p) for p in pictures(10)], "fine": [0, 1] * 5, "coarse": [0] * 5 + [1] * 5}
    write_parquet(tmp_path / "two.parquet", columns, {"fine": kinds, "coarse": kinds})
    text = fails(load, tmp_path / "two.parquet")
    assert "data.label" in text
    assert "fine" in text
    assert "coarse" in text
    source = load(tmp_path / "two.parquet", label="coarse")
    assert set(source.keys) == {"fine"}
    assert "did you mean 'coarse'?" in fails(load, tmp_path / "two.parquet", label="coarce")


def test_image_folder_with_class_folders(tmp_path: Path) -> None:
    written = image_folder(tmp_path / "zoo", {"owl": 5, "cat": 10, "10": 5})
    (tmp_path / "zoo" / "readme.txt").write_text("not an image")
    source = load(tmp_path / "zoo")
    assert source.train.classes == ("10", "cat", "owl")
    assert (len(source.train.y), len(source.test.y)) == (16, 4)
    for x, y in zip(source.train.x, source.train.y, strict=True):
        assert any(np.array_equal(x, p.transpose(2, 0, 1)) for p in written[source.train.classes[y]])


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_image_folder_with_splits_keeps_them_apart(tmp_path: Path, held_out: str) -> None:
    layout = {"train/cat": 3, "train/owl": 2, f"{held_out}/owl": 1, f"{held_out}/cat": 1}
    written = image_folder(tmp_path / "zoo", layout, channels=1)
    source = load(tmp_path / "zoo")
    assert source.train.classes == ("cat", "owl")
    expected = np.concatenate([written["train/cat"], written["train/owl"]])[:, None]
    assert np.array_equal(source.train.x, expected)
    assert source.test.y.tolist() == [0, 1]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    image_folder(tmp_path / "vehicles", {"train": 5, "tram": 5})
    assert load(tmp_path / "vehicles").train.classes == ("train", "tram")


def test_numbered_class_folders_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    image_folder(tmp_path / "zoo", {str(i): 2 for i in range(11)})
    assert load(tmp_path / "zoo").train.classes == tuple(str(i) for i in range(11))


def test_images_without_class_folder_have_no_label(tmp_path: Path) -> None:
    image_folder(tmp_path / "zoo", {"a": 2})
    (tmp_path / "zoo" / "stray.png").write_bytes(png(pictures(1)[0]))
    assert "stray.png" in fails(load, tmp_path / "zoo")


@pytest.mark.parametrize(
    "names",
    [("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels")],
)
def test_npz_in_the_layouts_of_keras_and_medmnist(tmp_path: Path, names: tuple[str, ...]) -> None:
    pixels = pictures(8)
    arrays = (pixels[:6], np.array([[3], [5], [3], [5], [5], [3]]), pixels[6:], np.array([[5], [3]]))
    np.savez(tmp_path / "set.npz", **dict(zip(names, arrays, strict=True)))
    source = load(tmp_path / "set.npz")
    assert np.array_equal(source.train.x, channels_first(pixels[:6]))
    assert source.train.classes == ("3", "5")
    assert source.train.y.tolist() == [0, 1, 0, 1, 1, 0]
    assert source.test.y.tolist() == [1, 0]


def test_npz_with_other_names_says_what_is_expected(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", data=np.zeros((3, 2)))
    text = fails(load, tmp_path / "set.npz")
    assert "data" in text
    assert "x_train,y_train" in text
    (tmp_path / "bad.npz").write_bytes(b"not a zip")
    assert "bad.npz" in fails(load, tmp_path / "bad.npz")


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


def test_a_path_that_does_not_exist_never_goes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for missing in (tmp_path / "none", "./cifar10", "../x/y", "data/cifar10", "table.csv", "a/b/c", Path("cifar10")):
        told = fails(load, missing)
        assert "no such file or folder" in told
        assert ("from the current folder" in told) is not Path(missing).is_absolute()
    assert "holds no parquet, CSV, JSON lines or image files" in fails(load, tmp_path / "data")
    (tmp_path / "data" / "x.bin").write_bytes(b"?")
    assert ".parquet" in fails(load, tmp_path / "data" / "x.bin")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'fedstill[data]'" in fails(load, "uoft-cs/cifar10")


def test_an_unreachable_hub_is_one_quick_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read from the environment at import
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    text = fails(load, "digitz")
    assert time.monotonic() - start < 5
    for words in ("data.source", "'digitz'", "embedded", "file or folder", "hub", "did you mean 'digits'?"):
        assert words in text


def test_a_hub_id_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub

    asked = []

    def hub(repository: str, configuration: str | None) -> datasets.DatasetDict:
        asked.append((repository, configuration))
        rows = {"x1": [0.0, 1.0] * 10, "label": [0, 1] * 10}
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    first = load("someone/coins:small", cache_dir=tmp_path / "c")
    second = load("someone/coins:small", cache_dir=tmp_path / "c")
    assert asked == [("someone/coins", "small")]
    assert torch.equal(first.train.x, second.train.x)
    assert second.train.name == "coins"
    load("someone/coins:small", cache_dir=tmp_path / "c", refresh=True)
    assert len(asked) == 2


def test_unreadable_parquet_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").symlink_to(tmp_path / "gone.parquet")
    assert "cannot read" in fails(load, tmp_path / "set")
    assert "cannot read" in fails(load, "x" * 5000)
    assert "empty" in fails(load, " ")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 nonsense")
    assert "not readable parquet" in fails(load, tmp_path / "train.parquet")


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR10.exists(), reason="the real CIFAR-10 is not here")
def test_cifar10_is_decoded_once(tmp_path: Path) -> None:
    start = time.monotonic()
    first = load(CIFAR10, cache_dir=tmp_path)
    middle = time.monotonic()
    second = load(CIFAR10, cache_dir=tmp_path)
    assert time.monotonic() - middle < (middle - start) / 4
    for source in (first, second):
        assert source.train.x.shape == (50_000, 3, 32, 32)
        assert torch.bincount(source.train.y).tolist() == [5_000] * 10
        assert torch.bincount(source.test.y).tolist() == [1_000] * 10
        assert source.train.classes[0] == "airplane"
    measured = (second.train.x[:, 0].double() / 255).mean().item()
    assert measured == pytest.approx(second.train.mean[0], abs=1e-4)
    assert torch.equal(first.train.x, second.train.x)
